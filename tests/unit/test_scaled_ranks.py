"""Ranks that join, or were removed, while something else happens to their model."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors.coordination import jobs, nodes, spawn
from actors.coordination.jobs import SavedLoad
from actors.coordination.load_run import LoadRun
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.run_parts import RunParts
from actors.coordination.scale_run import ScaleRun, check_scalable
from actors.coordination.worker_groups import WorkerGroups
from cluster.config import Config
from cluster.errors import ConfigError, LoadCancelled, ModelNotFound, NodeLost, RankLost, RankRemoved, ScaleRefused
from cluster.fit.options import DeviceMapOptions
from cluster.layouts.mesh import Layout
from cluster.model import LoadedModel, RankCalls
from cluster.request import LoadRequest, StoreAccess
from cluster.scheduling import load_state
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life, LoadState, RankLife
from storage.store_ref import StoreRef

REQUEST = LoadRequest(
    "s3://b/m", StoreAccess(StoreRef("file", "", "/m")), None, Layout(), "cpu", None, False, "me", 0.0
)


@dataclass(frozen=True)
class Told:
    """What a handle reads of its load's report."""

    layout: Layout


class Groups:
    """Note whether workers were to be kept."""

    kept: bool | None = None

    async def part(self, record: ModelRecord, *, keep: bool) -> None:
        self.kept = keep


def run_with(step: Callable[[LoadRun, ModelRecord, Placement], Coroutine[Any, Any, Any]], groups: Any = None) -> Any:
    """Run `step(load run, record, placement of a rank that joins)`."""

    async def run() -> Any:
        life = Life(LoadState.READY, 1, (RankLife(ready=True),))
        record = ModelRecord("m", REQUEST, life, Holders())
        joins = Placement(1, "n", "h", None, attempt=2)
        record.place([Placement(0, "n", "h", None), joins])
        await record.advance(load_state.Grown((0,), attempt=2))
        parts = RunParts.of(record, cast("Any", None), Config(), {}, asyncio.Lock(), groups, None)
        return await step(LoadRun(parts), record, joins)

    return asyncio.run(run())


async def removed(record: ModelRecord) -> None:
    await record.advance(load_state.Scaled(1, attempt=2))


def test_a_worker_that_comes_when_its_rank_is_about_to_be_removed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes it found no worker there."""
    ended: list[Any] = []
    monkeypatch.setattr(spawn, "start_worker", lambda *_, **__: "its worker")
    monkeypatch.setattr(spawn, "end_actor", ended.append)

    async def step(run: LoadRun, record: ModelRecord, joins: Placement) -> None:
        await run._start_worker(joins)
        assert ended == []
        await removed(record)
        await run._start_worker(joins)

    run_with(step)
    assert ended == ["its worker"]


@pytest.mark.parametrize("error", [NodeLost("it is lost"), TimeoutError("an agent"), ValueError("a name is taken")])
def test_no_error_of_a_rank_that_joins_ends_the_model(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> None:
        raise error

    async def step(run: LoadRun, record: ModelRecord, joins: Placement) -> str:
        monkeypatch.setattr(run, "_tend", fails)
        with pytest.raises(type(error)):
            await run._tend_member(record.placements[0])
        await run._tend_member(joins)
        return str(record.join_error)

    assert str(error) in run_with(step)


@pytest.mark.parametrize(
    ("changed", "broken", "message"),
    [
        ({"device_map": DeviceMapOptions("auto")}, "", "the model has a device map"),
        ({}, "a chunk is damaged", "contents of two revisions"),
    ],
)
def test_a_model_that_cannot_be_scaled_says_why(changed: dict[str, Any], broken: str, message: str) -> None:
    life = Life(LoadState.READY, 1, (RankLife(ready=True),))
    with pytest.raises(ScaleRefused, match=message):
        check_scalable(ModelRecord("m", replace(REQUEST, **changed), life, Holders(), broken=broken))


def test_workers_are_not_kept_while_others_join() -> None:
    """These have reads under way."""

    async def step(run: LoadRun, record: ModelRecord, joins: Placement) -> bool | None:
        await run.end(LoadCancelled("released"))
        return groups.kept

    groups = Groups()
    assert run_with(step, groups) is False


def test_a_lost_node_is_replaced_while_removed_ranks_still_run_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that join are removed first."""
    monkeypatch.setattr(nodes, "living_nodes", lambda: {"n": "h"})

    async def moved() -> set[int]:
        return {0}

    async def step(run: LoadRun, record: ModelRecord, joins: Placement) -> set[int]:
        monkeypatch.setattr(run._relocating, "run", moved)
        moving = asyncio.create_task(run._move())
        await asyncio.sleep(0.05)
        assert not moving.done()
        assert record.join_error is not None
        moving.cancel()
        await removed(record)
        return await asyncio.wait_for(run._move(), 2)

    assert run_with(step) == {0}


@dataclass(frozen=True)
class Group:
    """A placement group as Ray's handle says it."""

    name: str
    bundle_specs: tuple[dict[str, float], ...] = ({"GPU": 1.0},)


def test_gpus_of_a_removed_replica_are_given_back_once_its_workers_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the coordinator was restarted between the two."""
    done: list[Any] = []
    monkeypatch.setattr(spawn, "end_actor", done.append)
    monkeypatch.setattr(spawn, "remove_group", done.append)
    monkeypatch.setattr(spawn, "find_agent", lambda _: None)
    first, second = Group("first"), Group("second")

    async def step(run: LoadRun, record: ModelRecord, joins: Placement) -> None:
        for placement, group in zip(record.placements.values(), (first, second), strict=True):
            placement.bundle, placement.worker = (group, 0), SimpleNamespace(name=f"worker of {group.name}")
            record.add_group(group)
        await removed(record)
        monkeypatch.setattr(run._parts.agents, "ask", answered)
        worker = joins.worker
        await run._scaling().remove_beyond()
        assert done == [worker, second]
        assert record.groups == (first,)
        record.add_group(second)  # as in what an earlier coordinator saved
        await run._scaling().remove_beyond()
        assert done == [worker, second, second]
        assert record.drop_groups() == (first,)

    run_with(step, WorkerGroups(0.0))


async def answered(*_: Any) -> None:
    """Answer as an agent that does what it is told."""


def test_an_agent_restarted_before_its_report_is_begun_again_once() -> None:
    """Its ranks have all that they need, and what it counted is lost."""
    calls: list[str] = []

    async def begin_on(node_id: str) -> None:
        calls.append(f"begin on {node_id}")

    async def ask(node_id: str, _: Any) -> Any:
        calls.append("report")
        if len(calls) < lost_reports * 2:
            raise ModelNotFound("the agent does not know the load")
        return SimpleNamespace(bytes_by_source={"peer": 7})

    async def step(run: LoadRun, record: ModelRecord, joins: Placement) -> dict[str, int]:
        parts = replace(run._parts, agents=cast("Any", SimpleNamespace(ask=ask)))
        return await ScaleRun(parts, begin_on)._sources([joins])

    lost_reports = 1
    assert run_with(step) == {"peer": 7}
    assert calls == ["report", "begin on n", "report"]
    calls.clear()
    lost_reports = 3
    with pytest.raises(ModelNotFound):
        run_with(step)


def test_a_restarted_coordinator_gives_no_worker_the_name_of_a_removed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may give a name back late, and a message to the old worker would reach the new one."""
    found = {0: (0, "serves"), 1: (4, "was removed"), 2: (1, "had not joined")}
    monkeypatch.setattr(spawn, "find_workers", lambda _: found)
    monkeypatch.setattr(spawn, "end_actor", lambda _: None)

    async def step(run: LoadRun, record: ModelRecord, joins: Placement) -> dict[int, int]:
        record.skip_incarnations(3, 5)
        record.remove([joins])
        again = SavedLoad.unpack(SavedLoad.of(record).pack()).restore("m", 0.0)
        assert again.next_incarnations == {1: 1, 3: 5}
        with monkeypatch.context() as alone:
            alone.setattr(jobs, "_ask", answered)
            await jobs.find_workers_again(again, {})
        return again.next_incarnations

    assert run_with(step) == {1: 5, 2: 2, 3: 5}


@pytest.mark.parametrize("died", [True, False], ids=["dead", "without its model"])
def test_a_copy_of_a_removed_rank_says_that_it_was_removed(died: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica went between two batches; the coordinator knows the ranks that are left."""
    import ray

    def get(_: Any) -> Any:
        if died:
            raise RayActorError
        raise RayTaskError("tensor_batch", "", ModelNotFound("this rank holds no loaded model"), ip="127.0.0.1")

    workers: list[str] = ["first"]
    connection: Any = SimpleNamespace(
        call=lambda *_, **__: workers, head=SimpleNamespace(check=lambda: None), model_id="m"
    )
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references, []))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(RankRemoved, match="rank 1 went with its replica: the model has ranks 0 to 0 now") as caught:
        RankCalls(connection, "m", None).answers([(1, "reference")])
    assert (caught.value.details["rank"], caught.value.details["model"]) == (1, "m")
    assert type(pickle.loads(pickle.dumps(caught.value))) is RankRemoved
    workers.append("second")  # it was replaced, or added again
    with pytest.raises(RankLost if died else ModelNotFound) as other:
        RankCalls(connection, "m", None).answers([(1, "reference")])
    assert not isinstance(other.value, RankRemoved)


def test_ranks_that_another_process_added_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when they come from an iterator, which can be read once."""
    connection: Any = SimpleNamespace(call=lambda *_, **__: ["first", "second"])
    report: Any = Told(Layout())
    model = LoadedModel(connection, "m", report)
    sent: list[str] = []

    def method(worker: str, *_: Any) -> Any:
        return SimpleNamespace(remote=lambda *_: sent.append(worker))

    monkeypatch.setattr(model, "_method", method)
    monkeypatch.setattr(RankCalls, "answers", lambda self, asked, *_: [rank for rank, _ in asked])
    assert model.call(len, ranks=iter([1])) == [1]  # type: ignore[arg-type]
    assert sent == ["second"]
    with pytest.raises(ConfigError, match="there is no rank 2: the model has ranks 0 to 1"):
        model.call(len, ranks=[2])
    with pytest.raises(ConfigError, match="there is no rank -1"):
        model.iter_tensors(-1)
