"""Finds places for the ranks of a load, and for the ranks of a lost node again.

First: an idle worker group of the same shape is taken over, workers and all. Otherwise the places come from Ray:
placement groups for GPUs, plain affinity for CPU ranks. Ray makes no placement group smaller. So each replica has its
own, which is given back when the replica goes. A load that may wait for GPUs leaves one group for all replicas pending
between two calls: Ray's node autoscaler reacts to that, and two loads that each held a part of what both need would
wait for each other. The groups are removed when the load is over, or when places of another shape are found.

Again: `Relocation` moves ranks whose node is lost, and tells the agents.

    ranks without a living node --> places (free ones, or where Ray has put their bundles again) --> fit
       |  none: wait, Config.node_wait_s at most, then NodeLost
       `--> a new attempt for these ranks --> saved with the agents --> begun on the nodes they come to

Ranks on other nodes notice nothing: their part of the load stays as it was (`NodeJob.part`). Late messages of the lost
node, which may live on in a partition, change nothing. Its agent is told to forget the load, and nobody uses the names,
the attempt and the incarnations of its workers any more.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from actors.coordination import nodes, spawn
from actors.coordination.fit import fit_on
from actors.coordination.jobs import save
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.run_parts import RunParts
from actors.coordination.spawn import alongside, finished
from actors.coordination.worker_groups import WorkerGroups
from cluster.config import Config
from cluster.errors import ClusterLost, DoesNotFit, NodeLost, NotEnoughResources
from cluster.layouts.mesh import Layout
from cluster.planning.chunk_keys import note_held
from cluster.planning.packed_plan import PackedPlan
from cluster.scheduling import load_state
from cluster.scheduling.topology import (
    IdleWorkerGroup,
    assign_gpus,
    assign_ranks,
    bundle_of_ranks,
    bundles_for,
    bundles_of_replicas,
    bundles_to_wait_for,
    choose,
    lost_ranks,
    no_place,
    place_again,
    show_bundles,
)
from storage.errors import LongshoreError


async def take_placements(
    record: ModelRecord, others: Sequence[ModelRecord], worker_groups: WorkerGroups, config: Config, *, may_wait: bool
) -> IdleWorkerGroup | None:
    """Place every rank of the record. Return the worker group that was taken over, if any.

    `others` are the models that are not over. With `may_wait` the caller asks again, so missing GPUs stay requested.

    Raises NotEnoughResources naming who holds what, ClusterError for a placement group that is gone.
    """
    request, layout, cpu_ranks_per_node = record.request, record.request.layout, config.cpu_ranks_per_node
    holders = [other.model_id for other in others if other.request.device == request.device and other.placements]
    if request.placement_group is not None:
        places = await asyncio.to_thread(nodes.places_in_group, request.placement_group, request)
        _place(record, places)
        return None
    if await asyncio.to_thread(nodes.are_placed, record.groups):
        await _place_in_groups(record)
        return None
    taken = _cpu_placements(others, worker_groups)
    infos = await asyncio.to_thread(nodes.cluster_nodes, taken, cpu_ranks_per_node)
    gpus = request.gpus_per_rank
    try:
        choice = choose(worker_groups.idle(), infos, layout, request.device, cpu_ranks_per_node, holders, gpus)
    except NotEnoughResources as error:
        if not may_wait or request.device != "cuda":
            raise
        there = [info.gpus_total for info in infos]
        sizes = [gpus] if gpus > 1 else bundles_to_wait_for(layout, there, config.gpus_per_node)
        await _ask_for(record, [sizes])  # one group: loads that wait must not hold a part of what another waits for
        raise error.with_details(asked_of_ray=show_bundles(sizes)) from None
    if choice.take is not None:
        await _ask_for(record, [])
        worker_group = worker_groups.take(choice.take)
        record.take_over(choice.take, worker_group.groups, worker_group.placements)
        return worker_group.idle
    await finished(worker_groups.end(choice.end))
    free = list(choice.nodes)
    if record.plan is not None:
        free = await nodes.with_held(free, record.plan, request.store.ref.identity())
    # Proves that there is room, and says who holds it when there is none; Ray decides where the bundles go.
    assigned = (
        assign_gpus(free, gpus, holders)
        if gpus > 1
        else assign_ranks(free, layout, request.device, cpu_ranks_per_node, holders)
    )
    chosen = {free[index].host: free[index].held_share for index in assigned if free[index].held_share}
    record.explain(note_held(chosen) if chosen and len(set(assigned)) < len(infos) else "")
    if request.device == "cuda":
        sizes = [gpus] if gpus > 1 else bundles_for(layout, [info.gpus_free for info in choice.nodes])
        of_rank = (0,) if gpus > 1 else bundle_of_ranks(sizes)
        of_bundle = dict(zip(of_rank, (infos[index].node_id for index in assigned), strict=True)) if chosen else {}
        where = [of_bundle[bundle] for bundle in sorted(of_bundle)]
        replicas = bundles_of_replicas(sizes, layout.one_replica) if gpus == 1 else [sizes]
        has_groups = bool(where) and await _have_groups(record, replicas, where, holders)
        if not has_groups and len(replicas) > 1 and not record.groups:
            has_groups = await _have_groups(record, replicas, (), holders)
        if not has_groups:
            await _ask_for(record, [sizes])
            try:
                await nodes.groups_ready(record.groups, holders)
            except Exception:
                if not may_wait:
                    await _ask_for(record, [])
                raise
        await _place_in_groups(record)
    else:
        _place(record, [(infos[index].node_id, infos[index].host, None) for index in assigned])
    return None


async def more_places(
    record: ModelRecord,
    layout: Layout,
    plan: PackedPlan,
    models: Iterable[ModelRecord],
    worker_groups: WorkerGroups,
    config: Config,
) -> list[nodes.Place]:
    """Return places for the ranks that `layout` has more than the record's, by the rules of `take_placements`.

    On GPUs bundles of the model's own placement groups that were freed come first. The others are no part of a group.

    Raises NotEnoughResources naming who holds what.
    """
    request = record.request
    first = request.world_size
    freed = await asyncio.to_thread(
        lambda: nodes.places_of(nodes.bundles_of_ranks(record.groups)[first : layout.ranks])
    )
    if len(freed) == layout.ranks - first:
        return freed
    models = [model for model in models if not model.life.is_over]
    holders = [model.model_id for model in models if model.request.device == request.device and model.placements]
    added = layout.with_replicas((layout.ranks - first - len(freed)) // layout.one_replica)
    while True:
        taken = _cpu_placements(models, worker_groups)
        infos = await asyncio.to_thread(nodes.cluster_nodes, taken, config.cpu_ranks_per_node)
        held = await nodes.with_held(infos, plan, request.store.ref.identity())
        try:
            assigned = assign_ranks(held, added, request.device, config.cpu_ranks_per_node, holders)
        except NotEnoughResources:
            if not await finished(worker_groups.end_all()):  # they never stand in a load's way
                raise
        else:
            return [*freed, *((infos[index].node_id, infos[index].host, None) for index in assigned)]


async def _have_groups(
    record: ModelRecord, sizes: Sequence[Sequence[int]], node_ids: Sequence[str], holders: list[str]
) -> bool:
    """Get placement groups, with their bundles on these nodes if any are given. Return False, and have none, when the
    GPUs are taken now.
    """
    await _ask_for(record, [])
    await _ask_for(record, sizes, node_ids)
    try:
        await nodes.groups_ready(record.groups, holders)
    except NotEnoughResources:
        await _ask_for(record, [])
        record.explain("")
        return False
    return True


async def _ask_for(record: ModelRecord, sizes: Sequence[Sequence[int]], node_ids: Sequence[str] = ()) -> None:
    """Give the load placement groups with bundles of so many GPUs, or none. If it has groups like that, they stay.

    `node_ids`: of each bundle of all groups, where that matters.
    """
    if [nodes.bundle_sizes(group) for group in record.groups] != [list(each) for each in sizes]:
        await finished(_remove_groups(record))
    if not record.groups:
        await finished(_create_groups(record, sizes, node_ids))


async def _place_in_groups(record: ModelRecord) -> None:
    bundles = nodes.bundles_of_ranks(record.groups, record.request.gpus_per_rank)
    _place(record, await asyncio.to_thread(nodes.places_of, bundles))


def _place(record: ModelRecord, places: Sequence[nodes.Place]) -> None:
    record.place(Placement(rank, *place) for rank, place in enumerate(places))


async def _create_groups(record: ModelRecord, sizes: Sequence[Sequence[int]], node_ids: Sequence[str]) -> None:
    """Note each group at once: whoever ends the load removes it."""
    where = iter(node_ids)
    for number, each in enumerate(sizes):
        there = list(itertools.islice(where, len(each)))
        record.add_group(await asyncio.to_thread(spawn.create_group, record.worker_group_id, number, list(each), there))


async def _remove_groups(record: ModelRecord) -> None:
    for group in record.drop_groups():
        await asyncio.to_thread(spawn.remove_group, group)


def _cpu_placements(models: Iterable[ModelRecord], worker_groups: WorkerGroups) -> list[str]:
    """Return the nodes of all placed CPU ranks, idle worker groups included."""
    placed = [node_id for idle in worker_groups.idle() if idle.device == "cpu" for node_id in idle.node_ids]
    for model in models:
        if model.request.device == "cpu":
            placed += [placement.node_id for placement in model.placements.values()]
    return placed


TRY_AGAIN_S = 0.5


class Relocation:
    """Moves ranks of one model. `begin_on(node id)` sends an agent its share."""

    def __init__(self, parts: RunParts, begin_on: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._parts = parts
        self._record = parts.record
        self._begin_on = begin_on

    async def is_needed(self, error: BaseException) -> bool:
        """Return whether a node's death caused the error. Takes as long as Ray takes to find that out."""
        if isinstance(error, NodeLost):
            return True
        cause = getattr(error, "cause", None)
        if isinstance(cause, LongshoreError) and not isinstance(cause, ClusterLost):
            return False  # an agent that has answered; to ask it again could start one anew that was just ended
        try:
            await self._parts.agents.check_nodes()
        except NodeLost:
            return True
        except (ClusterLost, RayError, TimeoutError):
            pass
        return False

    async def run(self) -> set[int]:
        """Move every rank whose node is dead, and return these. Raises NodeLost when they get no place in time."""
        moved: set[int] = set()
        while lost := await self._lost():
            await self._place_again(lost)
            moved |= lost.keys()
            await save(self._record)  # before anybody acts on it
            begun = {self._record.placements[rank].node_id for rank in lost}
            try:
                await alongside(*(self._begin_on(node_id) for node_id in sorted(begun)))
            except NodeLost:
                continue  # one of these too
        if self._record.message:
            await self._record.touch("")
        return moved

    async def _lost(self) -> dict[int, str]:
        """rank -> host, of the ranks whose node is dead."""
        living = await asyncio.to_thread(nodes.living_nodes)
        placements = {rank: place for rank, place in self._record.placements.items() if self._record.has(place)}
        return {rank: placements[rank].host for rank in lost_ranks(_node_ids(placements), living)}

    async def _place_again(self, lost: dict[int, str]) -> None:
        record, began_s = self._record, time.monotonic()
        plan = await self._parts.source.plan()
        in_group = any(record.placements[rank].bundle is not None for rank in lost)
        # Ray puts bundles elsewhere by itself, but not at once.
        wait_s = max(self._parts.config.node_wait_s, nodes.GROUP_GRACE_S if in_group else 0.0)
        while True:
            async with self._parts.admission:
                try:
                    await self._take(await self._places(lost), plan)
                    return
                except (NotEnoughResources, DoesNotFit) as error:
                    problem = error.message
                except (NodeLost, RayError, TimeoutError) as error:  # a node that they were to go to
                    problem = type(error).__name__
            waited_s = time.monotonic() - began_s
            if waited_s >= wait_s:
                raise no_place(lost, waited_s, problem)
            hosts = ", ".join(sorted(set(lost.values())))
            await record.touch(f"{hosts} was lost, {len(lost)} ranks wait for a place: {problem}")
            await asyncio.sleep(TRY_AGAIN_S)

    async def _places(self, lost: dict[int, str]) -> dict[int, nodes.Place]:
        """Return a place for each of these ranks. Raises NotEnoughResources."""
        record = self._record
        bundles = {rank: bundle for rank in lost if (bundle := record.placements[rank].bundle) is not None}
        found = await asyncio.to_thread(nodes.places_again, bundles)
        if len(found) == len(lost):
            return found
        while True:
            models = [model for model in self._parts.models.values() if not model.life.is_over]
            taken = _cpu_placements(models, self._parts.worker_groups)
            infos = await asyncio.to_thread(nodes.cluster_nodes, taken, self._parts.config.cpu_ranks_per_node)
            try:
                placements = place_again(
                    infos,
                    _node_ids(record.placements),
                    [rank for rank in lost if rank not in found],
                    record.request.layout.tensor_parallel_size,
                    record.request.device,
                    self._parts.config.cpu_ranks_per_node,
                )
                return {**found, **{rank: (node.node_id, node.host, None) for rank, node in placements.items()}}
            except NotEnoughResources:
                if not await finished(self._parts.worker_groups.end_all()):  # they never stand in a load's way
                    raise

    async def _take(self, places: dict[int, nodes.Place], plan: PackedPlan) -> None:
        """Place the ranks there. Raises DoesNotFit, and what agents raise."""
        record = self._record
        attempt = record.life.attempt + 1
        placements = {
            rank: Placement(rank, node_id, host, bundle, attempt, incarnation=record.placements[rank].incarnation + 1)
            for rank, (node_id, host, bundle) in places.items()
        }
        misfit = await fit_on(
            record, placements, plan, self._parts.agents, self._parts.config, self._parts.models.values()
        )
        if misfit is not None:
            raise misfit
        gone: list[Any] = [record.placements[rank].worker for rank in placements]
        record.place(placements.values())
        again = [load_state.RankReplaced(rank, record.placements[rank].incarnation, attempt=attempt) for rank in places]
        await record.advance(load_state.Replanned(tuple(sorted(places)), attempt=attempt), *again)
        for worker in filter(None, gone):
            await asyncio.to_thread(spawn.end_actor, worker)


def _node_ids(placements: Mapping[int, Placement]) -> dict[int, str]:
    return {rank: placement.node_id for rank, placement in placements.items()}
