"""Which idle workers a new load takes over, and which of them end to make room for it. Pure.

The workers of a released model are a *gang*: they stay together, on their nodes, for as long as
`Config.warm_workers_s`. A load takes a whole gang over or none; a gang never stands in a load's way.

    choose(gangs, nodes, layout, device) -> Choice(take=the gang that fits, end=those whose places it needs)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.layouts.mesh import Layout
from cluster.scheduling.topology import NodeInfo, assign_gpus, assign_ranks


@dataclass(frozen=True, slots=True)
class IdleGang:
    """Workers of a model that is over, one per rank."""

    gang_id: str
    device: str  # "cpu" or "cuda"
    node_ids: tuple[str, ...]  # by rank
    kept_bytes: Mapping[str, int]  # node id -> host memory that its workers keep for the next load
    idle_since_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the idle gangs when a load takes its seats."""

    take: str | None  # id of the gang that has the seats the load would get
    end: tuple[str, ...]  # ids of those whose places it needs
    nodes: tuple[NodeInfo, ...]  # as they are when those have ended


def choose(
    gangs: Sequence[IdleGang],
    nodes: Sequence[NodeInfo],
    layout: Layout,
    device: str,
    cpu_ranks_per_node: int,
    holders: Sequence[str] = (),
    gpus_per_rank: int = 1,
) -> Choice:
    """See above. `nodes` as they are now: places of idle gangs are taken.

    The load gets the spread over nodes that it would get if no gang were there. A gang spread like that is taken
    over, the one that was released last; else as few gangs end as give room for that spread, the longest idle first.
    Raises NotEnoughResources, naming `holders`, when ending all of them would not do. A rank with several GPUs
    (`gpus_per_rank`) takes no gang over: their workers have one each.
    """
    rivals = sorted((gang for gang in gangs if gang.device == device), key=lambda gang: gang.idle_since_s)

    def spread(free: Sequence[NodeInfo]) -> tuple[int, ...]:
        if gpus_per_rank > 1:
            return packing(assign_gpus(free, gpus_per_rank, holders))
        return packing(assign_ranks(free, layout, device, cpu_ranks_per_node, holders))

    wanted = spread(_freed(nodes, rivals))
    alive = {node.node_id for node in nodes if node.alive}
    for gang in reversed(rivals):
        if gpus_per_rank == 1 and packing(gang.node_ids) == wanted and alive.issuperset(gang.node_ids):
            return Choice(gang.gang_id, (), tuple(nodes))
    for count in range(len(rivals)):
        free = _freed(nodes, rivals[:count])
        if _has_room(free, layout, device, cpu_ranks_per_node, gpus_per_rank) and spread(free) == wanted:
            return Choice(None, tuple(gang.gang_id for gang in rivals[:count]), free)
    return Choice(None, tuple(gang.gang_id for gang in rivals), _freed(nodes, rivals))


def with_kept_memory(nodes: Sequence[NodeInfo], gang: IdleGang | None) -> list[NodeInfo]:
    """The nodes as the load that takes `gang` over sees them: what its workers keep is its to use."""
    if gang is None:
        return list(nodes)
    return [
        replace(
            node,
            kept_bytes=gang.kept_bytes.get(node.node_id, 0),
            # Part of what is in use on GPUs is its own workers': all that can be said is what there is.
            gpus=tuple(replace(gpu, free_bytes=None) for gpu in node.gpus) if gang.device == "cuda" else node.gpus,
        )
        for node in nodes
    ]


def in_the_way(gangs: Iterable[IdleGang], node_ids: Iterable[str]) -> list[str]:
    """Ids of the gangs that keep memory on one of these nodes, longest idle first: they end when it is missing."""
    wanted = set(node_ids)
    tight = [gang for gang in gangs if wanted.intersection(gang.node_ids)]
    return [gang.gang_id for gang in sorted(tight, key=lambda gang: gang.idle_since_s)]


def packing(places: Sequence[object]) -> tuple[int, ...]:
    """How ranks are spread, whatever the nodes are called: nodes numbered in the order of their first ranks."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(place, len(numbers)) for place in places)


def _freed(nodes: Sequence[NodeInfo], gangs: Iterable[IdleGang]) -> tuple[NodeInfo, ...]:
    """The nodes without these gangs."""
    gpus: Counter[str] = Counter()
    cpu_ranks: Counter[str] = Counter()
    for gang in gangs:
        (gpus if gang.device == "cuda" else cpu_ranks).update(gang.node_ids)
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
