"""Which idle workers a new load takes over, and which of them end to make room for it. Pure.

The workers of a released model are a *worker group*: they stay together, on their nodes, for as long as
`Config.warm_workers_s`. A load takes a whole worker group over or none; a worker group never stands in a load's way.

    choose(worker groups, nodes, layout, device) -> Choice(take=the group that fits, end=those whose places it needs)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.layouts.mesh import Layout
from cluster.scheduling.topology import NodeInfo, assign_gpus, assign_ranks


@dataclass(frozen=True, slots=True)
class IdleWorkerGroup:
    """Workers of a model that is over, one per rank."""

    worker_group_id: str
    device: str  # "cpu" or "cuda"
    node_ids: tuple[str, ...]  # by rank
    kept_bytes: Mapping[str, int]  # node id -> host memory that its workers keep for the next load
    idle_since_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the idle worker groups when a load takes its placements."""

    take: str | None  # id of the worker group that has the placements the load would get
    end: tuple[str, ...]  # ids of those whose places it needs
    nodes: tuple[NodeInfo, ...]  # as they are when those have ended


def choose(
    worker_groups: Sequence[IdleWorkerGroup],
    nodes: Sequence[NodeInfo],
    layout: Layout,
    device: str,
    cpu_ranks_per_node: int,
    holders: Sequence[str] = (),
    gpus_per_rank: int = 1,
) -> Choice:
    """See above. `nodes` as they are now: places of idle worker groups are taken.

    The load gets the spread over nodes that it would get if no worker group were there. A group spread like that is
    taken over, the one that was released last; else as few groups end as give room for that spread, the longest
    idle first.
    Raises NotEnoughResources, naming `holders`, when ending all of them would not do. A rank with several GPUs
    (`gpus_per_rank`) takes no worker group over: their workers have one each.
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
    """The nodes as the load that takes `worker_group` over sees them: what its workers keep is its to use."""
    if worker_group is None:
        return list(nodes)
    return [
        replace(
            node,
            kept_bytes=worker_group.kept_bytes.get(node.node_id, 0),
            # Part of what is in use on GPUs is its own workers': all that can be said is what there is.
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
    """How ranks are spread, whatever the nodes are called: nodes numbered in the order of their first ranks."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(place, len(numbers)) for place in places)


def _freed(nodes: Sequence[NodeInfo], worker_groups: Iterable[IdleWorkerGroup]) -> tuple[NodeInfo, ...]:
    """The nodes without these worker groups."""
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
    """Since when each node that has an agent is not needed."""

    def __init__(self, after_s: float) -> None:
        """`after_s`: so long a node is not needed before its agent is to end; 0: it never is."""
        self._after_s = after_s
        self._needed_s: dict[str, float] = {}  # node id -> when it was needed last, or seen first

    def needed(self, node_id: str, now_s: float) -> None:
        """Somebody asked for the node's agent just now."""
        self._needed_s[node_id] = now_s

    def due(self, agents: Collection[str], needed: Collection[str], now_s: float) -> list[str]:
        """Ids of the nodes whose agents are to end. `agents`: nodes that have one; `needed`: nodes that are in use."""
        if not self._after_s:
            return []
        self._needed_s = {node: now_s if node in needed else self._needed_s.get(node, now_s) for node in agents}
        return sorted(node for node, last_s in self._needed_s.items() if now_s - last_s > self._after_s)
