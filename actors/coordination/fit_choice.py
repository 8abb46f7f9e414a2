"""What becomes of a load that does not fit: with fit="auto" it takes less precision, else it is told what would help.

fits as given ------------------------------------------> that plan
auto:   the steps, planned in a planning process --first that fits--> its plan, and the request is changed
strict: changes, planned likewise --cheapest that fit--> DoesNotFit names them
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

from actors.coordination import nodes
from actors.coordination.admission import Room, claims_of, come_up, fit_in, promise, room_of
from actors.coordination.gangs import Gangs
from actors.coordination.model_record import ModelRecord
from actors.coordination.node_limits import node_limits
from actors.coordination.nodes import NodeAgents
from actors.coordination.planner import Planner
from cluster.config import Config
from cluster.device_map.options import DeviceMapOptions
from cluster.errors import ClusterError, DoesNotFit, LoadError
from cluster.fit.needs import host_bytes, larger_claims, room_on
from cluster.fit.options import AUTO, STRICT, FitTry
from cluster.fit.search import OFFLOAD_POLICY, Limits, PlannedChange, cheapest, first_that_fits, offer, steps_text
from cluster.plans.packed_plan import PackedPlan
from cluster.plans.rank_plans import RankFacts
from cluster.request import LoadRequest
from cluster.scheduling.warm_pool import IdleGang
from storage.errors import LongshoreError

_LOG = logging.getLogger("longshore.fit")


class FitChoice:
    """Acts for one model."""

    def __init__(self, record: ModelRecord, planner: Planner, agents: NodeAgents, config: Config, gangs: Gangs) -> None:
        self._record = record
        self._planner = planner
        self._agents = agents
        self._config = config
        self._gangs = gangs

    async def choose(self, plan: PackedPlan, others: Collection[ModelRecord], taken: IdleGang | None) -> PackedPlan:
        """The plan that is loaded. Raises DoesNotFit, which says what would help, and what agents and planning raise.

        What was decided once stays, also when ranks have to go elsewhere.
        """
        record = self._record
        asked = record.request
        if asked.tried and record.plan is not None:
            plan = record.plan
        try:
            await fit_in(record, plan, self._agents, self._config, self._gangs, others, taken)
        except DoesNotFit as misfit:
            if asked.fit.mode == AUTO:
                await come_up(record.seats.values())  # or what they have taken would be counted twice
            room = await room_of(record, record.seats, self._agents, others, taken)
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
        """Of what there was when the load was found not to fit: since then its own workers start, and take memory."""
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
        promise(record, {at: host_bytes(step.ranks[at], taken.device) for at in record.seats}, room.infos)
        less = await self._planner.prepare(taken)
        if {less.revision, revision} != {plan.revision}:
            raise LoadError("the stored model has changed since the load began", model=record.model_id)
        self._note(tried)
        record.request = replace(record.request, precision=taken.precision, device_map=taken.device_map)
        record.plan, record.shared = less, None
        record.total_bytes = sum(rank.read_bytes for rank in less.ranks)
        await record.touch()
        return less

    def _limits(self, room: Room) -> Limits:
        """Of the GPU and of its host, for offload: of one rank."""
        request = self._record.request
        if request.device != "cuda" or request.world_size > 1 or not room.infos[0].gpus:
            return ()
        options = DeviceMapOptions(OFFLOAD_POLICY)
        return node_limits(room.infos[0], 1, options, request.fit, self._config)

    def _note(self, tried: tuple[FitTry, ...]) -> None:
        """What was decided is part of the request from here on: whoever asks for the same gets this model."""
        record = self._record
        record.request = replace(record.request, tried=tried, auto_identity=record.request.identity())
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
