"""Which node each rank of a load sits on, taken from Ray: a placement group for GPUs, plain affinity for CPU ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors import nodes, spawn
from actors.finished import finished
from actors.model_record import ModelRecord, Seat
from cluster.layout import Layout
from cluster.topology import assign_ranks, bundle_of_ranks, bundles_for


async def take_seats(
    record: ModelRecord, layout: Layout, others: Sequence[ModelRecord], cpu_ranks_per_node: int
) -> None:
    """Fill `record.seats` (and `record.group`). `others` are the models that are not over.

    Raises NotEnoughResources naming who holds what, ClusterError for a placement group that is gone.
    """
    request = record.request
    infos = await asyncio.to_thread(nodes.cluster_nodes, others, cpu_ranks_per_node)
    holders = [other.model_id for other in others if other.request.device == request.device and other.seats]
    if request.placement_group is not None:
        places = await asyncio.to_thread(nodes.places_in_group, request.placement_group, request)
    elif request.device == "cuda":
        # Proves that there is room, and says who holds it when there is none; Ray decides where the bundles go.
        assign_ranks(infos, layout, "cuda", cpu_ranks_per_node, holders)
        sizes = bundles_for(layout, [info.gpus_free for info in infos])
        await finished(_create_group(record, sizes))
        try:
            await nodes.group_ready(record.group, request, holders)
        except Exception:
            group, record.group = record.group, None
            await asyncio.to_thread(spawn.remove_group, group)
            raise
        places = await asyncio.to_thread(nodes.places_in_own_group, record.group, bundle_of_ranks(sizes))
    else:
        assigned = assign_ranks(infos, layout, "cpu", cpu_ranks_per_node, holders)
        places = [(infos[index].node_id, infos[index].host, None) for index in assigned]
    record.seats = {rank: Seat(rank, node_id, host, bundle) for rank, (node_id, host, bundle) in enumerate(places)}


async def _create_group(record: ModelRecord, sizes: list[int]) -> None:
    """Noted at once: whoever ends the load removes it."""
    record.group = await asyncio.to_thread(spawn.create_group, record.model_id, sizes)
