"""A client sees the report's stats when its load is READY, not those of an older heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.coordination.model_record import ModelRecord, Placement
from cluster.client import wait_until_ready
from cluster.joining.patience import UNLIMITED
from cluster.layouts.mesh import Layout
from cluster.planning.packed_plan import PackedPlan, RankFacts
from cluster.request import LoadRequest, StoreAccess
from cluster.scheduling import load_state
from cluster.scheduling.holders import Holders
from cluster.telemetry.report import LoadProgress, RankReport, StageTimes
from storage.store_ref import StoreRef

REQUEST = LoadRequest(
    "s3://b/m", StoreAccess(StoreRef("file", "", "/m")), None, Layout(), "cpu", None, False, "me", 0.0
)


def record_in(*events: Any) -> ModelRecord:
    record = ModelRecord("m", REQUEST, load_state.Life.new(1), Holders())
    for event in events:
        record.life = load_state.advance(record.life, event)
    record.store_bytes = {"n": 25}
    return record


def loaded() -> tuple[Any, ...]:
    attempt = load_state.Life.new(1).attempt
    begun = (load_state.Planned, load_state.ResourcesGranted, load_state.Started)
    return (*(kind(attempt=attempt) for kind in begun), load_state.RankReady(0, 0, attempt=attempt))


def test_the_progress_of_a_ready_load_has_the_reports_stats() -> None:
    record = record_in(*loaded()[:-1])
    assert record.progress().store_bytes == 25
    record = record_in(*loaded())
    assert record.life.is_ready
    record.report = SimpleNamespace(store_bytes=40)  # type: ignore[assignment]
    assert record.progress().store_bytes == 40


def test_a_rank_that_is_ready_has_placed_all_that_it_reads() -> None:
    """More than it holds, when tensors are quantized: progress never falls, and ends at the total."""
    record = record_in(*loaded())
    record.placements = {0: Placement(0, "n", "h", None, placed_bytes=399)}
    facts = RankFacts(size_bytes=110, device_bytes=112, read_bytes=400)
    record.plan, record.total_bytes = PackedPlan("r", "blake3", 400, (facts,), b""), 400
    assert record.progress().placed_bytes == 399
    record.placements[0].report = RankReport(0, "n", "h", 1, "cpu", 0, 110, 112, StageTimes(), 1, 0.5, 1.0)
    assert record.progress().placed_bytes == 400
    record.plan = None  # the coordinator was restarted
    assert record.progress().placed_bytes == 110


def test_ready_is_shown_with_the_report_only() -> None:
    report, shown = object(), []

    def moment(state: str, store_bytes: int) -> LoadProgress:
        return LoadProgress("m", "s3://b/m", state, 40, 40, store_bytes, 1, 1, 1.0)

    answers = iter([(1, moment("loading", 25), None), (2, moment("ready", 25), None), (3, moment("ready", 40), report)])
    connection: Any = SimpleNamespace(call=lambda *_, **__: (*next(answers), None))
    assert wait_until_ready(connection, "m", shown.append, UNLIMITED) == (report, True)
    assert [(now.state, now.store_bytes) for now in shown] == [("loading", 25), ("ready", 40)]
