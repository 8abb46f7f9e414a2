"""The pages of the benchmark hold what the results file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.page
from bench.everything import STEPS
from bench.page import DOCS, PAGES, collect, cores_table, fill, main, node_table
from bench.run import SCENES

GB = 10**9
RESULTS = json.loads((DOCS / "benchmarks.json").read_text())


def test_pages_and_figure_are_those_of_the_results() -> None:
    assert main(["--check"]) == 0


def test_every_table_of_the_pages_has_its_place() -> None:
    text = "".join((DOCS / name).read_text() for name in PAGES)
    marked = {line.split()[2] for line in text.splitlines() if line.startswith("<!-- table: ")}
    assert {scene.name for scene in SCENES} | (STEPS.keys() - {"loads"}) <= marked


def test_a_changed_page_is_out_of_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    for name in (*PAGES, "benchmarks.json", "images/load_times.svg"):
        (tmp_path / name).write_bytes((DOCS / name).read_bytes())
    page = tmp_path / "benchmarks.md"
    page.write_text(page.read_text().replace("GB in", "kB in", 1))
    assert main(["--check", "--docs", str(tmp_path)]) == 1
    assert main(["--docs", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert main(["--check", "--docs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("out of date") == 1


def test_text_outside_the_marks_is_kept() -> None:
    page = "before\n<!-- table: node -->\nold\n<!-- end -->\nafter\n"
    filled = fill(page, RESULTS)
    assert filled.startswith("before\n<!-- table: node -->\n\n| rate |")
    assert filled.endswith("\n<!-- end -->\nafter\n")
    assert "old" not in filled


def test_loads_of_some_scenes_do_not_replace_the_page(tmp_path: Path) -> None:
    loads = {**RESULTS["loads"], "scenes": {"tp4/http": {"title": "", "ranks": 4}}}
    (tmp_path / "results.json").write_text(json.dumps(loads))
    assert collect(tmp_path) == {}


def test_cores_follow_from_loads_of_two_sizes() -> None:
    warm, part = {"bytes": GB, "cpu_s": 1.1}, {"bytes": GB // 4, "cpu_s": 0.35}
    loads = {
        "entries": [
            {"id": "longshore_arena@tp4/http", "cases": {"warm": warm, "part": part, "warm_unverified": warm}},
            {"id": "runai@tp4/http", "cases": {"warm": warm}},
        ]
    }
    _, _, row = cores_table(loads).splitlines()  # a slope of (1.1 - 0.35) / 0.75
    assert row == "| through the arena, BLAKE3 | 0.10 | 1.00 | 1.0 | 5.0 | 12.5 | 50.0 |"


def test_a_faster_store_needs_fewer_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "| 5 GB/s | 42.5 Gbit/s | 50 | 0.39 GiB |" in node_table()
    monkeypatch.setattr(bench.page, "CONNECTION_GB_S", 0.5)
    assert "| 5 GB/s | 42.5 Gbit/s | 10 | 0.08 GiB |" in node_table()
