"""Ranks that join, or were removed, while something else happens to their model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.coordination import nodes, spawn
from actors.coordination.load_run import LoadRun
from actors.coordination.model_record import ModelRecord, Placement
from actors.coordination.run_parts import RunParts
from cluster.config import Config
from cluster.errors import ConfigError, LoadCancelled, NodeLost
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
