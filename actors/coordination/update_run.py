"""Leads an update in place of one resident model, over all its ranks.

    plan what changed --> room on every host? --> agents begin a load of it --> every rank stages it, verified
        `--refused, nothing was touched             `------- a failure: all is dropped, the old revision stays
    all have staged: the decision is noted and saved --> every rank exchanges, or is replaced --> done

The load of what changed has an id of its own at the agents, and is ended there before the exchange. What the phases
mean is decided by the pure `cluster.scheduling.update_state`. With `streaming` the decision comes first, and ranks read
into their tensors.

A coordinator that was restarted goes on with an exchange that was decided, and drops any other update (`resume`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from actors.coordination import nodes, spawn
from actors.coordination.fit import claims_of
from actors.coordination.jobs import members_of, save, slots_taken, update_job, update_jobs
from actors.coordination.model_changes import SavedUpdate
from actors.coordination.model_record import ModelRecord, Placement, stopped
from actors.coordination.nodes import ACTOR_GONE
from actors.coordination.planner import in_message
from actors.coordination.run_parts import RunParts
from actors.coordination.spawn import alongside, answer_of, finished, settled
from cluster.errors import ModelBroken, UpdateFailed, UpdateRefused
from cluster.fit.needs import check_update_fit, larger_claims
from cluster.joining.node_tasks import unwrapped
from cluster.messages import AgentBeat, NodeJob, RankBeat
from cluster.planning.update_plan import PackedUpdate
from cluster.request import UpdateRequest
from cluster.scheduling.update_state import RankStep, UpdateLife, UpdatePhase, is_decided
from cluster.telemetry.stats import NodeReport
from cluster.telemetry.update_report import UpdateReport
from storage.errors import LongshoreError

DROP_S = 15.0  # for workers and agents to drop what was staged
SLOTS_AGAIN_S = 0.2


class UpdateRun:
    """Acts for one update of one model."""

    def __init__(self, parts: RunParts, begin_on: Callable[[str], Awaitable[None]]) -> None:
        """`begin_on(node)`: gives the node's agent the model's job as it is now (`LoadRun.begin_on`)."""
        self._parts = parts
        self._record = parts.record
        self._begin_on = begin_on
        self._jobs: list[tuple[str, NodeJob]] = []  # that agents have begun
        self._tables: tuple[Any, Any] = b"", b""  # members and tables, as they are sent
        self._again: dict[str, asyncio.Task[None]] = {}  # by node: its agent was restarted
        self._alarm: LongshoreError | None = None  # why the update cannot go on, by what agents say
        self._alarmed = asyncio.Event()
        self._incarnations: dict[int, tuple[str, int]] = {}  # of the workers that stage: node, incarnation
        self._resumed = False  # an earlier coordinator began it, and had the tables of what changed
        self._forgot: set[str] = set()  # nodes whose agent has nothing of a stream that was resumed
        self._sources: dict[str, int] = {}

    async def run(self, asked: UpdateRequest) -> UpdateReport:
        """Carry out the update. Raises its error; the model is as before then, unless it was streamed into."""
        record, begun_s = self._record, time.monotonic()
        self._check_ready()
        await record.changes.say("an update is planned")
        target = asked.target(record.request)
        update = await self._parts.planner.update(target, await self._old_tables(), all_changed=bool(record.broken))
        pinned = update.plan.revision if record.request.revision else ""
        target = replace(target, revision=pinned)
        saved = SavedUpdate(
            asked.update_id, target, record.revision, update.plan.revision, update.plan.signed_by, asked.streaming
        )
        planned_s = time.monotonic()
        record.changes.reads(sum(each.read_bytes for each in update.ranks))
        host_bytes = await self._room(update, asked.streaming)
        self._check_ready()  # nothing is awaited from here until the update is noted
        self._incarnations = _incarnations(record)
        base = "" if record.broken else saved.base
        life = UpdateLife.new(len(record.placements), streaming=saved.streaming)
        record.changes.begin(saved, life, self._heard)
        record.changes.promise(host_bytes, update.ranks)
        try:
            await save(record)
            await self._begin(update, host_bytes)
            if saved.streaming:
                self._check_same_workers()
                record.adopt(saved, update.plan, [target.store])
                await save(record)
            await self._read(update, base)
            if not saved.streaming:
                self._check_same_workers()
                self._decide()
                record.adopt(saved, update.plan, [target.store])
        except asyncio.CancelledError:
            await finished(self._end_reading())
            raise
        except Exception as error:
            raise await finished(self._failed(saved, unwrapped(error))) from error
        staged_s = time.monotonic()
        await save(record)
        await self._exchange()
        now_s = time.monotonic()
        return UpdateReport(
            record.model_id,
            saved.update_id,
            record.request.uri,
            saved.base,
            saved.revision,
            update.tensors,
            update.changed_tensors,
            update.changed_bytes,
            reused_bytes=max(0, update.plan.model_bytes - update.changed_bytes),
            bytes_by_source=self._sources,
            staged_bytes=0 if saved.streaming else sum(host_bytes.values()),
            streaming=saved.streaming,
            ranks=self._steps(),
            plan_s=planned_s - begun_s,
            stage_s=staged_s - planned_s,
            exchange_s=now_s - staged_s,
            total_s=now_s - begun_s,
            signed_by=saved.signed_by,
        )

    async def resume(self) -> None:
        """After the coordinator was restarted: go on with an exchange that was decided, or drop the update.

        The model's workers have been found. Returns at once; the rest is done beside the tending of ranks.
        """
        record = self._record
        saved = record.changes.update
        if saved is None:
            return
        found = [place.assignment for place in record.placements.values() if place.assignment is not None]
        revisions = [each.revision for each in found] if saved.revision != saved.base else []
        if not is_decided(saved.decided, saved.revision, revisions):
            record.changes.lead(saved.update_id, self._drop(saved))
            return
        if record.revision != saved.revision or not saved.decided:
            record.adopt(saved, None, [])
        stores = [each.next_store for each in found if each.update_id == saved.update_id and each.next_store]
        stores += [each.store for each in found if each.revision == saved.revision]
        for store in stores[:1]:
            record.proven(record.request.client_id, store)
        life = UpdateLife(UpdatePhase.EXCHANGING, (RankStep.STAGED,) * len(record.placements))
        self._resumed = True
        record.changes.begin(record.changes.update or saved, life, self._heard)
        self._incarnations = _incarnations(record)
        record.changes.lead(saved.update_id, self._finish(saved))

    async def _finish(self, saved: SavedUpdate) -> UpdateReport:
        record, begun_s = self._record, time.monotonic()
        await record.changes.say("the coordinator was restarted, and goes on with the exchange of an update")
        await save(record)
        await self._exchange()
        seconds = time.monotonic() - begun_s
        about = record.model_id, saved.update_id, record.request.uri, saved.base, saved.revision, 0, 0, 0, 0
        more = {"exchange_s": seconds, "total_s": seconds, "ranks": self._steps(), "resumed": True}
        more |= {"streaming": saved.streaming, "signed_by": saved.signed_by}
        return UpdateReport(*about, **more)  # type: ignore[arg-type]

    async def _drop(self, saved: SavedUpdate) -> UpdateReport:
        raise await self._failed(saved, UpdateFailed("the coordinator was restarted before all ranks had staged"))

    # -- before the decision -------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        record = self._record
        if record.ending is not None or record.error is not None or not record.life.is_ready:
            raise UpdateRefused(
                "only a model that is ready can be updated",
                hint="longshore status shows its state",
                model=record.model_id,
                state=record.life.state.value,
            )

    def _check_same_workers(self) -> None:
        """Raise UpdateFailed when a rank has another worker than the one that staged, or none."""
        record = self._record
        if not record.life.is_ready or _incarnations(record) != self._incarnations:
            raise UpdateFailed("a rank was lost while the update was staged", model=record.model_id)

    def _is_same(self, placement: Placement) -> bool:
        """Return whether the rank has the worker that it had when the update began."""
        return self._incarnations.get(placement.rank) == (placement.node_id, placement.incarnation)

    def _decide(self) -> None:
        life = self._record.changes.life
        if life is not None:
            self._record.changes.move(life.decide())

    async def _old_tables(self) -> bytes:
        """Return the tables of what the ranks hold. Agents have them where a restarted coordinator has not."""
        record = self._record
        if record.plan is not None:
            return record.plan.shared
        node_id = next(iter(record.nodes))
        tables: bytes = await self._parts.agents.ask(node_id, lambda agent: agent.tables.remote(record.model_id))
        return tables

    async def _room(self, update: PackedUpdate, streaming: bool) -> dict[int, int]:
        """Return the host memory that each rank takes that has something to read. Raises DoesNotFit."""
        record = self._record
        order = sorted(record.nodes)
        before = claims_of(self._parts.models.values(), record)
        facts = await nodes.facts_of(order, self._parts.agents.ask)
        reads = [rank for rank, each in enumerate(update.ranks) if each.read_bytes]
        ranks = {rank: update.ranks[rank] for rank in reads}
        misfit = check_update_fit(
            ranks,
            {rank: order.index(record.placements[rank].node_id) for rank in reads},
            [facts[node_id] for node_id in order],
            self._parts.config,
            record.request.device,
            streaming=streaming,
            claims=larger_claims(before, claims_of(self._parts.models.values(), record)),
        )
        if misfit is not None:
            raise misfit
        if streaming:
            on_cpu = record.request.device == "cpu"
            return {rank: each.staging_bytes if on_cpu else 0 for rank, each in ranks.items()}
        return {rank: each.device_bytes + each.staging_bytes for rank, each in ranks.items()}

    async def _begin(self, update: PackedUpdate, host_bytes: dict[int, int]) -> None:
        """Let the agents begin the load of what changed. Raises ArenaBusy when others keep the slots for too long."""
        record = self._record
        if record.changes.update is None or not host_bytes:
            return
        members = await in_message(members_of(record, together=True).pack())
        self._tables = members, await in_message(update.shared, apart=not isinstance(members, bytes))
        jobs = update_jobs(record, record.changes.update, host_bytes, self._parts.config)
        await record.changes.say(
            f"an update is read: {update.changed_tensors} of {update.tensors} tensors, {update.changed_bytes} bytes"
        )
        await alongside(*(self._begin_job(node_id, job) for node_id, job in jobs))

    async def _begin_job(self, node_id: str, job: NodeJob) -> None:
        begun_s = time.monotonic()
        while not await self._parts.agents.ask(node_id, lambda agent: agent.begin.remote(job, *self._tables)):
            waited_s = time.monotonic() - begun_s
            if waited_s > self._parts.config.slots_wait_s:
                holders = await self._parts.agents.ask(node_id, lambda agent: agent.slot_holders.remote())
                raise slots_taken(job, self._record.nodes.get(node_id, ""), waited_s, holders)
            await asyncio.sleep(SLOTS_AGAIN_S)
        self._jobs.append((node_id, job))

    def _heard(self, beat: AgentBeat) -> None:
        """Take a heartbeat: a rank may be stuck, or an agent restarted, which begins again then."""
        update = self._record.changes.update
        if update is None:
            return
        known = {(load.load_id, load.attempt) for load in beat.loads}
        for rank in beat.ranks:
            if rank.load_id == update.load_id:
                self._record.changes.has_read(rank.rank, rank.placed_bytes)
                if not rank.done and rank.silent_s > self._parts.config.stuck_after_s:
                    self._note_silent(rank)
        if self._resumed and update.streaming and update.load_id not in {load_id for load_id, _ in known}:
            self._forgot.add(beat.node_id)
        missing = [job for node_id, job in self._jobs if node_id == beat.node_id and job.part not in known]
        if missing and (beat.node_id not in self._again or self._again[beat.node_id].done()):
            again = alongside(*(self._begin_job_again(beat.node_id, job) for job in missing))
            self._again[beat.node_id] = asyncio.get_running_loop().create_task(again)

    def _note_silent(self, rank: RankBeat) -> None:
        """End an update whose rank says nothing to its agent. If it streams, it was decided: end the worker only."""
        if not self._is_streaming:
            self._fail(UpdateFailed("a rank does not answer", rank=rank.rank, silent_s=round(rank.silent_s, 1)))
        elif rank.pid:  # else it waits for calls that run, and is asked itself whether it lives
            placement = self._record.placements.get(rank.rank)
            if placement is not None and placement.worker is not None and placement.incarnation == rank.incarnation:
                spawn.end_actor(placement.worker)

    async def _begin_job_again(self, node_id: str, job: NodeJob) -> None:
        try:
            await self._parts.agents.ask(node_id, lambda agent: agent.begin.remote(job, *self._tables))
        except LongshoreError as error:
            self._fail(error)

    def _fail(self, error: LongshoreError) -> None:
        self._alarm = error
        self._alarmed.set()

    async def _read(self, update: PackedUpdate, base: str) -> None:
        """Return when every rank has staged, or streamed, what changed. Raises the first error of any."""
        record = self._record
        steps = [self._read_rank(placement, update, base) for _, placement in sorted(record.placements.items())]
        reading = asyncio.ensure_future(_all_of(steps) if self._is_streaming else alongside(*steps))
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait([reading, watch], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                watch.result()
            reading.result()
        finally:
            await finished(stopped([reading, watch]))
        await self._take_reports()
        await self._end_reading()

    @property
    def _is_streaming(self) -> bool:
        return self._record.changes.update is not None and self._record.changes.update.streaming

    async def _watch(self) -> None:
        await self._alarmed.wait()
        raise self._alarm or UpdateFailed("the update cannot go on")

    async def _read_rank(self, placement: Placement, update: PackedUpdate, base: str) -> None:
        record, worker = self._record, placement.worker
        if record.changes.update is None or record.changes.life is None:
            return
        if not self._is_same(placement):
            if not self._is_streaming:
                self._check_same_workers()
            return  # its replacement loads the new revision
        update_id = record.changes.update.update_id
        job = update_job(record, placement, record.changes.update, base, self._parts.config)
        shared = self._tables[1] if update.ranks[placement.rank].read_bytes else b""
        try:
            asked = worker.stage_update.options(concurrency_group="control").remote(job, shared)
            await asyncio.wait_for(asked, self._parts.config.stuck_after_s)
            ended = worker.update_outcome.options(concurrency_group="wait").remote(record.model_id, update_id)
            await answer_of(worker, placement.host, ended, self._parts.config.stuck_after_s)
        except TimeoutError as error:
            if self._is_streaming:
                await asyncio.to_thread(spawn.end_actor, worker)
                return  # its replacement loads the new revision
            raise UpdateFailed(
                f"rank {placement.rank} does not answer", rank=placement.rank, host=placement.host
            ) from error
        except ACTOR_GONE as error:
            if self._is_streaming:
                return  # its replacement loads the new revision
            raise UpdateFailed(
                f"rank {placement.rank} died while it staged the update", rank=placement.rank, host=placement.host
            ) from error
        if not self._is_streaming:
            record.changes.move(record.changes.life.staged(placement.rank))
            steps = record.changes.life.ranks
            count = sum(step is RankStep.STAGED for step in steps)
            await record.changes.say(f"an update is staged on {count} of {len(steps)} ranks")

    async def _take_reports(self) -> None:
        """Add up where the agents had the bytes from. One that does not answer adds nothing."""
        load_ids = {node_id: job.load_id for node_id, job in self._jobs}

        async def report(node_id: str, load_id: str) -> NodeReport:
            answer: NodeReport = await self._parts.agents.ask(node_id, lambda agent: agent.report.remote(load_id))
            return answer

        asked = (report(node_id, load_id) for node_id, load_id in load_ids.items())
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if not isinstance(answer, BaseException):
                for source, size_bytes in answer.bytes_by_source.items():
                    self._sources[source] = self._sources.get(source, 0) + size_bytes

    async def _end_reading(self) -> None:
        """End the load of what changed at the agents."""
        self._record.changes.reads_no_more()
        await finished(stopped(self._again.values()))
        load_ids = {node_id: job.load_id for node_id, job in self._jobs}
        await self._end_at(load_ids)

    async def _end_at(self, load_ids: Mapping[str, str]) -> None:
        async def end(node_id: str, load_id: str) -> None:
            await asyncio.wait_for(
                self._parts.agents.ask(node_id, lambda agent: agent.end.remote(load_id)),
                self._parts.config.stuck_after_s,
            )

        await settled(end(node_id, load_id) for node_id, load_id in load_ids.items())

    async def _failed(self, saved: SavedUpdate, error: LongshoreError) -> LongshoreError:
        """Drop what was staged, and return the update's error. A streamed model is broken from now on."""
        record = self._record
        if record.changes.life is not None:
            record.changes.move(record.changes.life.failed())
        decided = record.changes.update is not None and record.changes.update.decided
        record.changes.reads_no_more()
        await settled([self._drop_on_ranks(saved.update_id)])
        await finished(stopped(self._again.values()))
        await self._end_at(dict.fromkeys(record.nodes, saved.load_id))
        record.changes.forget()
        if decided:
            record.break_contents(error)
            await save(record)
            return ModelBroken(
                f"a streaming update failed, and ranks have contents of two revisions: {error}",
                hint="update the model again, or release it",
                model=record.model_id,
            )
        await save(record)
        about = {"model": record.model_id, "cause": type(error).__name__}
        if "rank" in error.details:
            about["rank"] = error.details["rank"]
        if record.broken:
            return UpdateFailed(
                f"the update ended before its exchange; ranks have contents of two revisions, as before: {error}",
                hint="update the model again, or release it",
                **about,
            )
        return UpdateFailed(
            f"the update ended before its exchange; every rank has revision {saved.base[:12]}: {error}",
            revision=saved.base,
            **about,
        )

    async def _drop_on_ranks(self, update_id: str) -> None:
        model_id = self._record.model_id

        async def drop(worker: Any) -> None:
            asked = worker.drop_update.options(concurrency_group="control").remote(model_id, update_id)
            await asyncio.wait_for(asked, DROP_S)

        workers = [place.worker for place in self._record.placements.values() if place.worker is not None]
        await settled(drop(worker) for worker in workers)

    # -- after the decision --------------------------------------------------------------------------------------------

    async def _exchange(self) -> None:
        """Return when every rank has the new revision, by its exchange or by a load of its replacement."""
        record = self._record
        if record.changes.update is None or record.changes.life is None:
            return
        if not self._is_streaming:
            await record.changes.say("every rank has staged the update; contents are exchanged")
        agents = asyncio.ensure_future(settled(self._begin_on(node_id) for node_id in record.nodes))
        try:
            saved = record.changes.update
            await alongside(*(self._exchange_rank(placement, saved) for placement in record.placements.values()))
            await agents
            async with record.changed:
                await record.changed.wait_for(lambda: record.life.is_ready or record.life.is_over)
        finally:
            await finished(stopped([agents]))
        if record.error is not None:
            raise record.error
        record.changes.forget()
        await save(record)

    async def _exchange_rank(self, placement: Placement, saved: SavedUpdate) -> None:
        """Let one rank exchange. One that cannot, or does not answer, is ended: its replacement has the new revision.

        It may wait for its calls for as long as they run.
        """
        record, rank, worker = self._record, placement.rank, placement.worker
        same = self._is_same(placement)
        exchanged = False
        if same and worker is not None:
            try:
                asked = worker.exchange_update.options(concurrency_group="wait").remote(
                    record.model_id, saved.update_id, saved.revision
                )
                await answer_of(
                    worker,
                    placement.host,
                    asked,
                    self._parts.config.stuck_after_s,
                    lambda: self._check_reads(placement),
                )
                exchanged = True
            except ACTOR_GONE:
                pass
            except Exception:
                await asyncio.to_thread(spawn.end_actor, worker)
        life = record.changes.life
        if life is not None:
            record.changes.move(life.exchanged(rank) if exchanged else life.lost(rank))
        if same and not exchanged:  # else it was replaced before
            await self._wait_replaced(placement, worker)

    def _check_reads(self, placement: Placement) -> None:
        """Raise UpdateFailed for a rank that streams by an agent which was restarted and cannot go on with it."""
        if placement.node_id in self._forgot:
            raise UpdateFailed("the rank's agent was restarted", rank=placement.rank, host=placement.host)

    async def _wait_replaced(self, placement: Placement, worker: Any) -> None:
        """Return when the rank has another worker or place, or the model is over: it is not ready with the dead one."""
        record = self._record

        def is_replaced() -> bool:
            # The rank may be moved to another node before whoever tends it has noticed the death.
            return placement.worker is not worker or not record.has(placement)

        async with record.changed:
            await record.changed.wait_for(lambda: is_replaced() or record.life.is_over)

    def _steps(self) -> tuple[str, ...]:
        life = self._record.changes.life
        return () if life is None else tuple(step.value for step in life.ranks)


def _incarnations(record: ModelRecord) -> dict[int, tuple[str, int]]:
    return {rank: (placement.node_id, placement.incarnation) for rank, placement in record.placements.items()}


async def _all_of(steps: Collection[Coroutine[Any, Any, None]]) -> None:
    """Wait for all, and raise the first error: ranks that stream go on when one fails."""
    results = await asyncio.gather(*steps, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
