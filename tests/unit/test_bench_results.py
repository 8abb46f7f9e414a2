"""Medians, ratios and tables of the benchmark, from numbers that are easy to check by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.contenders.table import CONTENDERS
from bench.harness.report import load_tables
from bench.harness.results import Entry, Run
from bench.page import figure, short_table
from bench.run import OTHERS, SCENES, choose

GB = 1_000_000_000


def entry(name: str, scene: str = "tp4/http", absent: str = "", **walls_s: list[float]) -> Entry:
    """Return an entry with runs of each case, which cost 0.1 CPU s and as many seconds as they take."""
    found = Entry(CONTENDERS[name], scene, absent=absent)
    for case, seconds in walls_s.items():
        size = GB // 4 if case.startswith("part") else GB
        found.runs += [Run(size, case, wall_s, 0.1 + wall_s, 4 * size, extra={"ready_s": 0.5}) for wall_s in seconds]
    return found


def results(*entries: Entry) -> dict[str, Any]:
    machine = {"processor": "x", "cores": "2", "date": "today"}
    scenes = {scene.name: {"title": scene.title, "ranks": scene.ranks} for scene in SCENES if scene.name == "tp4/http"}
    about = {"machine": machine, "model": {"bytes": GB, "files": 1}, "rounds": 3, "command": "python -m bench.run"}
    found = {**about, "scenes": scenes, "entries": [each.as_dict() for each in entries]}
    text: dict[str, Any] = json.loads(json.dumps(found))
    return text


EVERYTHING = results(
    entry("limit_arena", warm=[0.5]),
    entry("longshore_arena", warm=[1.0, 0.5, 4.0], warm_unverified=[0.9], part=[0.25], cold=[2.0]),
    entry("runai", warm=[8.0], cold=[9.0]),
    entry("runai_file", absent="runai is not installed"),
)


def test_medians_and_ranges_of_a_case() -> None:
    case = EVERYTHING["entries"][1]["cases"]["warm"]
    assert (case["wall_s"], case["least_s"], case["most_s"]) == (1.0, 0.5, 4.0)
    assert case["cpu_s_per_gb"] == pytest.approx(1.1)
    assert "warm_xxh3" not in EVERYTHING["entries"][1]["cases"]


def test_every_entry_has_rows_or_a_reason_for_none() -> None:
    ((title, table),) = load_tables(EVERYTHING).values()
    assert title == "Tensor parallel over 4 ranks"
    assert "| Longshore, through the arena | BLAKE3 | 1.00 (0.50-4.00) | 0.50 | 1.00 | 1.10 | 4.00 |" in table
    assert "| each rank: Run:ai streamer, all files | no | 8.00 (8.00-8.00) | 0.50 | 8.00 | 8.10 | 4.00 |" in table
    assert "| not run: runai is not installed |" in table
    rows = table.splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert rows.index(next(row for row in rows if "**warm" in row)) < rows.index(
        next(row for row in rows if "**cold" in row)
    )


def test_short_answers_and_figure_come_from_the_results() -> None:
    text = short_table(EVERYTHING)
    assert "| tp4, warm: each rank reads all files with Run:ai's streamer | 8.0 times our time |" in text
    assert "ours over the hand-written limit | 2.00 times its time, 1.83 times its CPU |" in text
    drawn = figure(EVERYTHING)
    assert drawn.count("<rect") == 1 + 3
    assert "8.00 s" in drawn


def test_patterns_choose_contenders_scenes_and_ids() -> None:
    assert {one.scene for one in choose(["tp8/http"])} == {"tp8/http"}
    assert {one.contender.name for one in choose(["longshore_*@tp4/*mbit"])} == {"longshore_arena", "longshore_direct"}
    assert len(choose(["*"])) == sum(len(scene.contenders) for scene in (*SCENES, *OTHERS))
