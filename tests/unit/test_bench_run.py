"""bench.run: results kept after an interrupt, and runs that do not count for their line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import bench.run
from bench.harness.contender import Case, Spec
from bench.harness.report import markdown
from bench.harness.results import Line, Results, Run
from bench.run import main

FIGURES = Run(10**9, 2.0, 1.0)
Once = Callable[[Line, Mapping[str, Any], Spec], Run]


class NoServer:
    """Stands in for nginx; no run of these tests reads a byte."""

    def __init__(self, *_: object) -> None:
        self.endpoint = self.tls_endpoint = self.ca_bundle = ""

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
    runs = iter([FIGURES, FIGURES])

    def once(*_: object) -> Run:
        found = next(runs, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    assert run_bench(once, "--only", "ceiling_raw,limit_arena:verified@http", "--no-tuning") == 130
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["partial"] is True
    assert sum(len(line["runs"]) for line in found["lines"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_an_interrupted_run_without_results_keeps_the_old_ones(run_bench: Callable[..., int], tmp_path: Path) -> None:
    def once(*_: object) -> Run:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text("before")
    assert run_bench(once, "--only", "ceiling_raw@http", "--no-tuning") == 130
    assert (tmp_path / "out" / "results.json").read_text() == "before"


def test_a_run_in_the_wrong_mode_fails_unless_small(run_bench: Callable[..., int], tmp_path: Path) -> None:
    def once(*_: object) -> Run:
        return Run(10**9, 2.0, 1.0, extra={"placement": "via_arena"})

    wanted = ("--only", "longshore_load:direct_fresh@http", "--rounds", "1")
    assert run_bench(once, *wanted, "--no-tuning") == 1
    (line,) = json.loads((tmp_path / "out" / "results.json").read_text())["lines"]
    assert line["failure"] == "asked for direct, ran via_arena: is the model too small?"
    assert run_bench(once, *wanted, "--small") == 0
    (line,) = json.loads((tmp_path / "out" / "results.json").read_text())["lines"]
    assert line["title"].endswith("direct, verified (ran via_arena)")


@pytest.mark.parametrize("tuned", [True, False])
def test_settings_are_listed_as_tried_only_if_they_were(tuned: bool) -> None:
    line = Line("ceiling_raw", "ceiling", Case("", "", "none", keeps=False), "http", ({},), runs=[FIGURES])
    results = Results({"cores": "2"}, {"nginx": "1"}, {"bytes": 1, "files": 1}, 1, [line], tuned)
    text = markdown(results, "make bench")
    assert ("Found by trying" in text, "best setting" in text) == (tuned, tuned)
    assert ("none was tried" in text) == (not tuned)
