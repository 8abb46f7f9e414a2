"""Results of a benchmark: the runs of each contender in each scene, and their medians. Pure data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.harness.contender import Contender


@dataclass
class Run:
    """One load, as `bench.harness.measure` prints it."""

    bytes: int  # the model's size
    case: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    store_bytes: int = 0  # bodies that the server sent
    baseline_bytes: int = 0  # PSS of the process tree just before
    peak_bytes: int = 0  # highest PSS of the process tree over the baseline, where it was watched
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.bytes / 1e9)


@dataclass(slots=True)
class Entry:
    """One contender in one scene: a layout, a source and a link."""

    contender: Contender
    scene: str
    setting: Mapping[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)  # of all its cases
    absent: str = ""  # why there are no runs: not installed, not able to run here
    failure: str = ""  # how a run failed

    @property
    def id(self) -> str:
        return f"{self.contender.name}@{self.scene}"

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for the JSON file. Each case has its medians, and the lowest and highest seconds."""
        cases = {}
        for case in self.contender.cases:
            if runs := [run for run in self.runs if run.case == case.name]:
                cases[case.name] = {"title": case.title, "checks": case.checks, **medians(runs)}
        return {
            "id": self.id,
            "contender": self.contender.name,
            "scene": self.scene,
            "title": self.contender.title,
            "setting": dict(self.setting),
            "absent": self.absent,
            "failure": self.failure,
            "cases": cases,
            "runs": [asdict(run) for run in self.runs],
        }


def medians(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the medians of runs of one case, by name."""
    found: dict[str, Any] = {"runs": len(runs), "bytes": runs[0].bytes}
    for name in ("wall_s", "cpu_s", "store_bytes", "gb_per_s", "cpu_s_per_gb", "peak_bytes"):
        found[name] = statistics.median(getattr(run, name) for run in runs)
    found |= {"least_s": min(run.wall_s for run in runs), "most_s": max(run.wall_s for run in runs)}
    if ready := [float(run.extra["ready_s"]) for run in runs if "ready_s" in run.extra]:
        found["ready_s"] = statistics.median(ready)
    return found


def entries_of(contenders: Iterable[Contender], scene: str) -> list[Entry]:
    """Return an entry for each of these contenders, with its first setting."""
    return [Entry(contender, scene, contender.settings[0]) for contender in contenders]
