"""Reports: the tables of docs/benchmarks.md, the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from bench.harness.contender import Source
from bench.harness.results import Line, Results

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
}
HEADINGS = ("", "checks", "keeps", "GB/s (min-max)", "of ceiling", "CPU s/GB", "x ceiling", "memory", "of its limit")
PACKAGES = (
    *("longshore", "ray", "torch", "numpy", "blake3", "xxhash", "boto3", "safetensors"),
    *("runai-model-streamer", "runai-model-streamer-s3", "obstore", "awscrt", "s3torchconnector", "fastsafetensors"),
)


def describe_machine() -> dict[str, str]:
    """Return processor, cores, memory, kernel and date by name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, "") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release().partition("-")[0],
        "load before": f"{os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of every package that takes part, by name."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def ordered(lines: Iterable[Line]) -> list[Line]:
    """Sort by source and by where the bytes end, the fastest first and lines without runs last."""
    places = {name: place for place, name in enumerate((*SOURCE_TITLES, *MEMORY_TITLES))}

    def place(line: Line) -> tuple[int, int, float]:
        return places[line.source], places[line.case.memory], -line.gb_per_s if line.runs else 0.0

    return sorted(lines, key=place)


def rows_of(results: Results, source: Source) -> list[tuple[str, ...]]:
    """Return one row per line of that source, as texts."""
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
    what = (line.title, *("yes" if value else "no" for value in (line.case.checks, line.case.keeps)))
    if not line.runs:
        why = f"failed: {line.failure}" if line.failure else f"not run: {line.absent}"
        return (*what, why.replace("|", "/"), *[""] * 5)
    low, high = line.gb_per_s_range
    streaming = f"; streaming {line.stream_gb_per_s:.2f}" if line.stream_gb_per_s is not None else ""
    return (
        *what,
        f"{line.gb_per_s:.2f} ({low:.2f}-{high:.2f}){streaming}",
        f"{line.gb_per_s / ceiling.gb_per_s:.2f}" if ceiling else "-",
        f"{line.cpu_s_per_gb:.2f}",
        f"{line.cpu_s_per_gb / ceiling.cpu_s_per_gb:.1f}" if ceiling and ceiling.cpu_s_per_gb else "-",
        f"{line.memory_over_bytes:.2f}",
        f"{line.gb_per_s / limit.gb_per_s:.2f}" if limit else "",
    )


def tables(results: Results) -> str:
    """Return one table for each source, in Markdown."""
    found = ((title, rows_of(results, source)) for source, title in SOURCE_TITLES.items())
    return "\n\n".join(f"### {title}\n\n{markdown_table(HEADINGS, rows)}" for title, rows in found if rows)


def markdown(results: Results, command: str) -> str:
    """Return the text that docs/benchmarks.md shows of a run."""
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
        tables(results),
    ]
    settings = [(f"`{line.id}`", f"`{json.dumps(dict(line.setting))}`") for line in ordered(results.lines) if line.runs]
    how = "Found by trying those" if results.tuned else "Not tuned: the first of those"
    when = ", before the rounds." if results.tuned else "; none was tried."
    parts.append(f"### Settings\n\n{how} that `bench/contenders/table.py` lists{when}")
    parts.append(markdown_table(("line", "best setting" if results.tuned else "setting"), settings))
    return "\n\n".join(parts)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
