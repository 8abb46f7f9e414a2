"""The record of a model: its answer to a later request, and its one owner."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from actors.coordination.model_changes import ModelChanges, SavedUpdate
from actors.coordination.model_record import ModelRecord, Placement
from cluster.errors import DoesNotFit, LayoutError, UnknownFamily, UpdateFailed
from cluster.options import LoadOptions
from cluster.request import LoadRequest, make_request
from cluster.scheduling import load_state
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life, advance
from cluster.scheduling.update_state import UpdateLife
from cluster.telemetry.counters import ClusterMetrics
from cluster.telemetry.report import UpdateProgress
from cluster.telemetry.update_report import UpdateReport
from storage.errors import LongshoreError

ROOT = Path(__file__).parents[2]
RULES = {"*": "replicate"}


def asked(rules: dict[str, str] | None = None, uri: str = "/models/a", tensor_parallel_size: int = 2) -> LoadRequest:
    return make_request(LoadOptions(uri, tensor_parallel_size=tensor_parallel_size, layout_rules=rules, device="cpu"))


def refused(error: LongshoreError, holders: Holders | None = None) -> ModelRecord:
    record = ModelRecord("m-1", asked(), Life.new(2), holders or Holders())
    record.life = advance(record.life, load_state.Failed(str(error), attempt=record.life.attempt))
    record.error = error
    return record


def test_a_request_with_rules_replaces_a_refused_one() -> None:
    record = refused(UnknownFamily("no rules"))
    assert record.is_answered_by(asked(RULES))
    assert record.is_answered_by(replace(asked(RULES), keep=True, client_id="another"))
    assert not record.is_answered_by(asked())  # the same question
    assert not record.is_answered_by(asked(RULES, uri="/models/b"))
    assert not record.is_answered_by(asked(RULES, tensor_parallel_size=4))


@pytest.mark.parametrize("error", [LayoutError("cannot be cut"), DoesNotFit("too large")])
def test_other_refusals_stay(error: LongshoreError) -> None:
    assert not refused(error).is_answered_by(asked(RULES))


def test_a_refusal_stays_until_its_holders_received_it() -> None:
    record = refused(UnknownFamily("no rules"), Holders().hold("client", 0.0))
    assert not record.is_answered_by(asked(RULES))
    record.holders = record.holders.drop("client")
    assert record.is_answered_by(asked(RULES))


def test_memory_that_workers_have_is_not_taken_again() -> None:
    record = ModelRecord("m-1", asked(), Life.new(2), Holders())
    record.place(Placement(rank, "node", "host", None) for rank in range(2))
    record.host_bytes = {0: 100, 1: 50}
    assert record.bytes_to_take(record.on("node")) == 150
    record.placements[0].placed_bytes = 30  # there is no plan: it counts as it is
    assert record.bytes_to_take(record.on("node")) == 120
    record.kept_bytes = {"node": 60}  # by warm workers, which the first rank has filled in part
    assert record.bytes_to_take(record.on("node")) == 90
    record.kept_bytes = {"node": 1000}
    assert record.bytes_to_take(record.on("node")) == record.bytes_to_take([]) == 0


def test_a_running_load_is_not_a_refusal() -> None:
    record = ModelRecord("m-1", asked(), Life.new(2), Holders())
    assert not record.is_answered_by(asked(RULES))


def test_only_a_ready_model_of_the_same_request_is_at_hand() -> None:
    record = ModelRecord("m-1", asked(), Life.new(1), Holders(), revision="r1")
    identity = asked().identity()
    assert not record.is_at_hand(identity, "r1")
    for event in (load_state.Planned, load_state.Started):
        record.life = advance(record.life, event(attempt=1))
    record.life = advance(record.life, load_state.RankReady(0, 0, attempt=1))
    assert record.is_at_hand(identity, "r1")
    assert not record.is_at_hand(identity, "r2")
    assert not record.is_at_hand(asked(RULES).identity(), "r1")


def test_only_its_own_methods_assign_fields_of_a_record() -> None:
    """Its methods keep related fields together; an outside assignment could forget one."""
    fields = {field.name for kind in (ModelRecord, ModelChanges) for field in dataclasses.fields(kind)}
    assigned = []
    for path in (ROOT / "actors").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in itertools.chain(*(getattr(target, "elts", [target]) for target in targets)):
                if isinstance(target, ast.Subscript):  # record.pools[node] = ...
                    target = target.value
                if isinstance(target, ast.Attribute) and target.attr in fields:
                    owner = ast.unparse(target.value)
                    if owner.rpartition(".")[2].strip("_") in ("record", "model", "changes"):
                        assigned.append(f"{path.name}:{target.lineno}: {owner}.{target.attr}")
    assert not assigned


async def updated(outcome: UpdateReport | LongshoreError) -> ModelRecord:
    """Lead an update to its end; check its progress in each phase."""
    record = ModelRecord("m-1", asked(), Life.new(2), Holders())
    record.place(Placement(rank, "node", "host", None) for rank in range(2))
    metrics = ClusterMetrics()
    record.count_in(metrics, adopted=False)
    states: list[str] = []

    def counted() -> None:
        states.append(metrics.snapshot().loads[0].view.change)

    begins, ends = asyncio.Event(), asyncio.Event()

    async def work() -> UpdateReport:
        begins.set()
        await ends.wait()
        if isinstance(outcome, LongshoreError):
            raise outcome
        return outcome

    record.changes.lead("u-1", work())
    await begins.wait()
    assert record.status().updating == UpdateProgress("planning", 0, 2, 0, 0)
    counted()
    record.changes.reads(100)
    record.changes.begin(
        SavedUpdate("u-1", asked(), "old", "new", "", False), UpdateLife.new(2, streaming=False), lambda beat: None
    )
    record.changes.has_read(1, 40)
    record.changes.has_read(1, 30)  # late
    record.changes.move(UpdateLife.new(2, streaming=False).staged(1))
    assert record.status().updating == UpdateProgress("staging", 1, 2, 40, 100)
    counted()
    record.changes.move(UpdateLife.new(2, streaming=False).staged(0).staged(1).decide().exchanged(0))
    assert record.status().updating == UpdateProgress("exchanging", 1, 2, 40, 100)
    counted()
    ends.set()
    task = record.changes.task
    assert task is not None
    await task
    assert record.status().updating is None
    counted()
    assert states == ["planning", "staging", "exchanging", ""]
    return record


def test_the_end_of_an_update_is_an_event() -> None:
    report = UpdateReport("m-1", "u-1", "/models/b", "old", "new", 9, 1, 50, 950, {"store_direct": 50})
    event = asyncio.run(updated(report)).events.after(0)[-1]
    assert event.details == {"state": "done", "revision": "new", "changed_bytes": 50, "read_bytes": 50}
    event = asyncio.run(updated(UpdateFailed("a rank died", rank=1))).events.after(0)[-1]
    assert (event.rank, event.details) == (1, {"state": "failed", "error": "UpdateFailed"})
    assert event.message.startswith("the update failed: a rank died")
