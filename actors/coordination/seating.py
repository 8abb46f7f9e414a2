"""Which node each rank of a load sits on: in a gang that is idle, else as Ray has places.

An idle gang of the same shape is taken over, workers and all; else the places come from Ray: a placement group for
GPUs, plain affinity for CPU ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.coordination import nodes, spawn
from actors.coordination.finished import finished
from actors.coordination.gangs import Gang, Gangs
from actors.coordination.model_record import ModelRecord, Seat
from cluster.scheduling.topology import assign_gpus, assign_ranks, bundle_of_ranks, bundles_for
from cluster.scheduling.warm_pool import IdleGang, choose


async def take_seats(
    record: ModelRecord, others: Sequence[ModelRecord], gangs: Gangs, cpu_ranks_per_node: int
) -> IdleGang | None:
    """Fill `record.seats` (and `record.group`). `others` are the models that are not over. The gang taken over, if any.

    Raises NotEnoughResources naming who holds what, ClusterError for a placement group that is gone.
    """
    request, layout = record.request, record.request.layout
    holders = [other.model_id for other in others if other.request.device == request.device and other.seats]
    if request.placement_group is not None:
        places = await asyncio.to_thread(nodes.places_in_group, request.placement_group, request)
        _sit(record, places)
        return None
    taken = [seat.node_id for other in others if other.request.device == "cpu" for seat in other.seats.values()]
    taken += [node_id for gang in gangs.idle() if gang.device == "cpu" for node_id in gang.node_ids]
    infos = await asyncio.to_thread(nodes.cluster_nodes, taken, cpu_ranks_per_node)
    several = request.gpus_per_rank > 1
    choice = choose(gangs.idle(), infos, layout, request.device, cpu_ranks_per_node, holders, request.gpus_per_rank)
    if choice.take is not None:
        gang = gangs.take(choice.take)
        _join(record, gang)
        return gang.idle
    await finished(gangs.end(choice.end))
    # Proves that there is room, and says who holds it when there is none; Ray decides where the bundles go.
    assigned = (
        assign_gpus(choice.nodes, request.gpus_per_rank, holders)
        if several
        else assign_ranks(choice.nodes, layout, request.device, cpu_ranks_per_node, holders)
    )
    if request.device == "cuda":
        sizes = [request.gpus_per_rank] if several else bundles_for(layout, [info.gpus_free for info in choice.nodes])
        bundles = (0,) if several else bundle_of_ranks(sizes)
        await finished(_create_group(record, sizes))
        try:
            await nodes.group_ready(record.group, request, holders)
        except Exception:
            group, record.group = record.group, None
            await asyncio.to_thread(spawn.remove_group, group)
            raise
        places = await asyncio.to_thread(nodes.places_in_own_group, record.group, bundles)
    else:
        places = [(infos[index].node_id, infos[index].host, None) for index in assigned]
    _sit(record, places)
    return None


def _sit(record: ModelRecord, places: Sequence[nodes.Place]) -> None:
    record.seats = {rank: Seat(rank, node_id, host, bundle) for rank, (node_id, host, bundle) in enumerate(places)}


def _join(record: ModelRecord, gang: Gang) -> None:
    """Its workers keep their names, so the load goes by its id from now on."""
    record.gang_id, record.group = gang.idle.gang_id, gang.group
    record.seats = {seat.rank: seat for seat in gang.seats}


async def _create_group(record: ModelRecord, sizes: list[int]) -> None:
    """Noted at once: whoever ends the load removes it."""
    record.group = await asyncio.to_thread(spawn.create_group, record.gang_id, sizes)
