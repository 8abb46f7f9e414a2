"""Whether the memory of every device and host holds its share of a plan. Pure.

Whether GPUs hold what ranks put on them. Pure.

    have = free now (all of it where that is not known) - what was asked to stay free
    need = the rank's slices, alignment included

Ray says how many GPUs of a node a load gets, not which: ranks fit a node when they can be put on different GPUs of it
so that each has room.

Whether the hosts' memory holds what a load takes, beside what other loads were promised and have not taken. Pure.

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
from typing import Protocol

from cluster.config import Config
from cluster.errors import DoesNotFit, DoesNotFitNow
from cluster.fit.device_map import CPU, DISK
from cluster.fit.options import FitOptions
from cluster.planning.rank_plans import RankFacts
from cluster.scheduling.topology import NodeInfo, ranks_by_node
from cluster.units import show_bytes, show_some
from storage.arena.arena_files import default_arena_bytes
from storage.host.memory import GpuMemory, MemoryPool

_SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What one GPU has for a load."""

    total_bytes: int
    free_bytes: int | None  # None: not known, taken for all
    kept_free_bytes: int  # that was asked to stay free

    @property
    def have_bytes(self) -> int:
        """Bytes that ranks can take."""
        free_bytes = self.total_bytes if self.free_bytes is None else self.free_bytes
        return max(0, free_bytes - self.kept_free_bytes)

    def emptied(self) -> DeviceRoom:
        """The same without what others have in use."""
        return replace(self, free_bytes=None)


def room_on(gpu: GpuMemory, options: FitOptions, config: Config) -> DeviceRoom:
    """What the load can take of a GPU."""
    return DeviceRoom(gpu.total_bytes, gpu.free_bytes, options.kept_free_bytes(gpu.total_bytes, config))


Place = tuple[int, int]  # (rank, number of the GPU among the rank's own)


def place_on_devices(needs: Mapping[Place, int], rooms: Sequence[DeviceRoom]) -> dict[Place, DeviceRoom]:
    """A GPU for each place, the largest need on the roomiest. `needs`: bytes, of one node; `rooms`: its GPUs.

    If there is any way that all fit, they do so. Places beyond the number of GPUs get the least roomy one.
    """
    roomiest = sorted(rooms, key=lambda room: room.have_bytes, reverse=True)
    largest = sorted(needs, key=lambda place: (-needs[place], place))
    return {place: roomiest[min(at, len(roomiest) - 1)] for at, place in enumerate(largest)} if roomiest else {}


def device_problem(host: str, needs: Mapping[Place, int], rooms: Sequence[DeviceRoom]) -> str:
    """Which ranks lack memory on the GPUs of a node, with need and have; "" when all have it, or nobody knows."""
    return misfit_text(host, needs, place_on_devices(needs, rooms))


def misfit_text(host: str, needs: Mapping[Place, int], placements: Mapping[Place, DeviceRoom]) -> str:
    """The same for places that have their GPUs."""
    tight = [place for place, room in placements.items() if needs[place] > room.have_bytes]
    if not tight:
        return ""
    worst = max(sorted(tight), key=lambda place: needs[place] - placements[place].have_bytes)
    ranks = sorted({rank for rank, _ in tight})
    many = len(tight) > 1
    return (
        f"{host}{': ' * bool(host)}rank{'s' * (len(ranks) > 1)} {show_some(ranks, _SHOWN_RANKS)} "
        f"need{'s' * (len(ranks) == 1)} {'up to ' * many}{show_bytes(needs[worst])} of device memory, "
        f"{show_room(placements[worst])}"
    )


def show_room(room: DeviceRoom) -> str:
    """`a GPU has 1.07 GB (of 2.15 GB; 0.5 GB in use, 0.57 GB kept free)`."""
    parts = []
    if room.free_bytes is not None and room.free_bytes < room.total_bytes:
        parts.append(f"{show_bytes(room.total_bytes - room.free_bytes)} in use")
    if room.kept_free_bytes:
        parts.append(f"{show_bytes(room.kept_free_bytes)} kept free")
    of = f" (of {show_bytes(room.total_bytes)}{'; ' * bool(parts)}{', '.join(parts)})" if parts else ""
    return f"a GPU has {show_bytes(room.have_bytes)}{of}"


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


SHOWN = 4  # problems in one message: it is to be read on one screen
ANY_FIT = FitOptions()


def min_slots(ranks_on_node: int) -> int:
    """Arena slots without which ranks of one load on one node could not go on.

    Each rank fills one slot while it copies out of another; one more stays usable when a slot is quarantined.
    """
    return 2 * ranks_on_node + 1


def planned_arena_bytes(shm_free_bytes: int, config: Config) -> int:
    """Size of a node's new arena, in whole slots: as configured, else the default for what /dev/shm has free."""
    if config.arena_bytes:
        return config.arena_bytes // config.slot_bytes * config.slot_bytes
    return default_arena_bytes(shm_free_bytes, slot_bytes=config.slot_bytes)


class PlannedRanks(Protocol):
    """What fitting needs of a plan: the digest of one that travels has it."""

    @property
    def ranks(self) -> Sequence[RankFacts]: ...


def gpu_bytes(rank: RankFacts, device: str) -> dict[int, int]:
    """What a rank takes of GPUs, by their number among its own; the tensor that is just converted included."""
    if rank.devices:
        sizes = {on: size_bytes for on, size_bytes in rank.devices if isinstance(on, int)}
    else:
        sizes = {0: rank.device_bytes} if device == "cuda" else {}
    return {on: size_bytes + rank.staging_bytes for on, size_bytes in sizes.items()}


def host_bytes(rank: RankFacts, device: str) -> int:
    """What a rank takes of its host's memory, beside its process; the tensor that is just converted included."""
    if not rank.devices:
        return rank.device_bytes + rank.staging_bytes if device == "cpu" else 0
    sizes = dict(rank.devices)
    converts = CPU in sizes or DISK in sizes  # (what goes to disk is converted in host memory)
    return sizes.get(CPU, 0) + (rank.staging_bytes if converts else 0)


def check_fit(
    plan: PlannedRanks,
    rank_nodes: Sequence[int] | Mapping[int, int],
    nodes: Sequence[NodeInfo],
    config: Config,
    device: str,
    claims: Collection[Claim] = (),
    new_workers: Collection[int] = (),
    options: FitOptions = ANY_FIT,
) -> DoesNotFit | None:
    """The error to raise, listing every device and host that lacks memory for its ranks; None when all fit.

    `rank_nodes[i]` is the index into `nodes` of rank i (a mapping: of the ranks that come), `device` "cuda" or "cpu".
    What ranks have in host memory counts against their host, what they have on GPUs against those of their node
    (`cluster.fit.needs`; not checked when their memory is unknown). An arena that is still to be made counts
    against its host and /dev/shm, and must have `min_slots` slots. `claims`: what other loads were promised;
    `new_workers`: ranks whose processes are still to come; `options`: what was asked to stay free.
    """
    problems: list[str] = []
    hints: list[str] = []
    in_use: list[bool] = []  # of each problem with devices: only because others have their memory in use
    needs: dict[int, NodeNeed] = {}
    for index, ranks in ranks_by_node(rank_nodes).items():
        node = nodes[index]
        arena_bytes = node.arena_bytes or planned_arena_bytes(node.shm_free_bytes, config)
        slot_bytes = node.slot_bytes or config.slot_bytes
        slots, need_slots = arena_bytes // slot_bytes, min_slots(len(ranks))
        if slots < need_slots:
            problems.append(
                f"{node.host}: {len(ranks)} ranks need {need_slots} arena slots "
                f"of {show_bytes(slot_bytes)}, the arena has {slots}"
            )
            hints.append("Raise LONGSHORE_ARENA_BYTES (and the container's /dev/shm) or lower LONGSHORE_SLOT_BYTES")
        new_arena_bytes = 0 if node.arena_bytes else arena_bytes
        if new_arena_bytes > node.shm_free_bytes:
            problems.append(
                f"{node.host}: the arena needs {show_bytes(new_arena_bytes)} of /dev/shm, "
                f"{show_bytes(node.shm_free_bytes)} are free"
            )
            hints.append("Enlarge /dev/shm (docker --shm-size, in Kubernetes an emptyDir in memory there)")
        tensor_bytes = sum(host_bytes(plan.ranks[rank], device) for rank in ranks)
        starting = sum(rank in new_workers for rank in ranks)
        needs[index] = NodeNeed(len(ranks), tensor_bytes, starting, new_arena_bytes)
        rooms = [room_on(gpu, options, config) for gpu in node.gpus]
        on_gpus = {(rank, gpu): size for rank in ranks for gpu, size in gpu_bytes(plan.ranks[rank], device).items()}
        if problem := device_problem(node.host, on_gpus, rooms):
            problems.append(problem)
            in_use.append(not device_problem(node.host, on_gpus, [room.emptied() for room in rooms]))
            hints.append("End what else runs on the GPUs" if in_use[-1] else "Raise tensor_parallel_size")
    if device == "cpu":
        config = config.model_copy(update={"host_reserve_bytes": options.host_reserve_bytes(config)})
    if missing := room_problems(nodes, needs, claims, config):
        problems += missing
        if device == "cpu" and (options.reserve_bytes or 0) >= config.host_reserve_bytes > 0:
            kept = show_bytes(config.host_reserve_bytes)
            hints.append(f"The reserve is reserve_bytes={options.reserve_bytes} ({kept} of each host): lower it")
        hints.append("Spread the model over more nodes, release another one, or use a smaller arena")
    if not problems:
        return None
    more = len(problems) - SHOWN
    shown = "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
    kind = DoesNotFitNow if len(problems) == sum(in_use) else DoesNotFit
    return kind(f"the load does not fit: {shown}", hint=". ".join(dict.fromkeys(hints)), problems=len(problems))
