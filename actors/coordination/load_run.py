"""One load from request to READY, and the model's ranks after that: plan, place, start, tend, end.

    run:     plan (planning process) -> placements (idle group or new) -> agents, fit, begin on every node -> tend
                                                                      `-> workers start meanwhile
    tend:    one task per rank waits for its worker's outcome, then for its end; a death makes a new incarnation, the
             death of a node new places (`actors.coordination.placing`)
    resume:  the same from "tend" on, for a load whose coordinator was killed

What happens next is decided by the pure `cluster.scheduling.load_state`; this file carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from actors.coordination import nodes, spawn
from actors.coordination.fit import FitChoice, node_memory
from actors.coordination.jobs import find_workers_again, members_of, node_job, rank_job, slots_taken
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.nodes import ACTOR_GONE
from actors.coordination.placing import Relocation, take_placements
from actors.coordination.planner import in_message, use_working_access
from actors.coordination.run_parts import RunParts
from actors.coordination.scale_run import ScaleRun
from actors.coordination.spawn import alongside, finished, settled, tend_all
from actors.coordination.update_run import UpdateRun
from cluster.errors import (
    ClusterError,
    ClusterLost,
    LoadCancelled,
    ModelNotFound,
    NodeLost,
    RankLost,
    RankTaken,
)
from cluster.joining.node_tasks import unwrapped
from cluster.planning.packed_plan import PackedPlan
from cluster.request import UpdateRequest
from cluster.scheduling import load_state
from cluster.scheduling.topology import IdleWorkerGroup
from cluster.telemetry.report import LoadReport, NodeReport, ProcessMemory
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.stats import join_checks, verified_by
from cluster.telemetry.update_report import UpdateReport
from storage.errors import LongshoreError


def make_report(record: ModelRecord, plan: PackedPlan, answers: Sequence[NodeReport]) -> LoadReport:
    """Return what the load did; `answers` per node, in the order of `record.nodes`."""
    request = record.request
    objects = join_checks(check for node in answers for check in node.objects)
    ranks = tuple(
        placement.report for _, placement in sorted(record.placements.items()) if placement.report is not None
    )
    total_s = time.monotonic() - record.created_s
    # Clocks are not compared across hosts: what a rank measured is counted from when it was given its job.
    started = [
        (placement.job_sent_s - record.created_s, placement.report)
        for placement in record.placements.values()
        if placement.job_sent_s
    ]
    first_s = [job_sent_s + rank.start_s for job_sent_s, rank in started if rank is not None]
    last_s = [job_sent_s + rank.start_s + rank.load_s for job_sent_s, rank in started if rank is not None]
    planned_s = record.planned_s - record.created_s
    if first_s:
        start_s, load_s = max(0.0, min(first_s) - planned_s), max(last_s) - min(first_s)
    else:  # the coordinator was killed meanwhile, and knows only what the ranks say
        load_s = max((rank.load_s for rank in ranks), default=0.0)
        start_s = max(0.0, total_s - planned_s - load_s)
    received = any(node.direct_bytes for node in answers)
    reason = request.placement_reason(direct=any(node.direct for node in answers), received=received)
    return LoadReport(
        model_id=record.model_id,
        uri=request.uri,
        revision=record.revision,
        verified=plan.verified if plan.verified != "transport" else verified_by(objects),
        signed_by=record.signed_by,
        placement_mode="direct" if received else "via_arena",
        placement_reason="; ".join(filter(None, (reason, record.note))),
        resident=False,
        layout=request.layout,
        model_bytes=plan.model_bytes,
        placed_bytes=sum(rank.size_bytes for rank in ranks),
        overfetch_bytes=sum(node.overfetch_bytes for node in answers),
        plan_s=planned_s,
        start_s=start_s,
        load_s=load_s,
        total_s=total_s,
        attempts=record.life.attempt,
        ranks=ranks,
        nodes=tuple(answers),
        first_byte_s=min(first_s, default=0.0),
        ready_after_last_byte_s=max(0.0, total_s - max(last_s, default=total_s)),
        control_plane=_control_plane(record, plan),
        precision=request.precision,
        quantization_config=plan.quantization_config,
        fit=request.tried,
    )


def _control_plane(record: ModelRecord, plan: PackedPlan) -> tuple[ProcessMemory, ...]:
    record.memory.sample()
    coordinator = ProcessMemory(
        "coordinator", socket.gethostname(), record.memory.baseline_bytes, record.memory.peak_bytes
    )
    return (coordinator,) if plan.memory is None else (coordinator, plan.memory)


PROCESS_START_S = 120.0  # of a worker, on a machine that is busy with something else
TELL_S = 5.0  # for agents to answer where the others serve chunks
FREED_S = 30.0  # a model that is being released has freed its places and memory by then

RankEvent = load_state.RankReady | load_state.RankLost | load_state.RankReplaced


class LoadRun:
    """Acts for one model."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._record = parts.record
        self._relocating = Relocation(parts, self.begin_on)

    # -- the two ways in ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From the request to the model's end. Never raises: what goes wrong ends the model with that error."""
        try:
            plan = await self._plan()
            worker_group = await self._take_placements()
            while True:
                try:
                    await alongside(self._start_workers(), self._begin(plan, worker_group))
                    break
                except (NodeLost, ClusterLost, RayError, TimeoutError) as error:
                    if not await self._relocating.is_needed(error):
                        raise
                    await self._move()
            await self._tend_all()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self.end(unwrapped(error))

    async def resume(self, incarnations: dict[int, int]) -> None:
        """After the coordinator was restarted: find the workers by name and go on."""
        try:
            await self._event(load_state.Planned)
            await self._event(load_state.Started)
            await find_workers_again(self._record, incarnations)
            await self._scaling().remove_beyond()
            await self._updates().resume()
            for placement in self._record.placements.values():
                await self._rank_event(load_state.RankReplaced, placement)
            await self._tend_all()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self.end(unwrapped(error))

    async def update(self, asked: UpdateRequest) -> UpdateReport:
        """Update the resident model in place. Raises the update's error (`UpdateRun.run`)."""
        return await self._updates().run(asked)

    async def scale(self, data_parallel_size: int) -> ScaleReport:
        """Give the resident model that many replicas. Raises the error (`ScaleRun.run`)."""
        return await self._scaling().run(data_parallel_size)

    def _scaling(self) -> ScaleRun:
        return ScaleRun(self._parts, self.begin_on)

    def _updates(self) -> UpdateRun:
        return UpdateRun(self._parts, self.begin_on)

    async def end(self, error: LongshoreError) -> None:
        """Free everything; the model is over, with `error`. No cancellation cuts it short: who hears of the error
        may release the model at once, which cancels the task that is at work here.
        """
        if not self._record.life.is_over:
            await finished(self._end(error))

    async def _end(self, error: LongshoreError) -> None:
        record = self._record
        # What failed may be broken, and what was not ready yet has reads under way.
        kept = isinstance(error, LoadCancelled) and record.life.is_ready and not record.beyond()
        await record.end(error)
        await self._parts.worker_groups.part(record, keep=kept)
        await record.touch()

    # -- the steps of a load -----------------------------------------------------------------------------------

    async def _plan(self) -> PackedPlan:
        record = self._record
        if limits := await node_memory(record, self._parts.agents, self._parts.config, self._parts.admission):
            record.change_request(node_memory=limits)
        plan = await self._parts.planner.prepare(record.request)
        record.planned(plan)
        await self._event(load_state.Planned)
        return plan

    async def _take_placements(self) -> IdleWorkerGroup | None:
        """Place every rank, one load at a time: two would take the same places. Return the group taken over."""
        record, request = self._record, self._record.request
        deadline_s = time.monotonic() + request.wait_for_resources_s
        if freeing := [o.ending for o in self._parts.models.values() if o.ending is not None and not o.ending.done()]:
            await asyncio.wait(freeing, timeout=FREED_S)
        while True:
            async with self._parts.admission:
                try:
                    others = [o for o in self._parts.models.values() if o is not record and not o.life.is_over]
                    may_wait = time.monotonic() < deadline_s
                    worker_group = await take_placements(
                        record, others, self._parts.worker_groups, self._parts.config, may_wait=may_wait
                    )
                    break
                except ClusterError as error:
                    if not nodes.may_resolve(error):
                        raise
                    if not (may_wait or self._gpus_come(error)):
                        raise error.with_details(waited_s=request.wait_for_resources_s or None) from None
                    message = str(error)
            await self._event(load_state.ResourcesMissing)
            await record.touch(f"waiting for resources: {message}")
            await asyncio.sleep(min(1.0, max(0.2, deadline_s - time.monotonic())))
        await self._event(load_state.ResourcesGranted)
        if record.message:
            await record.touch("")
        for placement in record.placements.values():
            if placement.incarnation:  # in a worker group there may be replacements
                await self._rank_event(load_state.RankReplaced, placement)
        return worker_group

    def _gpus_come(self, error: ClusterError) -> bool:
        """Return whether the GPUs that are missing were given back so lately that Ray may not count them yet."""
        missing = error.details.get("need", 0) - error.details.get("have", 0)
        return self._record.request.device == "cuda" and missing > 0 and self._parts.worker_groups.may_free(missing)

    async def _start_workers(self) -> None:
        """Processes for the ranks that have none; they come up while the agents are told."""
        missing = [placement for placement in self._record.placements.values() if placement.worker is None]
        await finished(settled(self._start_worker(placement) for placement in missing))

    async def _begin(self, plan: PackedPlan, worker_group: IdleWorkerGroup | None) -> None:
        """See that the plan fits, and tell every agent what its node needs; then the workers can have their jobs."""
        others = self._parts.models.values()
        await FitChoice(
            self._record, self._parts.planner, self._parts.agents, self._parts.config, self._parts.worker_groups
        ).choose(plan, others, worker_group)
        members = await self._packed_members()
        await asyncio.gather(*(self.begin_on(node_id, members) for node_id in self._record.nodes))
        await self._event(load_state.Started)

    async def begin_on(self, node_id: str, members: Any = None) -> None:
        """Tell one agent; again after it was restarted, with what its ranks have already.

        `members`: packed, if they are known.
        """
        record, members = self._record, await self._packed_members() if members is None else members
        revision = record.revision
        shared = await self._parts.source.shared(apart=not isinstance(members, bytes))
        if record.revision != revision:
            return await self.begin_on(node_id)

        def begin(agent: Any, attempt: int) -> Any:
            job = replace(node_job(record, node_id, attempt, self._parts.config), revision=revision)
            return agent.begin.remote(job, members, shared)

        for attempt in record.attempts_on(node_id):
            began_s = time.monotonic()
            while not await self._parts.agents.ask(node_id, functools.partial(begin, attempt=attempt)):
                await record.touch("waiting for arena slots that other loads hold")
                await self._check_slots_come(node_id, attempt, time.monotonic() - began_s)
                await asyncio.sleep(0.2)
            record.begun_on(node_id, attempt)
        if record.message:
            await record.touch("")

    async def _move(self) -> set[int]:
        """Move the ranks of lost nodes (`Relocation.run`). First the other nodes are told not to ask those.

        Ranks that join make room for them: they are removed first. Ranks that are removed already are not waited for:
        a call that they run may wait for a lost one.
        """
        if self._record.life.joining:
            await self._record.fail_join(NodeLost("a node of the model was lost meanwhile"))
            async with self._record.changed:
                await self._record.changed.wait_for(lambda: not self._record.beyond())
        living = await asyncio.to_thread(nodes.living_nodes)
        if self._record.lose_peers(living):
            await self.tell_members(self._record.nodes.keys() - living.keys())
        return await self._relocating.run()

    async def tell_members(self, but: Collection[str]) -> None:
        """Tell the agents, except those of the nodes `but`, where all nodes serve chunks now. Those that are not well
        read from the store.
        """
        record, members = self._record, await self._packed_members()

        def tell(agent: Any) -> Any:
            return agent.update_members.remote(record.model_id, members)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                await settled(self._parts.agents.ask(node_id, tell) for node_id in record.nodes if node_id not in but)

    async def _packed_members(self) -> Any:
        """Return the members as an argument of a remote call (`in_message`)."""
        self._record.note_ports()
        return await in_message(members_of(self._record, self._parts.models.values()).pack())

    async def _check_slots_come(self, node_id: str, attempt: int, waited_s: float) -> None:
        """Returns while the load may go on waiting for slots. Raises ArenaBusy, which names who holds them."""
        if waited_s < max(self._parts.config.slots_wait_s, self._record.request.wait_for_resources_s):
            return
        holders = await self._parts.agents.ask(node_id, lambda agent: agent.slot_holders.remote())
        job = node_job(self._record, node_id, attempt, self._parts.config)
        raise slots_taken(job, self._record.nodes[node_id], waited_s, holders)

    async def _tend_all(self) -> None:
        record = self._record
        await tend_all(record.placements, self._tend_member, self._move, record.joined)

    async def _tend_member(self, placement: Placement) -> None:
        """Tend a rank. The error of one that joins ends the growth only, and that of one that was removed nothing."""
        try:
            await self._tend(placement)
        except Exception as error:
            record = self._record
            if record.has(placement) and not record.joins(placement.rank):
                raise
            if record.has(placement):
                await record.fail_join(unwrapped(error))

    async def _tend(self, placement: Placement) -> None:
        """Keep one rank alive: a worker that dies is replaced, `rank_restarts` times in a row before it has loaded."""
        record = self._record
        restarts = 0
        while record.has(placement):
            try:
                if placement.worker is None:
                    await finished(self._start_worker(placement))
                if not placement.started:
                    await self._give_job(placement)
                placement.asked_s = time.monotonic()
                outcome = placement.worker.outcome.options(concurrency_group="wait").remote(record.model_id)
                placement.report, restarts = await outcome, 0
                if not record.has(placement):
                    return
                await self._rank_event(load_state.RankReady, placement)
                if record.life.is_ready and record.report is None:
                    record.finish(await self._report(), self._parts.models.values())
                    await record.touch()
                await placement.worker.lifetime.options(concurrency_group="wait").remote(record.model_id)
                return
            except (*ACTOR_GONE, TimeoutError, RankTaken) as error:
                # (RankTaken: found by its name by a restarted coordinator, while the word of its end was on its way.)
                if not record.has(placement):
                    return
                placement.report = None
                await self._rank_event(load_state.RankLost, placement)
                await self._vacate(placement)
                restarts += 1
                if restarts > self._parts.config.rank_restarts:
                    raise RankLost(
                        f"rank {placement.rank} was lost {restarts} times",
                        hint="see the worker's log in Ray's session folder; out of memory is the usual cause",
                        rank=placement.rank,
                        host=placement.host,
                        cause=(str(error) or "its worker did not answer").splitlines()[0][:300],
                    ) from error
                await self._rank_event(load_state.RankReplaced, placement)

    async def _give_job(self, placement: Placement) -> None:
        revision = None
        while revision != self._record.revision:  # an update may have been decided meanwhile
            revision = self._record.revision
            if placement.replaced or self._record.joins(placement.rank):
                await use_working_access(self._record, self._parts.planner)
            shared = await self._parts.source.shared()
        job = rank_job(self._record, placement, self._parts.config)
        if not placement.is_up:
            await spawn.meet_worker(
                placement.worker, placement.host, PROCESS_START_S + self._parts.config.stuck_after_s
            )
        if revision != self._record.revision:
            return await self._give_job(placement)
        placement.give_job()
        # Until a worker has said hello to its agent, nobody else would notice that it is stuck.
        start = placement.worker.start.options(concurrency_group="control").remote(job, shared)
        await asyncio.wait_for(start, self._parts.config.stuck_after_s)
        placement.started = True

    async def _start_worker(self, placement: Placement) -> None:
        placement.worker = await asyncio.to_thread(
            lambda: spawn.start_worker(
                self._record.worker_group_id,
                placement.rank,
                placement.incarnation,
                node_id=placement.node_id,
                device=self._record.request.device,
                bundle=placement.bundle,
                orphan_after_s=self._parts.config.orphan_after_s,
                gpus=self._record.request.gpus_per_rank,
            )
        )
        if not self._record.has(placement):  # it was removed meanwhile, or is about to be
            await asyncio.to_thread(spawn.end_actor, placement.worker)

    async def _vacate(self, placement: Placement) -> None:
        """The rank's worker is gone: a new incarnation is to come, and loads only the rank's own slices again.

        Raises NodeLost when it went with its node.
        """
        await asyncio.to_thread(spawn.end_actor, placement.worker)
        placement.vacate()
        model_id, rank, incarnation = self._record.model_id, placement.rank, placement.incarnation
        await self._parts.agents.ask(
            placement.node_id, lambda agent: agent.rank_lost.remote(model_id, rank, incarnation)
        )

    async def _report(self) -> LoadReport:
        record = self._record
        plan = record.plan or record.outline or await self._parts.source.plan()
        answers = await asyncio.gather(*(self._node_report(node_id) for node_id in record.nodes))
        return make_report(record, plan, [answer for answer in answers if answer is not None])

    async def _node_report(self, node_id: str) -> NodeReport | None:
        """Return the report of a node, or None if its ranks were removed meanwhile."""
        while True:
            try:
                report: NodeReport = await self._parts.agents.ask(
                    node_id, lambda agent: agent.report.remote(self._record.model_id)
                )
                return report
            except ModelNotFound:  # the agent was restarted just now, and its ranks need nothing of it
                if not self._record.attempts_on(node_id):
                    return None
                await self.begin_on(node_id)

    async def _event(self, kind: type[load_state.Event]) -> None:
        await self._record.advance(kind(attempt=self._record.life.attempt))

    async def _rank_event(self, kind: type[RankEvent], placement: Placement) -> None:
        await self._record.advance(kind(placement.rank, placement.incarnation, attempt=self._record.life.attempt))
