"""Whether the hosts' memory holds what a load takes, beside what other loads were promised and have not taken. Pure.

    need of a node = tensors of its CPU ranks, less what workers kept for them + processes to be started + a new arena
    claim          = the same of a load that is still at it, less what it has placed
    of each pool   the needs of all nodes that take from it, and all claims on it, fit beyond the reserve

A pool (`storage.host.memory`) is a host's memory or that of a container around the node; nodes on one host
share it. Whoever took more would be ended by the kernel, or by Ray, which kills workers of a host that is nearly full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.config import Config
from cluster.scheduling.topology import NodeInfo
from cluster.units import show_bytes, show_some
from storage.host.memory import MemoryPool

WORKER_BYTES = 300 << 20  # of a worker's process before the first byte of a model: Ray and torch


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """Host memory that a load is about to take on a node."""

    ranks: int
    tensor_bytes: int  # of its CPU ranks
    workers: int = 0  # processes that are still to be started
    arena_bytes: int = 0  # of an arena that is still to be made

    def less(self, kept_bytes: int) -> int:
        """Bytes that are not there yet: workers that are taken over keep so many for the tensors."""
        tensor_bytes = max(0, self.tensor_bytes - kept_bytes)
        return tensor_bytes + self.workers * WORKER_BYTES + self.arena_bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """Host memory on a node that a load was promised and has not taken yet."""

    model_id: str
    node_id: str
    pool_ids: tuple[str, ...]
    size_bytes: int


def larger_claims(before: Iterable[Claim], after: Iterable[Claim]) -> tuple[Claim, ...]:
    """Those of `after` as they were when free memory was asked for, between the two: a load takes it meanwhile."""
    then = {(claim.model_id, claim.node_id): claim.size_bytes for claim in before}
    return tuple(
        replace(claim, size_bytes=max(claim.size_bytes, then.get((claim.model_id, claim.node_id), 0)))
        for claim in after
    )


def room_problems(
    nodes: Sequence[NodeInfo], needs: Mapping[int, NodeNeed], claims: Collection[Claim], config: Config
) -> list[str]:
    """What is missing where; empty when all have room. `needs`: by index into `nodes`."""
    sharing: dict[str, list[int]] = defaultdict(list)  # pool id -> nodes
    pools: dict[str, MemoryPool] = {}
    for index in needs:
        for pool in _pools(nodes[index], index):
            known = pools.get(pool.pool_id, pool)
            pools[pool.pool_id] = min(pool, known, key=lambda seen: seen.free_bytes)
            sharing[pool.pool_id].append(index)
    problems: dict[tuple[int, ...], tuple[int, str]] = {}  # by nodes: of several pools the one that lacks most
    for pool_id, sharers in sharing.items():
        pool = pools[pool_id]
        here = {nodes[index].node_id for index in sharers}
        promised = [claim for claim in claims if pool_id in claim.pool_ids or claim.node_id in here]
        have = pool.free_bytes - max(config.host_reserve_bytes, pool.reserve_bytes)
        have -= sum(claim.size_bytes for claim in promised)
        need = sum(needs[index].less(nodes[index].kept_bytes) for index in sharers)
        key = tuple(sharers)
        if need > have and need - have > problems.get(key, (0, ""))[0]:
            text = _said(", ".join(nodes[index].host for index in sharers), [needs[i] for i in sharers], need, have)
            problems[key] = need - have, text + _promises(promised)
    return [text for _, text in problems.values()]


def _pools(node: NodeInfo, index: int) -> tuple[MemoryPool, ...]:
    return node.pools or (MemoryPool(f"node {index}", node.memory_free_bytes, 0),)


def _said(hosts: str, needs: Sequence[NodeNeed], need: int, have: int) -> str:
    ranks, workers = sum(each.ranks for each in needs), sum(each.workers for each in needs)
    tensor_bytes, arena_bytes = sum(each.tensor_bytes for each in needs), sum(each.arena_bytes for each in needs)
    processes = f", {show_bytes(workers * WORKER_BYTES)} for {workers} new processes" if workers else ""
    return (
        f"{hosts}: needs {show_bytes(need)} of host memory ({show_bytes(tensor_bytes)} for {ranks} ranks, "
        f"{show_bytes(arena_bytes)} for the arena{processes}), has {show_bytes(max(have, 0))} beyond the reserve"
    )


def _promises(claims: Sequence[Claim]) -> str:
    by_model: dict[str, int] = defaultdict(int)
    for claim in claims:
        by_model[claim.model_id] += claim.size_bytes
    said = [f"{show_bytes(size)} to {model}" for model, size in sorted(by_model.items()) if size]
    return f" and what was promised ({show_some(said, 5)})" if said else ""
