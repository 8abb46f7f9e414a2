"""Which node each rank of a load sits on: in a gang that is idle, else as Ray has places.

An idle gang of the same shape is taken over, workers and all; else the places come from Ray: a placement group for
GPUs, plain affinity for CPU ranks. A load that may wait for GPUs leaves its group pending between two calls: that is
what Ray's node autoscaler reacts to. It is removed when the load is over, or when places of another shape are found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.coordination import nodes, spawn
from actors.coordination.finished import finished
from actors.coordination.gangs import Gang, Gangs
from actors.coordination.model_record import ModelRecord, Seat
from cluster.config import Config
from cluster.errors import NotEnoughResources
from cluster.scheduling.topology import (
    assign_gpus,
    assign_ranks,
    bundle_of_ranks,
    bundles_for,
    bundles_to_wait_for,
    show_bundles,
)
from cluster.scheduling.warm_pool import IdleGang, choose


async def take_seats(
    record: ModelRecord, others: Sequence[ModelRecord], gangs: Gangs, config: Config, *, may_wait: bool
) -> IdleGang | None:
    """Fill `record.seats` (and `record.group`). `others` are the models that are not over. The gang taken over, if any.

    Raises NotEnoughResources naming who holds what, ClusterError for a placement group that is gone. With `may_wait`,
    when the caller will ask again, GPUs that are missing are left asked for.
    """
    request, layout, cpu_ranks_per_node = record.request, record.request.layout, config.cpu_ranks_per_node
    holders = [other.model_id for other in others if other.request.device == request.device and other.seats]
    if request.placement_group is not None:
        places = await asyncio.to_thread(nodes.places_in_group, request.placement_group, request)
        _sit(record, places)
        return None
    if record.group is not None and await asyncio.to_thread(nodes.is_placed, record.group):
        await _sit_in_group(record)
        return None
    taken = [seat.node_id for other in others if other.request.device == "cpu" for seat in other.seats.values()]
    taken += [node_id for gang in gangs.idle() if gang.device == "cpu" for node_id in gang.node_ids]
    infos = await asyncio.to_thread(nodes.cluster_nodes, taken, cpu_ranks_per_node)
    gpus = request.gpus_per_rank
    try:
        choice = choose(gangs.idle(), infos, layout, request.device, cpu_ranks_per_node, holders, gpus)
    except NotEnoughResources as error:
        if not may_wait or request.device != "cuda":
            raise
        there = [info.gpus_total for info in infos]
        sizes = [gpus] if gpus > 1 else bundles_to_wait_for(layout, there, config.gpus_per_node)
        await _ask_for(record, sizes)
        raise error.with_details(asked_of_ray=show_bundles(sizes)) from None
    if choice.take is not None:
        await _ask_for(record, [])
        gang = gangs.take(choice.take)
        _join(record, gang)
        return gang.idle
    await finished(gangs.end(choice.end))
    # Proves that there is room, and says who holds it when there is none; Ray decides where the bundles go.
    assigned = (
        assign_gpus(choice.nodes, gpus, holders)
        if gpus > 1
        else assign_ranks(choice.nodes, layout, request.device, cpu_ranks_per_node, holders)
    )
    if request.device == "cuda":
        await _ask_for(record, [gpus] if gpus > 1 else bundles_for(layout, [info.gpus_free for info in choice.nodes]))
        try:
            await nodes.group_ready(record.group, request, holders)
        except Exception:
            if not may_wait:
                await _ask_for(record, [])
            raise
        await _sit_in_group(record)
    else:
        _sit(record, [(infos[index].node_id, infos[index].host, None) for index in assigned])
    return None


async def _ask_for(record: ModelRecord, sizes: Sequence[int]) -> None:
    """The load's placement group has bundles of so many GPUs, or there is none; one that is like that stays."""
    if record.group is not None and nodes.bundle_sizes(record.group) != list(sizes):
        group, record.group = record.group, None
        await finished(asyncio.to_thread(spawn.remove_group, group))
    if record.group is None and sizes:
        await finished(_create_group(record, list(sizes)))


async def _sit_in_group(record: ModelRecord) -> None:
    sizes = nodes.bundle_sizes(record.group)
    bundles = (0,) if record.request.gpus_per_rank > 1 else bundle_of_ranks(sizes)
    _sit(record, await asyncio.to_thread(nodes.places_in_own_group, record.group, bundles))


def _sit(record: ModelRecord, places: Sequence[nodes.Place]) -> None:
    record.seats = {rank: Seat(rank, node_id, host, bundle) for rank, (node_id, host, bundle) in enumerate(places)}


def _join(record: ModelRecord, gang: Gang) -> None:
    """Its workers keep their names, so the load goes by its id from now on."""
    record.gang_id, record.group = gang.idle.gang_id, gang.group
    record.seats = {seat.rank: seat for seat in gang.seats}


async def _create_group(record: ModelRecord, sizes: list[int]) -> None:
    """Noted at once: whoever ends the load removes it."""
    record.group = await asyncio.to_thread(spawn.create_group, record.gang_id, sizes)
