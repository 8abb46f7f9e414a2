"""Reports: the tables of docs/benchmarks.md, the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

HEADINGS = ("", "checks", "seconds (min-max)", "of it until ready", "over ours", "CPU s/GB", "store bytes / model")
PEAK = "peak memory / model"  # a column of scenes where memory was watched
PACKAGES = (
    *("longshore", "ray", "torch", "numpy", "blake3", "xxhash", "safetensors"),
    *("runai-model-streamer", "runai-model-streamer-s3", "obstore", "fastsafetensors"),
)
GROUPS = {"warm": "warm: processes run, memory was used before", "cold": "cold: processes started by the load"}


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


def load_tables(results: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return (title, table in Markdown) of each scene by name. `results`: as results.json has them."""
    scenes = results["scenes"].items()
    return {name: (scene["title"], _scene_table(results, name)) for name, scene in scenes}


def ours(results: Mapping[str, Any], scene: str, case: str) -> Mapping[str, Any] | None:
    """Return the medians of that case by the faster of our placements, where there are any."""
    entries = [one for one in results["entries"] if one["scene"] == scene and one["contender"].startswith("longshore")]
    found = [one["cases"][case] for one in entries if case in one["cases"]]
    return min(found, key=lambda one: float(one["wall_s"]), default=None)


def _scene_table(results: Mapping[str, Any], scene: str) -> str:
    rows: list[tuple[str, ...]] = []
    entries = [entry for entry in results["entries"] if entry["scene"] == scene]
    watched = any(one["peak_bytes"] for entry in entries for one in entry["cases"].values())
    head = (*HEADINGS, PEAK) if watched else HEADINGS
    for group, words in GROUPS.items():
        base = ours(results, scene, group)
        found = [
            (one["wall_s"], entry["title"], one)
            for entry in entries
            for case, one in entry["cases"].items()
            if case.startswith(group)
        ]
        if found:
            rows.append((f"**{words}**", *[""] * (len(head) - 1)))
            rows += [_row(title, one, base)[: len(head)] for _, title, one in sorted(found, key=lambda each: each[:2])]
    for entry in entries:
        if reason := entry["failure"] or entry["absent"]:
            why = f"{'failed' if entry['failure'] else 'not run'}: {reason}".replace("|", "/")
            rows.append((entry["title"], "", why, *[""] * (len(head) - 3)))
    return markdown_table(head, rows)


def _row(title: str, one: Mapping[str, Any], base: Mapping[str, Any] | None) -> tuple[str, ...]:
    return (
        f"{title}, {one['title']}" if one["title"] else title,
        one["checks"] or "no",
        f"{one['wall_s']:.2f} ({one['least_s']:.2f}-{one['most_s']:.2f})",
        f"{one['ready_s']:.2f}" if "ready_s" in one else "",
        f"{one['wall_s'] / base['wall_s']:.2f}" if base else "-",
        f"{one['cpu_s_per_gb']:.2f}",
        f"{one['store_bytes'] / one['bytes']:.2f}" if one["store_bytes"] else "-",
        f"{one['peak_bytes'] / one['bytes']:.2f}",
    )


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def pairs(values: Mapping[str, str]) -> str:
    """Return names and values in one line."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
