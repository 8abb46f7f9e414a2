"""Updates in place whose ranks wait, stop, fail, or are found by a coordinator that was restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.coordination import spawn, update_run
from actors.coordination.model_changes import SavedUpdate
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.update_run import UpdateRun
from cluster.config import Config
from cluster.errors import LongshoreError, ModelBroken, UpdateFailed
from cluster.layouts.mesh import Layout
from cluster.messages import AgentBeat, ArenaUse, RankBeat
from cluster.planning.packed_plan import PackedPlan, RankFacts
from cluster.planning.update_plan import PackedUpdate
from cluster.request import LoadRequest, StoreAccess, UpdateRequest
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life, LoadState, RankLife
from cluster.telemetry.update_report import UpdateReport
from storage.store_ref import StoreRef

STUCK_AFTER_S = 0.05
GIVE_UP_S = 5.0
REQUEST = LoadRequest(
    "s3://b/m", StoreAccess(StoreRef("file", "", "/m")), None, Layout(2), "cpu", None, False, "me", 0.0
)
FACTS = (RankFacts(90, 90, 90),) * 2


class Call:
    """A call of a worker, as Ray's handles have them."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self._answer = answer

    def options(self, **_: Any) -> Call:
        return self

    def remote(self, *_: Any) -> Awaitable[Any]:
        return self._answer()


class Worker:
    """A worker whose answers about updates come when `answer` is set."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stopped = False  # SIGSTOP
        self.stage_update = self.drop_update = Call(self._at_once)
        self.update_outcome = self.exchange_update = Call(lambda: asyncio.shield(self.answer))
        self.hello = Call(self._lives)

    async def _at_once(self) -> None:
        pass

    async def _lives(self) -> Any:
        await asyncio.sleep(GIVE_UP_S if self.stopped else 0)
        return spawn.UNVERSIONED

    def done(self) -> None:
        self.answer.set_result(None)


class Model:
    """A ready model of two ranks, and its update. A worker that is ended has a successor at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, broken: str = "") -> None:
        life = Life(LoadState.READY, 1, (RankLife(ready=True),) * 2)
        self.record = ModelRecord("m", REQUEST, life, Holders(), revision="r1", broken=broken)
        self.record.use_plan(PackedPlan("r1", "blake3", 180, FACTS, b""))
        self.record.place(Placement(rank, "n", "h", None) for rank in range(2))
        self.workers = [Worker(), Worker()]
        for rank, worker in enumerate(self.workers):
            self.record.placements[rank].worker = worker
        update = PackedUpdate(PackedPlan("r2", "blake3", 180, FACTS, b""), b"tables", FACTS, 1, 1, 90)

        async def planned(*_: Any, **__: Any) -> PackedUpdate:
            return update

        async def nothing(*_: Any) -> None:
            pass

        async def answered(*_: Any) -> Any:
            return SimpleNamespace(bytes_by_source={})

        async def facts(*_: Any) -> dict[str, None]:
            return {"n": None}

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(spawn, "end_actor", lambda worker: loop.call_soon_threadsafe(self._replace, worker))
        monkeypatch.setattr(spawn, "check_version", lambda *_: None)
        monkeypatch.setattr(update_run, "save", nothing)
        monkeypatch.setattr(update_run.nodes, "facts_of", facts)
        monkeypatch.setattr(update_run, "check_update_fit", lambda *_, **__: None)
        planner, agents = SimpleNamespace(update=planned), SimpleNamespace(ask=answered)
        parts = SimpleNamespace(
            record=self.record, planner=planner, agents=agents, models={}, config=Config(stuck_after_s=STUCK_AFTER_S)
        )
        self.update = UpdateRun(parts, nothing)  # type: ignore[arg-type]

    def _replace(self, worker: Any) -> None:
        rank = self.workers.index(worker)
        placement = self.record.placements[rank]
        placement.vacate()
        placement.worker = Worker()
        if not worker.answer.done():
            worker.answer.set_exception(RayActorError())
        self._woken = asyncio.get_running_loop().create_task(self.record.touch())

    def begin(self, *, streaming: bool) -> None:
        asked = UpdateRequest("u", "me", streaming=streaming)
        self.record.changes.lead("u", self.update.run(asked))

    async def resume(self, *, streaming: bool) -> None:
        """Go on with an update that was decided, as a coordinator does that was restarted."""
        saved = SavedUpdate("u", REQUEST, "r1", "r2", "", streaming, decided=True)
        self.record.adopt(saved, None, [])
        await self.update.resume()

    async def heard(self, *ranks: RankBeat) -> None:
        """Take a heartbeat of the agent once ranks have their jobs. The agent has no load of the update."""
        async with self.record.changed:
            await self.record.changed.wait_for(lambda: self.record.changes.heard is not None)
        await asyncio.sleep(STUCK_AFTER_S / 2)
        if self.record.changes.heard is not None:
            self.record.changes.heard(AgentBeat("n", "h", "agent", (), ranks, ArenaUse(0, 0, 0, 0)))

    async def report(self) -> UpdateReport:
        _, report, error = await self.record.changes.outcome_of("u", GIVE_UP_S)
        if error is not None:
            raise error
        if not isinstance(report, UpdateReport):
            raise TimeoutError("the update does not end")
        return report


def silent(rank: int, *, pid: int) -> RankBeat:
    return RankBeat("update-u", 1, rank, 0, pid, 0, silent_s=100.0)


def test_a_stopped_rank_is_replaced_after_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model = Model(monkeypatch)
        await model.resume(streaming=False)
        model.workers[0].done()
        model.workers[1].stopped = True
        assert (await model.report()).ranks == ("exchanged", "replaced")

    asyncio.run(run())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_rank_that_waits_for_a_call_is_not_replaced(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    async def run() -> None:
        model = Model(monkeypatch)
        model.begin(streaming=streaming)
        if streaming:
            await model.heard(silent(0, pid=0))  # it has not said hello to its agent
        await asyncio.sleep(5 * STUCK_AFTER_S)
        for worker in model.workers:
            worker.done()
        assert (await model.report()).ranks == ("exchanged", "exchanged")

    asyncio.run(run())


@pytest.mark.parametrize("noticed", [True, False])
def test_a_rank_that_is_moved_in_the_exchange_is_replaced(monkeypatch: pytest.MonkeyPatch, noticed: bool) -> None:
    """Its node is lost. `noticed`: whoever tends the rank learns that before it is placed anew."""

    async def run() -> None:
        model = Model(monkeypatch)
        await model.resume(streaming=False)
        model.workers[0].done()
        await asyncio.sleep(STUCK_AFTER_S)  # until both are asked
        if noticed:
            model.record.placements[1].vacate()
        model.record.place([Placement(1, "n2", "h2", None, 2, incarnation=1, worker=Worker())])
        model.workers[1].answer.set_exception(RayActorError())
        await asyncio.sleep(STUCK_AFTER_S)
        await model.record.touch()
        assert (await model.report()).ranks == ("exchanged", "replaced")

    asyncio.run(run())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_rank_that_is_lost_before_it_is_asked_to_read(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """Nobody has its next worker yet. In a stream the decision was before that, so it loads the new revision."""

    async def run() -> None:
        model = Model(monkeypatch)

        async def lost(*_: Any) -> None:
            if model.record.revision == ("r2" if streaming else "r1") and model.record.changes.is_running:
                model.record.placements[1].vacate()

        monkeypatch.setattr(update_run, "save", lost)
        model.begin(streaming=streaming)
        model.workers[0].done()
        if streaming:
            assert (await model.report()).ranks == ("exchanged", "replaced")
        else:
            with pytest.raises(UpdateFailed, match="a rank was lost while the update was staged"):
                await model.report()

    asyncio.run(run())


def test_a_rank_that_is_silent_in_a_stream_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model = Model(monkeypatch)
        model.begin(streaming=True)
        model.workers[0].done()
        await model.heard(silent(1, pid=7))
        assert (await model.report()).ranks == ("exchanged", "replaced")

    asyncio.run(run())


def test_a_rank_that_is_stopped_before_it_streams_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model = Model(monkeypatch)
        model.begin(streaming=True)
        model.workers[0].done()
        model.workers[1].stopped = True
        assert (await model.report()).ranks == ("exchanged", "replaced")

    asyncio.run(run())


@pytest.mark.parametrize("rank_0_has_all", [True, False])
def test_a_resumed_stream_whose_agent_was_restarted(monkeypatch: pytest.MonkeyPatch, rank_0_has_all: bool) -> None:
    """Nobody has the tables of what changed any more: ranks that still read are replaced."""

    async def run() -> None:
        model = Model(monkeypatch)
        await model.resume(streaming=True)
        if rank_0_has_all:
            model.workers[0].done()
        await model.heard()
        report = await model.report()
        assert (report.resumed, report.ranks) == (True, ("exchanged" if rank_0_has_all else "replaced", "replaced"))

    asyncio.run(run())


def test_a_resumed_stream_replaces_a_silent_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model = Model(monkeypatch)
        await model.resume(streaming=True)
        model.workers[0].done()
        await model.heard(silent(1, pid=7))
        assert (await model.report()).ranks == ("exchanged", "replaced")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("broken", "message"), [("", "every rank has revision r1"), ("before", "contents of two revisions, as before")]
)
def test_a_failed_update_says_what_ranks_have(monkeypatch: pytest.MonkeyPatch, broken: str, message: str) -> None:
    async def run() -> None:
        model = Model(monkeypatch, broken=broken)
        model.begin(streaming=False)
        model.workers[0].answer.set_exception(LongshoreError("a chunk is damaged"))
        with pytest.raises(UpdateFailed, match=message):
            await model.report()
        assert model.record.broken == broken

    asyncio.run(run())


def test_memory_is_promised_while_an_update_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model = Model(monkeypatch)
        model.begin(streaming=False)
        await model.heard()
        assert model.record.changes.bytes_to_stage([0, 1]) == 180
        for worker in model.workers:
            worker.done()
        await model.report()
        assert model.record.changes.bytes_to_stage([0, 1]) == 0

    asyncio.run(run())


def test_a_stream_that_cannot_read_breaks_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model = Model(monkeypatch)
        model.begin(streaming=True)
        model.workers[0].done()
        model.workers[1].answer.set_exception(LongshoreError("a chunk is damaged"))
        with pytest.raises(ModelBroken, match="a chunk is damaged"):
            await model.report()

    asyncio.run(run())
