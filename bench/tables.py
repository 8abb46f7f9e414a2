"""The tables: for the terminal and, in Markdown, for docs/benchmarks.md. Pure but for `rewrite_docs`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.goals import Goal
from bench.results import Line, Results
from bench.spec import Source

BEGIN = "<!-- benchmark: written by `make bench`, not by hand -->"
END = "<!-- end of benchmark -->"
SOURCE_TITLES: dict[Source, str] = {
    "http": "From the HTTP store",
    "https": "From the HTTP store, over TLS",
    "file": "From local files",
}
MEMORY_TITLES = {
    "none": "nothing kept",
    "arena": "into the arena",
    "fresh": "kept in fresh memory",
    "recycled": "kept in memory touched before",
    "device": "on the device",
}
HEADINGS = ("", "checks", "keeps", "GB/s (min-max)", "of ceiling", "CPU s/GB", "x ceiling", "memory", "of its limit")


def ordered(lines: Iterable[Line]) -> list[Line]:
    """By source, by where the bytes end, the fastest first; those without runs at the end of their group."""
    sources, memories = list(SOURCE_TITLES), list(MEMORY_TITLES)
    return sorted(
        lines,
        key=lambda line: (
            sources.index(line.source),
            memories.index(line.case.memory),
            -line.gb_per_s if line.runs else 0.0,
        ),
    )


def rows_of(results: Results, source: Source) -> list[tuple[str, ...]]:
    """One row per line of that source, as texts."""
    ceiling = results.ceiling(source)
    rows: list[tuple[str, ...]] = []
    memory = ""
    for line in ordered(line for line in results.lines if line.source == source):
        if line.case.memory != memory:
            memory = line.case.memory
            rows.append((f"**{MEMORY_TITLES[memory]}**", *[""] * (len(HEADINGS) - 1)))
        rows.append(_row(line, ceiling, results.limit_of(line)))
    return rows


def _row(line: Line, ceiling: Line | None, limit: Line | None) -> tuple[str, ...]:
    if not line.runs:
        why = f"failed: {line.failure}" if line.failure else f"not run: {line.absent}"
        return (line.title, _yes(line.case.checks), _yes(line.case.keeps), why.replace("|", "/"), *[""] * 5)
    low, high = line.gb_per_s_range
    speed = f"{line.gb_per_s:.2f} ({low:.2f}-{high:.2f})"
    if (streaming := line.stream_gb_per_s) is not None:
        speed += f"; streaming {streaming:.2f}"
    return (
        line.title,
        _yes(line.case.checks),
        _yes(line.case.keeps),
        speed,
        f"{line.gb_per_s / ceiling.gb_per_s:.2f}" if ceiling else "-",
        f"{line.cpu_s_per_gb:.2f}",
        f"{line.cpu_s_per_gb / ceiling.cpu_s_per_gb:.1f}" if ceiling and ceiling.cpu_s_per_gb else "-",
        f"{line.memory_over_bytes:.2f}",
        f"{line.gb_per_s / limit.gb_per_s:.2f}" if limit else "",
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def markdown(results: Results, goals: Sequence[Goal], command: str) -> str:
    """What stands between the markers of docs/benchmarks.md."""
    model = results.model
    parts = [
        f"{_pairs(results.machine)}. Model of {model['bytes'] / 1e9:.2f} GB in {model['files']} shards, "
        f"BLAKE3 where no other hash is named; {results.rounds} rounds, interleaved; medians, with the lowest and the "
        f"highest. `{command}`.",
        f"Versions: {_pairs(results.versions)}.",
        "GB/s is the model's size over the time from the call to the last tensor in place, imports and starts of "
        "processes not counted; *streaming*: from the first chunk to the last byte placed. CPU is that of all "
        "processes of a contender, those of the store not. Memory is the peak of all its processes over what they had "
        "before, recycled memory included, over the model's size.",
    ]
    for source, title in SOURCE_TITLES.items():
        rows = rows_of(results, source)
        if rows:
            parts.append(f"### {title}")
            parts.append("\n".join(_markdown_rows([HEADINGS, *rows])))
    if goals:
        parts.append("### Against the goals")
        goal_rows = [("goal", "wanted", "found", ""), *((g.what, g.wanted, g.found, g.verdict) for g in goals)]
        parts.append("\n".join(_markdown_rows(goal_rows)))
    settings = [(f"`{line.id}`", f"`{json.dumps(dict(line.setting))}`") for line in ordered(results.lines) if line.runs]
    how = "Found by trying those" if results.tuned else "Not tuned: the first of those"
    when = ", before the rounds." if results.tuned else "; none was tried."
    parts.append(f"### Settings\n\n{how} that `bench/contenders/` lists{when}")
    parts.append("\n".join(_markdown_rows([("line", "best setting" if results.tuned else "setting"), *settings])))
    return "\n\n".join(parts)


def terminal(results: Results) -> str:
    """The same in columns."""
    blocks = []
    for source, title in SOURCE_TITLES.items():
        rows = rows_of(results, source)
        if rows:
            plain = [tuple(cell.replace("**", "") for cell in row) for row in [HEADINGS, *rows]]
            blocks.append("\n".join([f"\n{title}", *_columns(plain)]))
    return "\n".join(blocks)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Left-aligned; a long last cell (why something is missing) widens no column."""
    widths = [max(len(row[i]) for row in rows if any(row[i + 1 :]) or i == 0) for i in range(len(rows[0]) - 1)] + [0]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown_rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]


def _pairs(values: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in dict(values).items())  # type: ignore[call-overload]


def check_docs(path: Path) -> str:
    """What that file has. Raises ValueError when it has not both markers, once each, OSError when it is not there."""
    with path.open("r+") as opened:
        whole = opened.read()
    if whole.count(BEGIN) != 1 or whole.count(END) != 1 or whole.index(BEGIN) > whole.index(END):
        raise ValueError(f"{path} has not the markers {BEGIN!r} and {END!r}, once each and in this order")
    return whole


def rewrite_docs(path: Path, text: str) -> None:
    """Put `text` between the markers of that file. Raises as `check_docs` does."""
    whole = check_docs(path)
    before, _, rest = whole.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def is_reference(line: Line) -> bool:
    """A line to compare with, not a program that somebody would use."""
    return line.contender.startswith(("ceiling_", "limit_"))
