"""Idle workers: which ones a new load reuses, and which ones end to make room for it. Pure.

The workers of a released model stay together on their nodes for `Config.warm_workers_s`, as an idle *worker group*. A
load reuses a whole worker group or none. An idle worker group never delays or moves a load.

    choose(worker groups, nodes, layout, device) -> Choice(take=the group that fits, end=the groups in the way)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.layouts.mesh import Layout
from cluster.scheduling.topology import NodeInfo, assign_gpus, assign_ranks


@dataclass(frozen=True, slots=True)
class IdleWorkerGroup:
    """The workers of a released model, one per rank."""

    worker_group_id: str
    device: str  # "cpu" or "cuda"
    node_ids: tuple[str, ...]  # by rank
    kept_bytes: Mapping[str, int]  # node id -> host memory that its workers keep for the next load
    idle_since_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision about the idle worker groups when a load gets its placements."""

    take: str | None  # id of the worker group that the load reuses
    end: tuple[str, ...]  # ids of the worker groups that end, as the load needs their places
    nodes: tuple[NodeInfo, ...]  # the nodes once those groups have ended


def choose(
    worker_groups: Sequence[IdleWorkerGroup],
    nodes: Sequence[NodeInfo],
    layout: Layout,
    device: str,
    cpu_ranks_per_node: int,
    holders: Sequence[str] = (),
    gpus_per_rank: int = 1,
) -> Choice:
    """Return which worker group a load reuses, or which ones end to make room for it.

    `nodes` are the nodes as they are now, so the places of idle worker groups are taken. The load gets the spread over
    nodes that it would get without idle worker groups. If groups have that spread, the load reuses the one that was
    released last. Otherwise the longest idle groups end, as few as make room for that spread.

    A rank with several GPUs (`gpus_per_rank`) reuses no worker group, because idle workers have one GPU each. Raises
    NotEnoughResources, which names `holders`, when ending all idle groups would not make enough room.
    """
    rivals = sorted(
        (worker_group for worker_group in worker_groups if worker_group.device == device),
        key=lambda worker_group: worker_group.idle_since_s,
    )

    def spread(free: Sequence[NodeInfo]) -> tuple[int, ...]:
        if gpus_per_rank > 1:
            return packing(assign_gpus(free, gpus_per_rank, holders))
        return packing(assign_ranks(free, layout, device, cpu_ranks_per_node, holders))

    wanted = spread(_freed(nodes, rivals))
    alive = {node.node_id for node in nodes if node.alive}
    for worker_group in reversed(rivals):
        if gpus_per_rank == 1 and packing(worker_group.node_ids) == wanted and alive.issuperset(worker_group.node_ids):
            return Choice(worker_group.worker_group_id, (), tuple(nodes))
    for count in range(len(rivals)):
        free = _freed(nodes, rivals[:count])
        if _has_room(free, layout, device, cpu_ranks_per_node, gpus_per_rank) and spread(free) == wanted:
            return Choice(None, tuple(worker_group.worker_group_id for worker_group in rivals[:count]), free)
    return Choice(None, tuple(worker_group.worker_group_id for worker_group in rivals), _freed(nodes, rivals))


def with_kept_memory(nodes: Sequence[NodeInfo], worker_group: IdleWorkerGroup | None) -> list[NodeInfo]:
    """Return the nodes as seen by the load that reuses `worker_group`. It may use the memory that the group keeps."""
    if worker_group is None:
        return list(nodes)
    return [
        replace(
            node,
            kept_bytes=worker_group.kept_bytes.get(node.node_id, 0),
            # The group's own workers use part of the GPU memory, so the free memory for the load is not known.
            gpus=tuple(replace(gpu, free_bytes=None) for gpu in node.gpus)
            if worker_group.device == "cuda"
            else node.gpus,
        )
        for node in nodes
    ]


def in_the_way(worker_groups: Iterable[IdleWorkerGroup], node_ids: Iterable[str]) -> list[str]:
    """Return ids of the worker groups that keep memory on one of these nodes, longest idle first."""
    wanted = set(node_ids)
    tight = [worker_group for worker_group in worker_groups if wanted.intersection(worker_group.node_ids)]
    return [
        worker_group.worker_group_id
        for worker_group in sorted(tight, key=lambda worker_group: worker_group.idle_since_s)
    ]


def packing(places: Sequence[object]) -> tuple[int, ...]:
    """Return the spread of ranks over nodes, which are numbered in the order of their first ranks."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(place, len(numbers)) for place in places)


def _freed(nodes: Sequence[NodeInfo], worker_groups: Iterable[IdleWorkerGroup]) -> tuple[NodeInfo, ...]:
    """Return the nodes as they would be without these worker groups."""
    gpus: Counter[str] = Counter()
    cpu_ranks: Counter[str] = Counter()
    for worker_group in worker_groups:
        (gpus if worker_group.device == "cuda" else cpu_ranks).update(worker_group.node_ids)
    return tuple(
        replace(
            node,
            gpus_free=min(node.gpus_total, node.gpus_free + gpus[node.node_id]),
            cpu_ranks_free=node.cpu_ranks_free + cpu_ranks[node.node_id],
        )
        for node in nodes
    )


def _has_room(
    nodes: Sequence[NodeInfo], layout: Layout, device: str, cpu_ranks_per_node: int, gpus_per_rank: int
) -> bool:
    free = [
        node.gpus_free // gpus_per_rank if device == "cuda" else min(node.cpu_ranks_free, cpu_ranks_per_node)
        for node in nodes
        if node.alive
    ]
    return sum(free) >= layout.ranks


class IdleNodes:
    """The nodes that have an agent, with the time when each was last needed."""

    def __init__(self, after_s: float) -> None:
        """Create the tracker. An agent ends when its node was not needed for `after_s`; 0 means never."""
        self._after_s = after_s
        self._needed_s: dict[str, float] = {}  # node id -> when it was needed last, or seen first

    def needed(self, node_id: str, now_s: float) -> None:
        """Record that a load asked for the node's agent just now."""
        self._needed_s[node_id] = now_s

    def due(self, agents: Collection[str], needed: Collection[str], now_s: float) -> list[str]:
        """Return ids of the nodes whose agents must end. `agents` have an agent; `needed` are in use."""
        if not self._after_s:
            return []
        self._needed_s = {node: now_s if node in needed else self._needed_s.get(node, now_s) for node in agents}
        return sorted(node for node, last_s in self._needed_s.items() if now_s - last_s > self._after_s)
