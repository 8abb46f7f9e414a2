"""bench.run: results kept after an interrupt, and runs that do not count for their line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import bench.run
from bench.harness.contender import Spec
from bench.harness.link import NoLink
from bench.harness.results import Entry, Run
from bench.page import _settings_table
from bench.run import main

FIGURES = Run(10**9, "warm", 2.0, 1.0)
Once = Callable[[Entry, Mapping[str, Any], Spec], list[Run]]


class NoServer:
    """Stands in for nginx; no run of these tests reads a byte."""

    def __init__(self, *_: object) -> None:
        self.endpoint = self.tls_endpoint = self.ca_bundle = self.access_log = ""

    def __enter__(self) -> NoServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def no_sandbox() -> Iterator[None]:
    yield


@pytest.fixture
def run_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return the driver with another `run_once`, no server and no models."""
    monkeypatch.setattr(bench.run, "RangeServer", NoServer)
    monkeypatch.setattr(bench.run, "sandbox", no_sandbox)
    monkeypatch.setattr(bench.run, "make_models", lambda *_: Spec("file", "", "b", "", (), 10**9))

    def run(once: Once, *arguments: str) -> int:
        monkeypatch.setattr(bench.run, "run_once", once)
        places = ["--out", str(tmp_path / "out"), "--tmpfs", str(tmp_path)]
        return main([*places, *arguments])

    return run


def test_results_found_before_ctrl_c_are_kept_and_marked(run_bench: Callable[..., int], tmp_path: Path) -> None:
    runs = iter([[FIGURES], [FIGURES]])

    def once(*_: object) -> list[Run]:
        found = next(runs, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    assert run_bench(once, "--only", "limit_*@tp2/http", "--no-tuning") == 130
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["partial"] is True
    assert sum(len(entry["runs"]) for entry in found["entries"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_an_interrupted_run_without_results_keeps_the_old_ones(run_bench: Callable[..., int], tmp_path: Path) -> None:
    def once(*_: object) -> list[Run]:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("before")
    assert run_bench(once, "--only", "limit_arena@tp2/http", "--no-tuning") == 130
    assert (tmp_path / "out" / "results.json").read_text() == "before"


def test_a_run_in_the_wrong_mode_fails_unless_small(run_bench: Callable[..., int], tmp_path: Path) -> None:
    def once(*_: object) -> list[Run]:
        return [Run(10**9, "warm", 2.0, 1.0, extra={"placement": "via_arena"})]

    wanted = ("--only", "longshore_direct@tp2/http", "--rounds", "1")
    assert run_bench(once, *wanted, "--no-tuning") == 1
    (entry,) = json.loads((tmp_path / "out" / "results.json").read_text())["entries"]
    assert entry["failure"] == "asked for direct, ran via_arena: is the model too small?"
    assert run_bench(once, *wanted, "--small") == 0


def test_a_link_that_cannot_be_made_is_a_reason(
    run_bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise NoLink("no root")

    monkeypatch.setattr("bench.harness.link.RateLimitedLink.__enter__", refuse)
    assert run_bench(lambda *_: [FIGURES], "--only", "longshore_arena@tp4/*", "--no-tuning", "--rounds", "1") == 0
    entries = json.loads((tmp_path / "out" / "results.json").read_text())["entries"]
    absent = {entry["scene"]: entry["absent"] for entry in entries}
    assert absent["tp4/1000mbit"] == "no root"
    assert absent["tp4/http"] == ""


@pytest.mark.parametrize("tuned", [True, False])
def test_settings_are_called_best_only_if_they_were_tried(
    run_bench: Callable[..., int], tmp_path: Path, tuned: bool
) -> None:
    extra = () if tuned else ("--no-tuning",)
    assert run_bench(lambda *_: [FIGURES], "--only", "runai@tp2/http", "--rounds", "1", *extra) == 0
    text = _settings_table(json.loads((tmp_path / "out" / "results.json").read_text()))
    assert ("best setting" in text, "not tuned" in text) == (tuned, not tuned)
