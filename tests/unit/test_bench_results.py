"""Medians, ratios and tables of the benchmark, from numbers that are easy to check by hand."""

from __future__ import annotations

import json

import pytest

from bench.harness.contender import Case, Memory, Source
from bench.harness.report import markdown, ordered, tables
from bench.harness.results import Line, Results, Run

GB = 1_000_000_000


def line(
    contender: str,
    walls_s: list[float],
    *,
    name: str = "",
    memory: Memory = "fresh",
    source: Source = "http",
    checks: bool = False,
    keeps: bool = True,
    cpu_s: float = 1.0,
    limit: str = "",
    absent: str = "",
) -> Line:
    case = Case(name, name, memory, checks=checks, keeps=keeps, limit=limit)
    found = Line(contender, contender, case, source, ({},), absent=absent)
    ours = {"stream_s": walls_s[0] / 2} if contender.startswith("longshore") else {}
    found.runs = [Run(GB, wall_s, cpu_s, touched_before_bytes=GB // 4, peak_bytes=GB, extra=ours) for wall_s in walls_s]
    return found


def results(*lines: Line) -> Results:
    return Results(
        {"processor": "x", "cores": "2", "date": "today"}, {"nginx": "1"}, {"bytes": GB, "files": 1}, 3, lines
    )


EVERYTHING = results(
    line("ceiling_raw", [0.25], memory="none", keeps=False, cpu_s=0.5),
    line("limit_copy", [0.8], name="fresh", checks=True),
    line("longshore_load", [1.0, 0.5, 4.0], name="fresh", checks=True, limit="limit_copy:fresh"),
    line("runai_s3", [2.0], cpu_s=2.0),
    line("obstore", [], absent="obstore is not installed"),
)


def test_medians_ranges_and_limits_of_a_line() -> None:
    ours = EVERYTHING.line("longshore_load:fresh@http")
    assert ours is not None
    assert ours.gb_per_s == 1.0
    assert ours.gb_per_s_range == (0.25, 2.0)
    assert ours.memory_over_bytes == 1.25
    assert ours.stream_gb_per_s == 2.0
    limit = EVERYTHING.limit_of(ours)
    assert limit is not None
    assert ours.gb_per_s / limit.gb_per_s == pytest.approx(0.8)
    assert EVERYTHING.line("obstore@http") is None
    assert EVERYTHING.ceiling("file") is None


def test_every_line_has_its_ratios_or_a_reason_for_none() -> None:
    text = markdown(EVERYTHING, "make bench")
    assert (
        "| longshore_load, fresh | yes | yes | 1.00 (0.25-2.00); streaming 2.00 | 0.25 | 1.00 | 2.0 | 1.25 | 0.80 |"
        in text
    )
    assert "not run: obstore is not installed" in text
    for shown in EVERYTHING.lines:
        assert shown.title in tables(EVERYTHING)
    rows = [row for row in tables(EVERYTHING).splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_lines_are_in_order_of_speed_within_their_group() -> None:
    found = [shown.contender for shown in ordered(EVERYTHING.lines)]
    assert found == ["ceiling_raw", "limit_copy", "longshore_load", "runai_s3", "obstore"]


def test_the_json_has_the_results_that_were_found() -> None:
    found = json.loads(json.dumps(EVERYTHING.as_dict()))
    by_id = {shown["id"]: shown for shown in found["lines"]}
    assert by_id["longshore_load:fresh@http"]["gb_per_s"] == 1.0
    assert len(by_id["longshore_load:fresh@http"]["runs"]) == 3
    assert "gb_per_s" not in by_id["obstore@http"]
