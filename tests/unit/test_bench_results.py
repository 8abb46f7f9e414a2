"""Medians, ratios, goals and tables of the benchmark, from stats that are easy to check by head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.contender import Case, Memory
from bench.goals import find_goals
from bench.results import Line, Results, Run
from bench.spec import Source
from bench.tables import BEGIN, END, markdown, ordered, rewrite_docs, terminal

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
    case = Case(name, name, checks, keeps, memory, limit=limit)
    found = Line(contender, contender, case, source, ({},), absent=absent)
    ours = (
        {"stream_s": walls_s[0] / 2, "served_bytes": GB, "arena_bytes": 0, "ranks": 1}
        if contender.startswith("longshore") and walls_s
        else {}
    )
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


def test_medians_and_what_they_are_over() -> None:
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


def test_goals_are_reached_missed_or_not_measured() -> None:
    goals = {goal.what.split(" (")[0]: goal for goal in find_goals(EVERYTHING)}
    missed = goals["`longshore_load:fresh@http` over its hand-written limit"]
    assert (missed.wanted, missed.found, missed.verdict) == ("at least 0.85", "0.80", "missed")
    faster = goals["fresh memory, verified, over the fastest rival"]
    assert (faster.found, faster.verdict) == ("2.00", "reached")
    assert goals["fresh memory, CPU over the cheapest rival's"].found == "0.50"
    assert goals["recycled memory, verified, over the fastest rival"].verdict == ""
    assert goals["bytes out of the store over the model's, the most of any run"].verdict == "reached"
    assert goals["MiB per rank beyond tensors and arena, the most of any run"].found == "0.00"


def test_files_are_compared_with_those_who_keep_their_tensors_too() -> None:
    ours = line("longshore_load", [1.0], name="fresh", source="file", checks=True)
    views = line("safetensors_clone", [0.1], name="views", source="file", memory="none", keeps=False)
    clone = line("safetensors_clone", [1.5], name="clone", source="file")
    goals = {goal.what: goal for goal in find_goals(results(ours, views, clone))}
    found = goals["local files, fresh memory, verified by blake3, over safetensors and clone"]
    assert (found.found, found.verdict) == ("1.50", "reached")
    assert goals["local files, fresh memory, verified by xxh3_128, over safetensors and clone"].verdict == ""


@pytest.mark.parametrize(
    ("peak_mib", "shared_mib", "found", "verdict"),
    [
        (550, 250, "150.00", "missed"),
        (450, 250, "100.00", "reached"),
        (250, 0, "125.00", "missed"),  # nothing of the arena was mapped: nothing is taken off
        (550, 400, "150.00", "missed"),  # shared memory that cannot be the arena's counts
        (240, 250, "-5.00", "reached"),
    ],
)
def test_memory_beyond_tensors_and_arena_is_per_rank(peak_mib: int, shared_mib: int, found: str, verdict: str) -> None:
    ours = line("longshore_load", [1.0], name="recycled", memory="recycled", checks=True)
    extra = {"arena_bytes": 250 << 20, "ranks": 2}
    ours.runs = [Run(GB, 1.0, 1.0, GB, 0, peak_mib << 20, shared_mib << 20, extra)]
    goals = {goal.what: goal for goal in find_goals(results(ours))}
    goal = goals["MiB per rank beyond tensors and arena, the most of any run"]
    assert (goal.found, goal.verdict) == (found, verdict)


@pytest.mark.parametrize(("served", "verdict"), [(1.01, "reached"), (1.5, "missed")])
def test_bytes_out_of_the_store_are_those_that_it_sent(served: float, verdict: str) -> None:
    ours = line("longshore_load", [1.0], checks=True)
    ours.runs = [Run(GB, 1.0, 1.0, extra={"store_bytes": GB, "served_bytes": round(served * GB)})]
    goals = {goal.what: goal for goal in find_goals(results(ours))}
    goal = goals["bytes out of the store over the model's, the most of any run"]
    assert (goal.found, goal.verdict) == (f"{served:.2f}", verdict)


def test_what_we_are_after_is_shown_and_not_judged() -> None:
    ours = line("longshore_load", [0.5], name="direct_recycled", memory="recycled", checks=True, cpu_s=1.5)
    plain = line("longshore_load", [0.4], name="direct_recycled_unverified", memory="recycled")
    rival = line("obstore_ranges", [1.0], name="recycled", memory="recycled", cpu_s=2.0)
    after = [goal for goal in find_goals(results(ours, plain, rival)) if goal.wanted.startswith("what we are after")]
    assert [(goal.found, goal.verdict) for goal in after] == [("2.00 at 0.75", ""), ("0.80", "")]


def test_what_checks_nothing_is_no_figure_of_ours() -> None:
    unverified = line("longshore_load", [0.1], name="fresh_unverified", checks=False)
    goals = {goal.what.split(" (")[0]: goal for goal in find_goals(results(unverified, line("runai_s3", [2.0])))}
    assert goals["fresh memory, verified, over the fastest rival"].verdict == ""


def test_the_table_shows_every_line_with_its_ratios_or_why_there_is_none() -> None:
    text = markdown(EVERYTHING, find_goals(EVERYTHING), "make bench")
    assert (
        "| longshore_load, fresh | yes | yes | 1.00 (0.25-2.00); streaming 2.00 | 0.25 | 1.00 | 2.0 | 1.25 | 0.80 |"
        in text
    )
    assert "not run: obstore is not installed" in text
    for shown in EVERYTHING.lines:
        assert shown.title in terminal(EVERYTHING)
    rows = [row for row in text.splitlines() if row.startswith("|")]
    table = rows[: rows.index("| goal | wanted | found |  |")]
    assert len({row.count("|") for row in table}) == 1


def test_lines_are_in_order_of_speed_within_their_group() -> None:
    found = [shown.contender for shown in ordered(EVERYTHING.lines)]
    assert found == ["ceiling_raw", "limit_copy", "longshore_load", "runai_s3", "obstore"]


def test_what_is_written_as_json_is_what_was_found() -> None:
    found = json.loads(json.dumps(EVERYTHING.as_dict()))
    by_id = {shown["id"]: shown for shown in found["lines"]}
    assert by_id["longshore_load:fresh@http"]["gb_per_s"] == 1.0
    assert len(by_id["longshore_load:fresh@http"]["runs"]) == 3
    assert "gb_per_s" not in by_id["obstore@http"]


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    docs = tmp_path / "docs.md"
    docs.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n")
    rewrite_docs(docs, "new")
    assert docs.read_text() == f"a\n{BEGIN}\n\nnew\n\n{END}\nb\n"
    rewrite_docs(docs, "newer")
    assert docs.read_text() == f"a\n{BEGIN}\n\nnewer\n\n{END}\nb\n"


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}"])
def test_docs_without_their_markers_are_left_alone(tmp_path: Path, text: str) -> None:
    docs = tmp_path / "docs.md"
    docs.write_text(text)
    with pytest.raises(ValueError, match="markers"):
        rewrite_docs(docs, "new")
    assert docs.read_text() == text
