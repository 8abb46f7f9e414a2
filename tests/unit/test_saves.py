"""Saves as the coordinator sees them: reports, in any order and with some lost, become events, counters and gauges."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.saving import conversion, reporting
from actors.saving.convert import convert
from actors.saving.reporting import SaveReporter
from actors.saving.save import save
from cluster.errors import SaveError
from cluster.messages import unpack_message
from cluster.telemetry.counters import ClusterMetrics, CoordinatorFacts, samples
from cluster.telemetry.saves import KEPT_S, LOST_S, MOST_SAVES, SaveProgress

FIRST = SaveProgress("save-run-7-1", 1, "s3://models/run-7", "planning", 4, "trainer", elapsed_s=0.5)
HALF = replace(FIRST, number=2, state="writing", total_bytes=100, written_bytes=30, copied_bytes=20, elapsed_s=1.5)
WHOLE = replace(
    HALF, number=3, state="published", written_bytes=60, reused_bytes=20, peak_foreign_bytes=7, revision="ab" * 32
)


def shown(cluster: ClusterMetrics, now_s: float = 10.0) -> dict[tuple[str, ...], Any]:
    """Return the series of saves that are not 0; of a histogram the sum of seconds."""
    found = samples(cluster.snapshot(), now_s, CoordinatorFacts("head", "1", 1))
    return {
        (family.name.removeprefix("longshore_"), *sample.labels): value
        for family, series in found.items()
        for sample in series
        if "longshore_save" in family.name and (value := getattr(sample.value, "sum_s", sample.value))
    }


def reported(*reports: SaveProgress) -> ClusterMetrics:
    cluster = ClusterMetrics()
    for second, report in enumerate(reports):
        cluster.saves.received(report, float(second), 1000.0 + second)
    return cluster


def test_a_save_that_runs_is_shown_with_its_bytes() -> None:
    assert shown(reported(FIRST, HALF)) == {
        ("save_bytes_total", "run-7", "written"): 30,
        ("save_bytes_total", "run-7", "copied"): 20,
        ("saves", "run-7", "writing"): 1,
        ("save_size_bytes", "run-7"): 100,
        ("save_done_bytes", "run-7"): 50,
        ("save_idle_seconds", "run-7"): 9.0,
    }


def test_a_published_save_is_counted_once() -> None:
    cluster = reported(FIRST, HALF, WHOLE, WHOLE, HALF, replace(WHOLE, number=9, state="failed"))
    assert shown(cluster) == {
        ("save_bytes_total", "run-7", "written"): 60,
        ("save_bytes_total", "run-7", "copied"): 20,
        ("save_bytes_total", "run-7", "reused"): 20,
        ("saves_finished_total", "run-7", "published"): 1,
        ("save_duration_seconds", "run-7", "published"): 1.5,
        ("save_peak_foreign_bytes", "run-7"): 7,
    }
    save = cluster.saves.find("save-run-7-1")
    assert save is not None
    first, moved, last = save.log.after(0)
    assert first.message == "a save has begun: s3://models/run-7, 4 ranks"
    assert moved.message == "planning -> writing"
    assert last.message.startswith("published as revision abababababab: 100 B, of these 60 B written")
    assert (last.details["revision"], last.details["size_bytes"]) == ("ab" * 32, 100)


def test_a_failed_save_names_the_rank_and_the_cause() -> None:
    failed = replace(HALF, number=3, state="failed", error="SaveError", message="rank 2 ended it", failed_rank=2)
    cluster = reported(FIRST, HALF, failed)
    assert shown(cluster)["save_failures_total", "run-7", "SaveError"] == 1
    assert shown(cluster)["saves_finished_total", "run-7", "failed"] == 1
    save = cluster.saves.find("save-run-7-1")
    assert save is not None
    last = save.log.after(0)[-1]
    assert (last.rank, last.message, last.details["state"]) == (2, "the save failed: rank 2 ended it", "failed")


def test_another_rank_reports_the_death_of_rank_0() -> None:
    death = SaveProgress(
        FIRST.save_id, 1, FIRST.uri, "failed", 4, "b", error="SaveError", message="it died", failed_rank=0, reporter=3
    )
    assert not shown(reported(death)), "nobody knows a save that rank 0 did not report"
    cluster = reported(FIRST, HALF, death)
    (status,) = cluster.saves.status(5.0)
    assert (status.progress.state, status.progress.host, status.progress.done_bytes) == ("failed", "trainer", 50)
    assert status.progress.elapsed_s == 2.5, "until the death was reported"
    assert status.ended_age_s == 3.0


def test_a_silent_save_is_lost_and_then_forgotten() -> None:
    cluster = reported(FIRST, HALF)
    assert cluster.saves.look(LOST_S, 0.0) == ()
    ((progress, event),) = cluster.saves.look(1 + LOST_S + 1, 0.0)
    assert (progress.state, event.rank, event.details["state"]) == ("lost", 0, "failed")
    assert cluster.saves.look(LOST_S + 3, 0.0) == ()
    assert shown(cluster)["saves_finished_total", "run-7", "lost"] == 1
    cluster.saves.look(LOST_S + 3 + KEPT_S, 0.0)
    assert cluster.saves.status(0.0) == ()
    assert shown(cluster)["saves_finished_total", "run-7", "lost"] == 1, "a counter stays"


def test_a_restarted_coordinator_counts_from_the_next_report() -> None:
    cluster = reported(HALF, WHOLE)
    found = shown(cluster)
    assert found["save_bytes_total", "run-7", "written"] == 30
    assert ("save_bytes_total", "run-7", "copied") not in found, "the coordinator before has counted them"
    assert found["saves_finished_total", "run-7", "published"] == 1


def test_a_conversion_is_reported_as_such() -> None:
    began = replace(FIRST, source="s3://runs/7", ranks=3)
    failed = replace(began, number=2, state="failed", error="ConvertError", message="no numbers")
    cluster = reported(began, failed)
    save = cluster.saves.find("save-run-7-1")
    assert save is not None
    first, last = save.log.after(0)
    assert first.message == "a conversion has begun: s3://models/run-7 from s3://runs/7, 3 workers"
    assert (last.message, last.rank) == ("the conversion failed: no numbers", None)
    cluster = reported(began)
    ((progress, event),) = cluster.saves.look(LOST_S + 1, 0.0)
    assert (progress.failed_rank, event.message) == (
        None,
        "the conversion is lost: its process has not reported for 60 s",
    )


def test_a_conversion_that_is_verified_is_not_idle() -> None:
    now = replace(HALF, number=3, state="verifying", source="s3://runs/7")
    later = replace(now, number=4, verified_bytes=5)
    assert shown(reported(FIRST, HALF, now))["save_idle_seconds", "run-7"] == 8.0
    assert shown(reported(FIRST, HALF, now, later))["save_idle_seconds", "run-7"] == 7.0


def test_a_training_state_has_the_label_of_its_model() -> None:
    assert replace(FIRST, uri="s3://models/run-7/training/20261129T010203-ab12").model == "run-7"


def test_remembered_saves_are_bounded() -> None:
    running = replace(FIRST, save_id="runs")
    cluster = reported(running, *(replace(WHOLE, save_id=f"s{number}", number=1) for number in range(2 * MOST_SAVES)))
    assert len(cluster.saves.now()) == MOST_SAVES
    assert cluster.saves.find("runs") is not None, "ended saves go first"


@given(st.permutations([FIRST, HALF, replace(HALF, number=3, written_bytes=10), replace(WHOLE, number=4), WHOLE]))
def test_no_order_of_reports_makes_a_counter_fall(reports: list[SaveProgress]) -> None:
    cluster, before = ClusterMetrics(), dict[tuple[str, ...], Any]()
    for second, report in enumerate(reports):
        cluster.saves.received(report, float(second), 0.0)
        now = {key: value for key, value in shown(cluster).items() if key[0].endswith("_total")}
        assert all(now.get(key, 0) >= value for key, value in before.items())
        before = now
    assert sum(value for key, value in before.items() if key[0] == "saves_finished_total") == 1


@pytest.mark.parametrize("uri", ["s3://key:secret@models/run-7", "/models/run 7/"])
def test_the_label_is_plain(uri: str) -> None:
    assert replace(FIRST, uri=uri).model == "run-7"


class FakeRay:
    """Stands in for the module `ray` of a connected process. `answer` is called with each report."""

    WORKER_MODE = 1

    def __init__(self, answer: Callable[[SaveProgress], None]) -> None:
        self.reports: list[SaveProgress] = []
        self.answer = answer

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(worker=SimpleNamespace(mode=1), get_actor_name=lambda: "worker-llama-1a2b-0-0")

    def get_actor(self, name: str, namespace: str) -> Any:
        return SimpleNamespace(save_progress=SimpleNamespace(remote=lambda packed: packed))

    def get(self, packed: bytes, timeout: float) -> None:
        self.reports.append(unpack_message(packed, "a rank", "this test"))
        self.answer(self.reports[-1])


def connected(monkeypatch: pytest.MonkeyPatch, answer: Callable[[SaveProgress], None]) -> FakeRay:
    ray = FakeRay(answer)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(reporting, "REPORT_S", 0.01)
    return ray


def test_a_save_is_reported_from_its_begin_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = connected(monkeypatch, lambda report: None)
    report = save({"a": torch.ones(1000)}, tmp_path / "m")
    first, *_, last = ray.reports
    assert (first.number, first.uri, first.ranks) == (1, str(tmp_path / "m"), 1)
    assert (last.state, last.revision, last.worker_group) == ("published", report.revision, "llama-1a2b")
    assert (last.total_bytes, last.written_bytes) == (report.size_bytes, report.written_bytes)
    assert [each.number for each in ray.reports] == list(range(1, len(ray.reports) + 1))


def test_a_conversion_is_reported_from_its_begin_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, dest = tmp_path / "source", tmp_path / "m"
    source.mkdir()
    torch.save({"a": torch.ones(1000)}, source / "pytorch_model.bin")
    ray = connected(monkeypatch, lambda report: None)
    report = convert(source, dest, progress=False)
    first, *_, last = ray.reports
    assert (first.source, first.uri, first.ranks) == (f"file://{source}", f"file://{dest}", 1)
    assert first.save_id.startswith("conversion-m-")
    assert (last.state, last.revision, last.written_bytes) == ("published", report.revision, report.written_bytes)
    assert last.total_bytes == last.written_bytes
    assert last.verified_bytes > 0
    monkeypatch.setattr(conversion, "begin_save", refuse)
    with pytest.raises(SaveError):
        convert(source, tmp_path / "other", progress=False)
    last = ray.reports[-1]
    assert (last.state, last.error, last.failed_rank) == ("failed", "SaveError", None)


def refuse(*_: object, **__: object) -> None:
    """Fail as a conversion whose store refuses."""
    raise SaveError("no")


def test_a_coordinator_that_fails_or_hangs_fails_no_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(report: SaveProgress) -> None:
        raise RuntimeError("the actor died")

    ray = connected(monkeypatch, fail)
    save({"a": torch.ones(4)}, tmp_path / "m")
    assert {report.number for report in ray.reports} == {1}, "nothing was received"
    ends = threading.Event()
    monkeypatch.setattr(reporting, "END_S", 0.1)
    ray = connected(monkeypatch, lambda report: void(ends.wait(10)))
    began_s = time.monotonic()
    save({"a": torch.ones(4)}, tmp_path / "m")
    assert time.monotonic() - began_s < 5
    assert len(ray.reports) == 1
    ends.set()


def void(_: object) -> None:
    """Return nothing."""


def test_the_last_rank_reports_that_rank_0_died(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = connected(monkeypatch, lambda report: None)
    for rank in range(1, 4):
        reporter = SaveReporter("s3://models/run-7", rank, 4, time.monotonic())
        reporter.known_as(FIRST.save_id)
        reporter.failed(SaveError("rank 2 ended the save", rank=2))
        reporter.failed(SaveError("rank 0 ended the save: it died", rank=0))
    (report,) = ray.reports
    assert (report.save_id, report.reporter, report.failed_rank) == (FIRST.save_id, 3, 0)
    assert shown(reported(FIRST, report))["saves_finished_total", "run-7", "failed"] == 1


def test_a_process_without_ray_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    reporter = SaveReporter("s3://models/run-7", 0, 1, time.monotonic())
    reporter.published(revision="r")
    assert reporter.save_id == ""
    assert "ray" not in sys.modules
