"""Changes the number of replicas of one resident model, while its other ranks serve.

    grow:    places beside the model's --> fit --> ranks join: they are begun on their nodes, and tended like all others
                 `--no room: nothing was touched     |--one cannot be filled: all that joined are removed, as before
                                                     `--all are ready: the layout has them from now on
    shrink:  the layout is without the last replicas --> their running calls end --> workers end, their placement groups
             are removed, agents forget them

The layout in the record, which agents keep, is the decision. `remove_beyond` removes the placements beyond it, after a
failure and when the coordinator was restarted. States of ranks that join are those of `Life.joining`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from actors.coordination.fit import fit_on
from actors.coordination.jobs import save
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.placing import more_places
from actors.coordination.run_parts import RunParts
from actors.coordination.spawn import alongside, answer_of, finished, settled
from actors.coordination.worker_groups import end_workers
from cluster.errors import ModelNotFound, ScaleFailed, ScaleRefused
from cluster.joining.node_tasks import unwrapped
from cluster.layouts.mesh import Layout
from cluster.planning.packed_plan import PackedPlan
from cluster.scheduling import load_state
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.stats import NodeReport

FORGET_S = 15.0  # for an agent to forget ranks that were removed


class ScaleRun:
    """Acts for one change of one model."""

    def __init__(self, parts: RunParts, begin_on: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """`begin_on(node)`: gives the node's agent the model's job as it is now (`LoadRun.begin_on`)."""
        self._parts = parts
        self._record = parts.record
        self._begin_on = begin_on

    async def run(self, data_parallel_size: int) -> ScaleReport:
        """Give the model that many replicas. Raises the error; the model is as before then."""
        record, begun_s = self._record, time.monotonic()
        check_scalable(record)
        before = record.request.layout
        layout = before.with_replicas(data_parallel_size)
        report = ScaleReport(record.model_id, before.data_parallel_size, layout)
        if layout == before:
            return report
        await record.changes.say(f"the model gets {layout.data_parallel_size} replicas")
        plan = await self._plan(layout)
        if layout.ranks > before.ranks:
            return await self._grow(layout, plan, begun_s)
        return await self._shrink(layout, plan, begun_s)

    async def _plan(self, layout: Layout) -> PackedPlan:
        """Return the plan with that layout, made of what the ranks hold: the store is not asked."""
        record = self._record
        base = record.plan or record.outline or await self._parts.source.plan()
        shared = base.shared
        if not shared:  # a restarted coordinator has no tables, and agents do
            node_id = next(iter(record.nodes))
            shared = await self._parts.agents.ask(node_id, lambda agent: agent.tables.remote(record.model_id))
        ranks, shared = await self._parts.planner.scaled(shared, layout)
        return base.with_ranks(ranks, shared)

    # -- more replicas -------------------------------------------------------------------------------------------------

    async def _grow(self, layout: Layout, plan: PackedPlan, begun_s: float) -> ScaleReport:
        record, old_plan, old = self._record, self._record.plan, self._record.request.layout
        placements = await self._place(layout, plan)
        placed_s = time.monotonic()
        try:
            await save(record)  # before any worker is started
            record.tend_joined()
            await alongside(self._begin(placements), self._filled(placements))
            sources = await self._sources(placements)
            await self._filled(placements)  # one may have been lost meanwhile
            for problem in (record.error, record.join_error):
                if problem is not None:
                    raise problem
        except asyncio.CancelledError:
            raise  # the model is released, with all its ranks
        except Exception as error:
            await finished(self._undo(old_plan))
            if record.error is not None:
                raise record.error from error  # the model has ended
            failure = unwrapped(error)
            raise ScaleFailed(
                f"further replicas could not be filled, and the model has {old.data_parallel_size}: {failure}",
                model=record.model_id,
                cause=type(failure).__name__,
            ) from error
        hosts = tuple(placement.host for placement in placements)
        reports = [placement.report for placement in placements]
        await finished(self._decide(layout, plan))
        now_s = time.monotonic()
        return ScaleReport(
            record.model_id,
            old.data_parallel_size,
            layout,
            tuple(placement.rank for placement in placements),
            hosts,
            sum(report.size_bytes for report in reports if report is not None),
            sources,
            place_s=placed_s - begun_s,
            fill_s=now_s - placed_s,
            total_s=now_s - begun_s,
        )

    async def _place(self, layout: Layout, plan: PackedPlan) -> list[Placement]:
        """Place the further ranks, and let them join. Raises NotEnoughResources, DoesNotFit; nothing has changed."""
        record = self._record
        first, attempt = record.request.world_size, record.life.attempt + 1
        async with self._parts.admission:
            found = await more_places(
                record, layout, plan, self._parts.models.values(), self._parts.worker_groups, self._parts.config
            )
            placements = [
                Placement(rank, *place, attempt, incarnation=record.next_incarnations.get(rank, 0))
                for rank, place in enumerate(found, first)
            ]
            by_rank = {placement.rank: placement for placement in placements}
            misfit = await fit_on(
                record, by_rank, plan, self._parts.agents, self._parts.config, self._parts.models.values()
            )
            if misfit is not None:
                raise misfit
            check_scalable(record)
            if attempt != record.life.attempt + 1:
                raise ScaleRefused("a rank was moved meanwhile", hint="try it again", model=record.model_id)
            record.grow(plan, placements)
            incarnations = tuple(placement.incarnation for placement in placements)
            await record.advance(load_state.Grown(incarnations, attempt=attempt))
        return placements

    async def _begin(self, placements: Collection[Placement]) -> None:
        node_ids = sorted({placement.node_id for placement in placements})
        await alongside(*(self._begin_on(node_id) for node_id in node_ids))

    async def _filled(self, placements: Sequence[Placement]) -> None:
        """Return when every one of these ranks is ready. Raises the error of one that cannot be filled."""
        record = self._record

        def is_over() -> bool:
            ready = [record.life.ranks[placement.rank].ready for placement in placements]
            return record.join_error is not None or not record.is_usable or all(ready)

        async with record.changed:
            await record.changed.wait_for(is_over)
        if record.join_error is not None:
            raise record.join_error

    async def _sources(self, placements: Collection[Placement]) -> dict[str, int]:
        """Add up where the agents had the bytes of these ranks from."""
        model_id, found = self._record.model_id, dict[str, int]()

        async def report(node_id: str, attempt: int) -> NodeReport:
            answer: NodeReport = await self._parts.agents.ask(
                node_id, lambda agent: agent.report.remote(model_id, attempt)
            )
            return answer

        async def report_again(node_id: str, attempt: int) -> NodeReport:
            try:
                return await report(node_id, attempt)
            except ModelNotFound:  # the agent was restarted just now; its ranks have all that they need
                await self._begin_on(node_id)
                return await report(node_id, attempt)

        shares = sorted({(placement.node_id, placement.attempt) for placement in placements})
        for answer in await asyncio.gather(*(report_again(*share) for share in shares)):
            for source, size_bytes in answer.bytes_by_source.items():
                found[source] = found.get(source, 0) + size_bytes
        return found

    async def _decide(self, layout: Layout, plan: PackedPlan | None) -> None:
        """The model has that layout from now on, whatever happens."""
        record = self._record
        record.scale_to(layout, plan)
        await record.advance(load_state.Scaled(layout.ranks, attempt=record.life.attempt))
        await save(record)

    async def _undo(self, plan: PackedPlan | None) -> None:
        """Remove the ranks that joined: the model is as it was before."""
        await self._decide(self._record.request.layout, plan)
        await self.remove_beyond()

    # -- fewer replicas ------------------------------------------------------------------------------------------------

    async def _shrink(self, layout: Layout, plan: PackedPlan, begun_s: float) -> ScaleReport:
        record, old = self._record, self._record.request.layout
        check_scalable(record)
        await finished(self._decide(layout, plan))
        removed = record.beyond()
        await settled(self._calls_end(placement) for placement in removed)
        await finished(self.remove_beyond())
        seconds = time.monotonic() - begun_s
        return ScaleReport(
            record.model_id,
            old.data_parallel_size,
            layout,
            tuple(placement.rank for placement in removed),
            tuple(placement.host for placement in removed),
            fill_s=seconds,
            total_s=seconds,
        )

    async def _calls_end(self, placement: Placement) -> None:
        """Return when the calls that the rank was given have ended. They run one after the other.

        Raises TimeoutError when the process hangs.
        """
        worker, patience_s = placement.worker, self._parts.config.stuck_after_s
        if worker is None:
            return
        fence = uuid.uuid4().hex

        await asyncio.wait_for(worker.withdraw.options(concurrency_group="control").remote(fence), patience_s)
        ended = worker.call.options(concurrency_group="call").remote(self._record.model_id, None, fence)
        await answer_of(worker, placement.host, ended, patience_s)

    async def remove_beyond(self) -> None:
        """End the workers of all ranks that are not the layout's, give GPUs back, and let agents forget the ranks."""
        record = self._record
        removed = record.beyond()
        if removed:
            await end_workers([placement for placement in removed if placement.worker is not None])
            record.remove(removed)
        await self._parts.worker_groups.give_back(record.drop_groups(unused_only=True))
        if not removed:
            return
        await settled(
            asyncio.wait_for(self._forget(*share), FORGET_S)
            for share in sorted({(placement.node_id, placement.attempt) for placement in removed})
        )
        await save(record)
        await record.touch()

    async def _forget(self, node_id: str, attempt: int) -> None:
        record = self._record
        if record.ranks_on(node_id, attempt):
            if record.plan is None:  # after the coordinator was restarted
                record.use_plan(await self._plan(record.request.layout))
            await self._begin_on(node_id)  # its job has the other ranks only
        elif node_id in record.nodes:
            await self._parts.agents.ask(node_id, lambda agent: agent.end.remote(record.model_id, attempt))
        else:
            await self._parts.agents.ask(node_id, lambda agent: agent.end.remote(record.model_id))


def check_scalable(record: ModelRecord) -> None:
    """Raise ScaleRefused unless the model can be given another number of replicas now."""
    request, why, hint = record.request, "", ""
    if request.placement_group is not None:
        why = "the model is in a placement group of your own, where Longshore places no further ranks"
        hint = "load it without placement_group, or load a second model"
    elif request.device_map is not None:
        why = "the model has a device map, and with it one rank"
        hint = "load a second model"
    elif record.broken:
        why = "the ranks have contents of two revisions"
        hint = "update the model again, or release it"
    elif record.ending is not None or record.error is not None or not record.life.is_ready:
        why = "only a model that is ready can get another number of replicas"
        hint = "longshore status shows its state"
    if why:
        raise ScaleRefused(why, hint=hint, model=record.model_id, state=record.life.state.value)
