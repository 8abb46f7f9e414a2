"""Placement: the node of each rank, also after a node was lost, and idle workers that it reuses or ends. Pure.

What a rank holds does not depend on its node. So when a node is lost, only the placements of its ranks are decided
again. All other ranks stay where they are, and the plan stays valid.

The workers of a released model stay together on their nodes for `Config.warm_workers_s`, as an idle *worker group*. A
load reuses a whole worker group or none. An idle worker group never delays or moves a load.

    choose(worker groups, nodes, layout, device) -> Choice(take=the group that fits, end=the groups in the way)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cluster.errors import ConfigError, NodeLost, NotEnoughResources
from cluster.layouts.mesh import Layout
from cluster.units import show_some
from storage.host.memory import GpuMemory, MemoryPool
from storage.peers import Peer

USUAL_GPUS = 8  # GPUs of a usual machine that has any


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node of the cluster, as last reported."""

    node_id: str
    host: str
    gpus_free: int = 0  # whole GPUs that nobody holds
    gpus_total: int = 0
    cpu_ranks_free: int = 0  # places for ranks in CPU memory
    memory_free_bytes: int = 0  # host memory that can still be taken
    shm_free_bytes: int = 0  # of /dev/shm
    alive: bool = True
    gpus: tuple[GpuMemory, ...] = ()  # all its GPUs; empty: their memory is not known
    arena_bytes: int = 0  # limit of the arena that its agent already has; 0: none yet
    window_bytes: int = 0  # of that the window
    slot_bytes: int = 0  # of that arena; 0: the size in the settings
    pools: tuple[MemoryPool, ...] = ()  # the pools of its memory; empty: only `memory_free_bytes` is known
    kept_bytes: int = 0  # host memory that idle workers keep for the load that reuses them
    peer: Peer | None = None  # where its agent serves chunks to other nodes
    peer_bytes_per_s: float = 0.0  # that it may send to them; 0: not set
    peer_measured_bytes_per_s: float = 0.0  # that it sent to them before; 0: not known
    held_share: float = 0.0  # part of the model's chunks that its arena or disk has, as far as is known


def resolve_device(nodes: Sequence[NodeInfo], device: str) -> str:
    """Return "cuda" or "cpu". "auto" is "cuda" when any living node has a GPU. Raises ConfigError."""
    if device == "auto":
        return "cuda" if any(node.alive and node.gpus_total for node in nodes) else "cpu"
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device must be auto, cuda or cpu, not {device!r:.40}")
    return device


def assign_ranks(
    nodes: Sequence[NodeInfo],
    layout: Layout,
    device: str,
    cpu_ranks_per_node: int,
    holders: Sequence[str] = (),
) -> tuple[int, ...]:
    """Return the index into `nodes` of each rank. Same input, same answer.

    Tensor-parallel groups stay on one node as long as one has room for a whole group. Ranks go to as few nodes as that
    allows, so that they share chunks. Among nodes with room for equally many groups, one that has chunks of the model
    comes first. `device` is "cuda" or "cpu" (see `resolve_device`). `holders` are the ids of
    models that hold resources, for the message. Raises NotEnoughResources.
    """
    free = [places_free(node, device, cpu_ranks_per_node) for node in nodes]
    have = sum(free)
    if layout.ranks > have:
        raise _not_enough(nodes, free, layout, device, cpu_ranks_per_node, holders)
    group_size = layout.tensor_parallel_size
    assigned: list[int] = []
    groups_left = layout.ranks // group_size
    while groups_left and max(free) >= group_size:

        def suits(node: int, groups: int = groups_left) -> tuple[int, float, int]:
            return min(free[node] // group_size, groups), nodes[node].held_share, free[node]

        node = max(range(len(nodes)), key=suits)  # the first of equals
        here = min(free[node] // group_size, groups_left)
        assigned += [node] * (here * group_size)
        free[node] -= here * group_size
        groups_left -= here
    while len(assigned) < layout.ranks:  # no node has room for a whole group now
        node = free.index(max(free))
        here = min(free[node], layout.ranks - len(assigned))
        assigned += [node] * here
        free[node] -= here
    return tuple(assigned)


def assign_gpus(nodes: Sequence[NodeInfo], gpus: int, holders: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the index of the node for one rank that needs `gpus`.

    Of the nodes that have them free, one with chunks of the model comes first, then one with most free GPUs. Raises
    NotEnoughResources.
    """
    rooms = {index: node.gpus_free for index, node in enumerate(nodes) if node.alive}
    best = max(rooms, key=lambda at: (rooms[at] >= gpus, nodes[at].held_share, rooms[at]), default=None)
    if best is None or rooms[best] < gpus:
        per_node = ", ".join(f"{nodes[at].host}: {free} of {nodes[at].gpus_total}" for at, free in rooms.items())
        message = f"the rank needs {gpus} free GPUs on one node ({per_node[:1000] or 'there is none'})"
        if holders:
            message += f"; models that hold some: {', '.join(holders[:20])}"
        raise NotEnoughResources(
            message,
            hint="Release a model, wait with wait_for_resources_s, or map modules to fewer GPUs",
            need=gpus,
            have=0 if best is None else rooms[best],
        )
    return (best,)


def ranks_by_node(rank_nodes: Sequence[int] | Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Return the ranks of each node index that has any, both ascending. `rank_nodes` has the node of each rank."""
    found = rank_nodes if isinstance(rank_nodes, Mapping) else dict(enumerate(rank_nodes))
    return {node: tuple(rank for rank in sorted(found) if found[rank] == node) for node in sorted(set(found.values()))}


def bundles_for(layout: Layout, gpus_per_node: Sequence[int]) -> list[int]:
    """Return the GPUs of each bundle of the placement group, in the order of ranks.

    A bundle lies on one node. A tensor-parallel group is one bundle while the nodes have room for whole groups. The
    ranks of the other groups get a bundle each. `gpus_per_node` is the number of usable GPUs of each node.
    """
    group_size = layout.tensor_parallel_size
    groups = layout.ranks // group_size
    whole = min(groups, sum(gpus // group_size for gpus in gpus_per_node))
    return [group_size] * whole + [1] * ((groups - whole) * group_size)


def bundles_to_wait_for(layout: Layout, gpus_of_nodes: Sequence[int], gpus_per_node: int = 0) -> list[int]:
    """Return the bundles to request while nodes are still to join. `gpus_of_nodes`: GPUs of each present node.

    Nothing reports the node types of an autoscaler, and a bundle larger than any node type never gets a node. So the
    largest bundle is `gpus_per_node` if set, else the GPUs of the largest present node, else `USUAL_GPUS`.
    """
    most = gpus_per_node or max(gpus_of_nodes, default=0) or USUAL_GPUS
    group_size = layout.tensor_parallel_size
    size = next(size for size in range(min(most, group_size), 0, -1) if group_size % size == 0)
    return [size] * (layout.ranks // size)


def show_bundles(sizes: Sequence[int]) -> str:
    """Return a text like "2 bundles of 8 GPUs, 1 bundle of 1 GPU"."""
    counts = [(size, sizes.count(size)) for size in dict.fromkeys(sizes)]
    return ", ".join(f"{count} bundle{'s' * (count > 1)} of {size} GPU{'s' * (size > 1)}" for size, count in counts)


def bundle_of_ranks(bundles: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the bundle of each rank. A bundle of k GPUs hosts the next k ranks."""
    return tuple(index for index, gpus in enumerate(bundles) for _ in range(gpus))


def bundles_of_replicas(bundles: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the bundles of each replica, which has so many ranks. No bundle has ranks of two replicas."""
    found: list[list[int]] = [[]]
    for gpus in bundles:
        if sum(found[-1]) == ranks:
            found.append([])
        found[-1].append(gpus)
    return found


def places_free(node: NodeInfo, device: str, cpu_ranks_per_node: int) -> int:
    """Return how many ranks the node can take now."""
    if not node.alive:
        return 0
    return max(node.gpus_free if device == "cuda" else min(node.cpu_ranks_free, cpu_ranks_per_node), 0)


def _not_enough(
    nodes: Sequence[NodeInfo],
    free: Sequence[int],
    layout: Layout,
    device: str,
    cpu_ranks_per_node: int,
    holders: Sequence[str],
) -> NotEnoughResources:
    living = [(node, places) for node, places in zip(nodes, free, strict=True) if node.alive]
    what = "GPUs" if device == "cuda" else "places for CPU ranks"
    total = sum(node.gpus_total if device == "cuda" else cpu_ranks_per_node for node, _ in living)
    per_node = show_some((f"{node.host}: {places}" for node, places in living), 20, "more nodes")
    message = f"{layout.ranks} ranks need {layout.ranks} free {what}; {sum(free)} of {total} are free"
    if per_node:
        message += f" ({per_node})"
    if holders:
        message += f"; models that hold some: {', '.join(holders[:20])}"
    if layout.ranks > total:
        hint = "Use fewer ranks or add nodes" + ("" if device == "cuda" else ", or raise LONGSHORE_CPU_RANKS_PER_NODE")
    else:
        hint = "Release a model, or wait with wait_for_resources_s"
    return NotEnoughResources(message, hint=hint, need=layout.ranks, have=sum(free), total=total)


def lost_ranks(rank_nodes: Mapping[int, str], living: Collection[str]) -> tuple[int, ...]:
    """Return the ranks whose node is not among the living ones, ascending."""
    return tuple(sorted(rank for rank, node_id in rank_nodes.items() if node_id not in living))


def place_again(
    nodes: Sequence[NodeInfo],
    rank_nodes: Mapping[int, str],
    lost: Sequence[int],
    tensor_parallel_size: int,
    device: str,
    cpu_ranks_per_node: int,
) -> dict[int, NodeInfo]:
    """Return a node for each rank of `lost`. `rank_nodes` has the last node of every rank; `nodes` are as now.

    Lost ranks of one tensor-parallel group go together to one node. A node that has the rest of the group comes first,
    then one that has ranks of the load (they share chunks), then the one with most room. The ranks are separated only
    when no node has room for all of them. Same input, same answer. Raises NotEnoughResources.
    """
    free = [places_free(node, device, cpu_ranks_per_node) for node in nodes]
    if sum(free) < len(lost):
        raise NotEnoughResources(
            f"{len(lost)} ranks need a place, {sum(free)} are free", need=len(lost), have=sum(free)
        )
    kept = {rank: node_id for rank, node_id in rank_nodes.items() if rank not in set(lost)}
    groups: dict[int, list[int]] = {}
    for rank in sorted(lost):
        groups.setdefault(rank // tensor_parallel_size, []).append(rank)
    placements: dict[int, NodeInfo] = {}
    for group, ranks in groups.items():
        of_group = Counter(node_id for rank, node_id in kept.items() if rank // tensor_parallel_size == group)
        of_load = set(kept.values()) | {node.node_id for node in placements.values()}
        while ranks:
            together = max(free) >= len(ranks)
            rooms = [index for index, places in enumerate(free) if places >= (len(ranks) if together else 1)]
            best = max(
                rooms,
                key=lambda index: (
                    of_group[nodes[index].node_id],
                    nodes[index].node_id in of_load,
                    free[index],
                    -index,
                ),
            )
            here = min(free[best], len(ranks))
            placements.update(dict.fromkeys(ranks[:here], nodes[best]))
            free[best] -= here
            ranks = ranks[here:]
    return placements


def no_place(lost: Mapping[int, str], waited_s: float, problem: str) -> NodeLost:
    """Return the error of a load whose `lost` ranks (rank -> host) found no other place."""
    hosts = ", ".join(sorted(set(lost.values())))
    ranks = ", ".join(str(rank) for rank in sorted(lost)[:20]) + (" ..." if len(lost) > 20 else "")
    return NodeLost(
        f"node {hosts} was lost, and its ranks ({ranks}) found no other place in {waited_s:.0f} s: {problem}",
        hint="let loads wait for a node to join with LONGSHORE_NODE_WAIT_S, or load again with fewer ranks",
        host=hosts,
        ranks=ranks,
    )


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


SLOW_SHARE = 0.25  # of the largest set rate, or of the median of those measured: a node below this only receives


def sending_weights(rates: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return each node's share of the chunks that others read from it, 0.0 to 1.0, where 1.0 is that of the fastest.

    A node whose rate is not set counts as one of the fastest. One below SLOW_SHARE sends nothing, or all would wait.
    A measured rate only decides that: it differs a little from load to load.

    Args:
        rates: By node, the bytes per second that it may send by its settings, and those that it was measured to send.
            0.0 for what is not known.
    """
    best_bytes_per_s = max((set_rate for set_rate, _ in rates.values()), default=0.0)
    known = [measured for _, measured in rates.values() if measured]
    usual_bytes_per_s = median(known) if known else 0.0

    def weight(set_rate: float, measured: float) -> float:
        share = set_rate / best_bytes_per_s if set_rate else 1.0
        is_slow = share < SLOW_SHARE or (not set_rate and 0 < measured < SLOW_SHARE * usual_bytes_per_s)
        return 0.0 if is_slow else share

    return {node_id: weight(*pair) for node_id, pair in rates.items()}


READERS_AGENT_S = 600.0  # an agent that only readers have used ends so long after the last of them


class IdleNodes:
    """The nodes that have an agent, with the time when each was last needed."""

    def __init__(self, after_s: float) -> None:
        """Create the tracker. An agent ends when its node was not needed for `after_s`; 0 means never."""
        self._after_s = after_s
        self._needed_s: dict[str, float] = {}  # node id -> when it was needed last, or seen first

    def needed(self, node_id: str, now_s: float) -> None:
        """Record that a load asked for the node's agent just now."""
        self._needed_s[node_id] = now_s

    def due(
        self, agents: Collection[str], needed: Collection[str], now_s: float, of_readers: Collection[str] = ()
    ) -> list[str]:
        """Return ids of the nodes whose agents must end.

        Args:
            agents: Nodes that have an agent.
            needed: Those in use.
            now_s: The time.
            of_readers: Nodes whose agents only readers have used. These end after READERS_AGENT_S at the latest.
        """
        if not self._after_s and not of_readers:
            self._needed_s.clear()
            return []
        self._needed_s = {node: now_s if node in needed else self._needed_s.get(node, now_s) for node in agents}
        never = self._after_s or math.inf
        after_s = {node: min(never, READERS_AGENT_S) if node in of_readers else never for node in self._needed_s}
        return sorted(node for node, last_s in self._needed_s.items() if now_s - last_s > after_s[node])
