"""Where the ranks of a lost node go. Pure: nodes are told, not asked.

What a rank holds does not depend on where it sits, so nothing is planned again but the places of the ranks that lost
theirs. All others stay where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from cluster.errors import NodeLost, NotEnoughResources
from cluster.scheduling.topology import NodeInfo, places_free


def lost_ranks(rank_nodes: Mapping[int, str], living: Collection[str]) -> tuple[int, ...]:
    """Ranks whose node is not among the living ones, ascending."""
    return tuple(sorted(rank for rank, node_id in rank_nodes.items() if node_id not in living))


def seat_again(
    nodes: Sequence[NodeInfo],
    rank_nodes: Mapping[int, str],
    lost: Sequence[int],
    tensor_parallel_size: int,
    device: str,
    cpu_ranks_per_node: int,
) -> dict[int, NodeInfo]:
    """A node for each rank of `lost`. `rank_nodes`: where every rank sits or sat; `nodes`: as they are now.

    Lost ranks of one tensor-parallel group go together, to the node that has the rest of the group, else to one that
    has ranks of the load (chunks are shared there), else to the roomiest; they are parted only when no node has room
    for all of them. Same input, same answer. Raises NotEnoughResources.
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
    seats: dict[int, NodeInfo] = {}
    for group, ranks in groups.items():
        of_group = Counter(node_id for rank, node_id in kept.items() if rank // tensor_parallel_size == group)
        of_load = set(kept.values()) | {node.node_id for node in seats.values()}
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
            seats.update(dict.fromkeys(ranks[:here], nodes[best]))
            free[best] -= here
            ranks = ranks[here:]
    return seats


def no_place(lost: Mapping[int, str], waited_s: float, problem: str) -> NodeLost:
    """The error of a load whose `lost` ranks (rank -> host) found no other place."""
    hosts = ", ".join(sorted(set(lost.values())))
    ranks = ", ".join(str(rank) for rank in sorted(lost)[:20]) + (" ..." if len(lost) > 20 else "")
    return NodeLost(
        f"node {hosts} was lost, and its ranks ({ranks}) found no other place in {waited_s:.0f} s: {problem}",
        hint="let loads wait for a node to join with LONGSHORE_NODE_WAIT_S, or load again with fewer ranks",
        host=hosts,
        ranks=ranks,
    )
