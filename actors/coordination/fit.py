"""Decides whether a load fits the nodes of its ranks beside other loads, and what becomes of one that does not.

What becomes of a load that does not fit: with fit="auto" it takes less precision, else it is told what would help.

fits as given ------------------------------------------> that plan
auto:   the steps, planned in a planning process --first that fits--> its plan, and the request is changed
strict: changes, planned likewise --cheapest that fit--> DoesNotFit names them

The limits of a device map that was asked for without any: what the node that will have the rank has, and may give.

Asked before the load is planned, because the map is a part of the plan. Whether it fits is checked again, as for any
load, when the rank has its place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from actors.coordination import nodes, spawn
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.nodes import NodeAgents
from actors.coordination.planner import Planner
from actors.coordination.spawn import finished, settled
from actors.coordination.worker_groups import WorkerGroups
from cluster.config import Config
from cluster.errors import ClusterError, ConfigError, DoesNotFit, DoesNotFitNow, LoadError, NotEnoughResources
from cluster.fit.device_map import DeviceKey
from cluster.fit.needs import (
    WORKER_BYTES,
    Claim,
    NodeNeed,
    PlannedRanks,
    check_fit,
    gpu_bytes,
    host_bytes,
    larger_claims,
    misfit_text,
    planned_window_bytes,
    room_on,
    room_problems,
)
from cluster.fit.options import AUTO, STRICT, DeviceMapOptions, FitOptions, FitTry
from cluster.fit.search import OFFLOAD_POLICY, Limits, PlannedChange, cheapest, first_that_fits, offer, steps_text
from cluster.planning.packed_plan import PackedPlan, RankFacts
from cluster.request import LoadRequest
from cluster.scheduling.topology import IdleWorkerGroup, NodeInfo, in_the_way, with_kept_memory
from storage.errors import LongshoreError
from storage.host.memory import GpuMemory, MemoryPool, available_host_bytes


def claims_of(models: Iterable[ModelRecord], but: ModelRecord) -> list[Claim]:
    """Return what all models but one are still to take, by node: ranks that are replaced take theirs again."""
    return [
        Claim(record.model_id, node_id, record.pools.get(node_id, ()), size_bytes)
        for record in models
        if record is not but and not record.life.is_over
        for node_id in record.nodes
        if (size_bytes := _to_take(record, node_id))
    ]


def _to_take(record: ModelRecord, node_id: str) -> int:
    here = {placement.rank: placement for placement in record.on(node_id)}
    staged_bytes = record.changes.bytes_to_stage(here)
    return record.bytes_to_take(list(here.values())) + staged_bytes + WORKER_BYTES * len(new_workers(here))


def new_workers(placements: Mapping[int, Placement]) -> set[int]:
    """Ranks whose processes are still to be started, or just are."""
    return {
        rank for rank, placement in placements.items() if not (placement.is_up or placement.started or placement.report)
    }


STARTING_S = 30.0  # workers are up by then
FREED_S = 5.0  # the memory of a process that was killed is free again by then


@dataclass(frozen=True, slots=True)
class Room:
    """The placements planned for a load's ranks, and the memory that they have now."""

    rank_nodes: dict[int, int]  # rank -> index into `infos`
    infos: list[NodeInfo]
    claims: tuple[Claim, ...]  # of other loads
    new_workers: set[int]

    def misfit(self, plan: PlannedRanks, request: LoadRequest, config: Config) -> DoesNotFit | None:
        """The error, if the ranks do not fit there."""
        return check_fit(
            plan,
            self.rank_nodes,
            self.infos,
            config,
            request.device,
            self.claims,
            self.new_workers,
            request.fit,
        )


async def room_of(
    record: ModelRecord,
    placements: Mapping[int, Placement],
    agents: NodeAgents,
    others: Collection[ModelRecord],
    taken: IdleWorkerGroup | None = None,
) -> Room:
    """Return what the agents report. It holds until another task runs, so promise from it at once."""
    order = sorted(await agents.of({placement.node_id: placement.host for placement in placements.values()}))
    before = claims_of(others, record)
    facts = await nodes.facts_of(order, agents.ask)
    record.note_peers(facts.values())
    claims = larger_claims(before, claims_of(others, record))
    infos = with_kept_memory([facts[node_id] for node_id in order], taken)
    return Room(
        {rank: order.index(placement.node_id) for rank, placement in placements.items()},
        infos,
        claims,
        new_workers(placements),
    )


async def fit_on(
    record: ModelRecord,
    placements: Mapping[int, Placement],
    plan: PlannedRanks,
    agents: NodeAgents,
    config: Config,
    others: Collection[ModelRecord],
    taken: IdleWorkerGroup | None = None,
) -> DoesNotFit | None:
    """Promise the ranks their memory if they fit there. Return the error if they do not.

    Raises what an agent raises: ArenaTooLarge...
    """
    room = await room_of(record, placements, agents, others, taken)
    # From there to the promise nothing else runs, or two loads could be promised the same memory.
    misfit = room.misfit(plan, record.request, config)
    if misfit is None:
        device = record.request.device
        record.promise({rank: host_bytes(plan.ranks[rank], device) for rank in placements}, room.infos)
    return misfit


async def come_up(placements: Iterable[Placement]) -> bool:
    """Wait for workers that are just starting: until one has answered nobody knows how much of its memory it has taken
    already, and all of it is counted. True when one has come up.
    """
    coming = [
        placement
        for placement in placements
        if placement.worker is not None and not (placement.is_up or placement.started or placement.report)
    ]
    await settled(_up(placement) for placement in coming)
    return any(placement.is_up for placement in coming)


async def _up(placement: Placement) -> None:
    worker = placement.worker
    await spawn.meet_worker(worker, placement.host, STARTING_S)
    placement.is_up = placement.is_up or placement.worker is worker


async def fit_in(
    record: ModelRecord,
    plan: PackedPlan,
    agents: NodeAgents,
    config: Config,
    worker_groups: WorkerGroups,
    others: Collection[ModelRecord],
    taken: IdleWorkerGroup | None,
) -> None:
    """Returns when every device and host has the memory. `taken`: the worker group whose workers the load has.

    Raises DoesNotFit, and what an agent raises: ArenaTooLarge...
    """
    # Models that have just ended may not have given back yet what they had.
    freed_s = time.monotonic() + FREED_S  # nor other processes that have just ended
    ended_s = [other.ended_s for other in others if other.life.is_over and other.host_bytes]
    give_up_s = max(ended_s, default=0.0) + FREED_S
    starting_s = time.monotonic() + STARTING_S
    while True:
        misfit = await fit_on(record, record.placements, plan, agents, config, others, taken)
        if misfit is None:
            return
        if ending := in_the_way(worker_groups.idle(), record.nodes):
            await finished(worker_groups.end(ending))
            give_up_s = time.monotonic() + FREED_S
        elif time.monotonic() < starting_s and await _may_fit(record, plan, agents, config, others, taken):
            if not await come_up(record.placements.values()):
                raise misfit
        elif time.monotonic() >= (max(give_up_s, freed_s) if isinstance(misfit, DoesNotFitNow) else give_up_s):
            raise misfit
        else:
            await asyncio.sleep(0.1)


async def _may_fit(
    record: ModelRecord,
    plan: PlannedRanks,
    agents: NodeAgents,
    config: Config,
    others: Collection[ModelRecord],
    taken: IdleWorkerGroup | None,
) -> bool:
    """Return whether only its own workers' memory is missing: some are just starting and may have taken it."""
    room = await room_of(record, record.placements, agents, others, taken)
    starting = {rank for rank in room.new_workers if record.placements[rank].worker is not None}
    settled_room = replace(room, new_workers=room.new_workers - starting)
    return bool(starting) and settled_room.misfit(plan, record.request, config) is None


async def node_memory(
    record: ModelRecord, agents: NodeAgents, config: Config, admission: asyncio.Lock
) -> tuple[tuple[DeviceKey, int], ...]:
    """Limits in bytes by device; none when the request has its own. Raises what agents raise, NotEnoughResources.

    While `admission` is held no agent ends as an idle one, and this load has no placement yet that would keep it.
    """
    request, options = record.request, record.request.device_map
    if options is None or options.modules or options.max_memory is not None:
        return ()
    if request.placement_group is not None:
        ((node_id, host, bundle), *_) = await asyncio.to_thread(nodes.places_in_group, request.placement_group, request)
        gpus = int(request.placement_group.bundle_specs[bundle[1] if bundle else 0].get("GPU", 0))
    else:
        node_id, host, gpus = roomiest(await asyncio.to_thread(nodes.cluster_nodes, (), config.cpu_ranks_per_node))
    async with admission:
        await agents.of({node_id: host})
        facts = await nodes.facts_of([node_id], agents.ask)
    return node_limits(facts[node_id], gpus if request.device == "cuda" else 0, options, request.fit, config)


def roomiest(infos: list[NodeInfo]) -> tuple[str, str, int]:
    """(id, host, GPUs) of the node with most GPUs that are free, else that it has; the first of equals."""
    living = [info for info in infos if info.alive]
    if not living:
        raise NotEnoughResources("the cluster has no living node")
    best = max(living, key=lambda info: (info.gpus_free, info.gpus_total))
    return best.node_id, best.host, best.gpus_free or best.gpus_total


def node_limits(
    node: NodeInfo, gpus: int, options: DeviceMapOptions, fit: FitOptions, config: Config
) -> tuple[tuple[DeviceKey, int], ...]:
    """Return the limits of a rank that has so many of the node's GPUs.

    Ray says how many it gets, not which: each counts as the least roomy of the `gpus` roomiest. Raises ConfigError when
    nobody knows their memory.
    """
    rooms = sorted((room_on(gpu, fit, config).have_bytes for gpu in node.gpus), reverse=True)
    if len(rooms) < gpus:
        raise ConfigError(
            f"the memory of the GPUs of {node.host} is not known",
            hint='say what may be used: max_memory={0: "70GB", "cpu": "100GB"}',
        )
    reserve_bytes = fit.host_reserve_bytes(config)
    left_bytes = min(
        (pool.free_bytes - max(reserve_bytes, pool.reserve_bytes) for pool in node.pools),
        default=node.memory_free_bytes - reserve_bytes,
    )
    left_bytes -= WORKER_BYTES + (0 if node.arena_bytes else planned_window_bytes(node.shm_free_bytes, config))
    limits = options.on_node(rooms[gpus - 1 : gpus] * gpus, left_bytes).max_memory
    return () if limits is None else limits


def own_limits(
    options: DeviceMapOptions, device: str, fit: FitOptions, config: Config
) -> tuple[tuple[DeviceKey, int], ...]:
    """The same for the calling process, of the GPUs that it sees."""
    have_bytes = [room_on(gpu, fit, config).have_bytes for gpu in own_gpus(device)]
    limits = options.on_node(have_bytes, available_host_bytes() - fit.host_reserve_bytes(config)).max_memory
    return () if limits is None else limits


def own_device(device: str) -> str:
    """The device of a rank in the calling process: for "auto" it is "cuda" where the process sees a GPU, else "cpu"."""
    return ("cuda" if own_gpus("cuda") else "cpu") if device == "auto" else device


def own_gpus(device: str) -> list[GpuMemory]:
    """Those that the calling process sees, when it is to use them."""
    if device != "cuda":
        return []
    from actors.devices.cuda_device import free_memory

    return [GpuMemory(total_bytes, free_bytes) for free_bytes, total_bytes in free_memory()]


def own_misfit(
    rank: int,
    facts: RankFacts,
    gpus: Sequence[GpuMemory],
    pools: tuple[MemoryPool, ...],
    device: str,
    fit: FitOptions,
    config: Config,
) -> DoesNotFit | None:
    """The error for a rank in the calling process, which has these GPUs by number and is on a host with those pools.

    None when it fits. Counted is this rank only: nobody promises memory to ranks that are their own hosts.
    """
    needs = {(rank, gpu): size_bytes for gpu, size_bytes in gpu_bytes(facts, device).items()}
    rooms = {(rank, number): room_on(gpu, fit, config) for number, gpu in enumerate(gpus)}
    placements = {place: rooms[place] for place in needs if place in rooms}
    in_memory = NodeInfo("here", "this host", pools=pools)
    kept = config.model_copy(update={"host_reserve_bytes": fit.host_reserve_bytes(config)})
    need = NodeNeed(1, host_bytes(facts, device), 0, 0)
    on_gpus = misfit_text("", needs, placements)
    problems = [on_gpus] * bool(on_gpus) + room_problems(
        [in_memory], {0: need}, (), kept if device == "cpu" else config
    )
    if not problems:
        return None
    emptied = misfit_text("", needs, {place: room.emptied() for place, room in placements.items()})
    kind = DoesNotFitNow if on_gpus and not emptied and len(problems) == 1 else DoesNotFit
    return kind(
        f"the rank does not fit: {'; '.join(problems)}",
        hint="`longshore plan` shows what would: more ranks, a dtype, a quantization, a device_map",
        rank=rank,
    )


_LOG = logging.getLogger("longshore.fit")


class FitChoice:
    """Acts for one model."""

    def __init__(
        self, record: ModelRecord, planner: Planner, agents: NodeAgents, config: Config, worker_groups: WorkerGroups
    ) -> None:
        self._record = record
        self._planner = planner
        self._agents = agents
        self._config = config
        self._worker_groups = worker_groups

    async def choose(
        self, plan: PackedPlan, others: Collection[ModelRecord], taken: IdleWorkerGroup | None
    ) -> PackedPlan:
        """The plan that is loaded. Raises DoesNotFit, which says what would help, and what agents and planning raise.

        What was decided once stays, also when ranks have to go elsewhere.
        """
        record = self._record
        asked = record.request
        if asked.tried and record.plan is not None:
            plan = record.plan
        try:
            await fit_in(record, plan, self._agents, self._config, self._worker_groups, others, taken)
        except DoesNotFit as misfit:
            if asked.fit.mode == AUTO:
                await come_up(record.placements.values())  # or what they have taken would be counted twice
            room = await room_of(record, record.placements, self._agents, others, taken)
            if room.misfit(_Facts(tuple(RankFacts(0, 0, 0) for _ in plan.ranks)), asked, self._config) is not None:
                raise _without_steps(misfit, asked) from misfit  # nothing that is smaller would fit
            if asked.fit.mode != AUTO or asked.tried:
                raise await self._with_offer(misfit, room, ()) from misfit
            return await self._take_less(plan, misfit, room, others)
        if asked.fit.mode == AUTO and not asked.tried:
            self._note((FitTry("as given", _largest(plan.ranks)),))
        return plan

    async def _take_less(
        self,
        plan: PackedPlan,
        misfit: DoesNotFit,
        room: Room,
        others: Collection[ModelRecord],
    ) -> PackedPlan:
        """Return a plan that takes less, measured against the memory before the load's own workers started."""
        record = self._record
        revision, planned = await self._planner.changes(record.request, AUTO, self._limits(room))

        # From here to the promise nothing else runs.
        room = replace(room, claims=larger_claims(room.claims, claims_of(others, record)))

        def why_not(step: PlannedChange) -> str:
            error = room.misfit(_Facts(step.ranks), step.change.request, self._config)
            return "" if error is None else error.message.removeprefix("the load does not fit: ")

        step, later = first_that_fits(planned, why_not, _largest(plan.ranks))
        given = FitTry("as given", _largest(plan.ranks), misfit.message.removeprefix("the load does not fit: "))
        tried = (given, *later)
        if step is None:
            raise await self._with_offer(misfit, room, tried) from misfit
        taken = step.change.request
        record.promise({at: host_bytes(step.ranks[at], taken.device) for at in record.placements}, room.infos)
        less = await self._planner.prepare(taken)
        if {less.revision, revision} != {plan.revision}:
            raise LoadError("the stored model has changed since the load began", model=record.model_id)
        self._note(tried)
        record.change_request(precision=taken.precision, device_map=taken.device_map)
        record.use_plan(less)
        await record.touch()
        return less

    def _limits(self, room: Room) -> Limits:
        """Return one rank's limits on the GPU and on its host, for offload."""
        request = self._record.request
        if request.device != "cuda" or request.world_size > 1 or not room.infos[0].gpus:
            return ()
        options = DeviceMapOptions(OFFLOAD_POLICY)
        return node_limits(room.infos[0], 1, options, request.fit, self._config)

    def _note(self, tried: tuple[FitTry, ...]) -> None:
        """Note what was decided: whoever asks for the same gets this model."""
        record = self._record
        record.change_request(tried=tried, auto_identity=record.request.identity())
        if len(tried) > 1:
            _LOG.warning("%s is loaded with %s: %s", record.model_id, tried[-1].what, steps_text(tried))

    async def _with_offer(self, misfit: DoesNotFit, room: Room, tried: tuple[FitTry, ...]) -> DoesNotFit:
        """The error with the cheapest change that would fit; as it is when that cannot be found out."""
        request = self._record.request
        try:
            _, planned = await self._planner.changes(request, STRICT, self._limits(room))
            at_hand = request.world_size
            if request.device == "cuda":
                infos = await asyncio.to_thread(nodes.cluster_nodes, (), self._config.cpu_ranks_per_node)
                at_hand += sum(info.gpus_free for info in infos)
        except (LongshoreError, OSError) as error:
            if isinstance(error, ClusterError):
                _LOG.warning("what would fit was not found out: %s", error)
            return misfit
        gpus = [gpu for info in room.infos for gpu in info.gpus]
        have_bytes = min((room_on(gpu, request.fit, self._config).have_bytes for gpu in gpus), default=0)

        def fits(each: PlannedChange) -> bool:
            if each.change.ranks == request.world_size:
                return room.misfit(_Facts(each.ranks), each.change.request, self._config) is None
            return request.device == "cuda" and each.need_bytes <= have_bytes  # on more GPUs of that size

        found = cheapest(planned, fits, at_hand)
        hint = offer(found, at_hand, len(planned))
        if tried:
            hint = f'fit="auto" tried: {steps_text(tried)}. {hint}'
        elif any(each.change.kind in ("dtype", "quantization", "offload") for each in found):
            hint += '; fit="auto" takes the first step of precision that fits'
        if not found:
            hint = f"{misfit.hint}. {hint}" if misfit.hint else hint
        change = found[0].change.what if found else None
        return type(misfit)(misfit.message, hint=hint, **{**misfit.details, "change": change})


def _without_steps(misfit: DoesNotFit, asked: LoadRequest) -> DoesNotFit:
    """The error of a load that would not fit without its tensors either."""
    if asked.fit.mode != AUTO:
        return misfit
    hint = f'{misfit.hint}. fit="auto" tried no step: without any of the tensors there is no room either'
    return type(misfit)(misfit.message, hint=hint, **misfit.details)


@dataclass(frozen=True, slots=True)
class _Facts:
    ranks: tuple[RankFacts, ...]


def _largest(ranks: Collection[RankFacts]) -> int:
    return max((rank.device_bytes + rank.staging_bytes for rank in ranks), default=0)
