"""What a benchmark has found: lines, runs, medians and ratios. Pure, plain data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.contender import Case, Contender
from bench.spec import Source

CEILING = "ceiling_raw"
OURS = "longshore_"
HAND_WRITTEN = "limit_"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one line: what `bench.measure` printed."""

    bytes: int
    wall_s: float
    cpu_s: float
    touched_before_bytes: int = 0
    baseline_bytes: int = 0
    peak_bytes: int = 0
    peak_shared_bytes: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.bytes / 1e9)

    @property
    def memory_over_bytes(self) -> float:
        """Peak of all processes above what they had before, recycled memory included, over the model's size."""
        return (self.peak_bytes + self.touched_before_bytes) / self.bytes

    @property
    def stream_gb_per_s(self) -> float | None:
        """From the first chunk to the last byte placed, for those who say it."""
        stream_s = self.extra.get("stream_s")
        return self.bytes / stream_s / 1e9 if stream_s else None


@dataclass(slots=True)
class Line:
    """One line of the tables: a contender in one of its modes, reading from one source."""

    contender: str
    contender_title: str
    case: Case
    source: Source
    settings: Sequence[Mapping[str, Any]]
    setting: Mapping[str, Any] = field(default_factory=dict)  # the one that was taken
    tried: list[tuple[Mapping[str, Any], float]] = field(default_factory=list)  # GB/s of each try of the search
    runs: list[Run] = field(default_factory=list)
    absent: str = ""  # why there are no runs: not installed, not able to run here
    failure: str = ""  # how a run failed

    @property
    def id(self) -> str:
        return line_id(self.contender, self.case.name, self.source)

    @property
    def title(self) -> str:
        title = f"{self.contender_title}, {self.case.title}" if self.case.title else self.contender_title
        others = sorted({other for run in self.runs if (other := self.other_mode(run))})
        return f"{title} (ran {', '.join(others)})" if others else title

    def other_mode(self, run: Run) -> str:
        """The placement that the run had, when it is another one than this line asked for; else ""."""
        asked, had = self.case.options.get("placement"), run.extra.get("placement")
        return str(had) if asked and had and had != asked else ""

    @property
    def gb_per_s(self) -> float:
        """Median of the runs, as are the others."""
        return statistics.median(run.gb_per_s for run in self.runs)

    @property
    def gb_per_s_range(self) -> tuple[float, float]:
        return min(run.gb_per_s for run in self.runs), max(run.gb_per_s for run in self.runs)

    @property
    def cpu_s_per_gb(self) -> float:
        return statistics.median(run.cpu_s_per_gb for run in self.runs)

    @property
    def memory_over_bytes(self) -> float:
        return statistics.median(run.memory_over_bytes for run in self.runs)

    @property
    def stream_gb_per_s(self) -> float | None:
        found = [run.stream_gb_per_s for run in self.runs if run.stream_gb_per_s is not None]
        return statistics.median(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        found = {
            "id": self.id,
            "title": self.title,
            "source": self.source,
            "checks": self.case.checks,
            "keeps": self.case.keeps,
            "memory": self.case.memory,
            "limit": self.case.limit,
            "setting": dict(self.setting),
            "tried": [{"setting": dict(setting), "gb_per_s": gb_per_s} for setting, gb_per_s in self.tried],
            "runs": [asdict(run) for run in self.runs],
            "absent": self.absent,
            "failure": self.failure,
        }
        if self.runs:
            found |= {
                "gb_per_s": self.gb_per_s,
                "cpu_s_per_gb": self.cpu_s_per_gb,
                "memory_over_bytes": self.memory_over_bytes,
                "stream_gb_per_s": self.stream_gb_per_s,
            }
        return found


@dataclass(frozen=True, slots=True)
class Results:
    """One run of the benchmark."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    model: Mapping[str, Any]  # bytes, shards, tensors, hash
    rounds: int
    lines: Sequence[Line]
    tuned: bool = True  # settings were found by trying
    partial: bool = False  # interrupted: not every line has all its runs

    def line(self, wanted: str) -> Line | None:
        """The line of that id, when it has runs."""
        return next((line for line in self.lines if line.id == wanted and line.runs), None)

    def ceiling(self, source: Source) -> Line | None:
        """What everything that reads from `source` is compared with."""
        return self.line(line_id(CEILING, "", source))

    def limit_of(self, line: Line) -> Line | None:
        """The hand-written limit that does the same work from the same source."""
        contender, _, case = line.case.limit.partition(":")
        return self.line(line_id(contender, case, line.source)) if contender else None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "model": dict(self.model),
            "rounds": self.rounds,
            "tuned": self.tuned,
            "partial": self.partial,
            "lines": [line.as_dict() for line in self.lines],
        }


def line_id(contender: str, case: str, source: Source) -> str:
    """ "longshore_load:direct_fresh@http", "ceiling_raw@file"."""
    return f"{contender}:{case}@{source}" if case else f"{contender}@{source}"


def lines_of(contenders: Iterable[Contender], sources: Sequence[Source]) -> list[Line]:
    """Every line that these contenders have, source by source, in their order."""
    everyone = list(contenders)
    return [
        Line(contender.name, contender.title, case, source, contender.settings, contender.settings[0])
        for source in sources
        for contender in everyone
        for case in contender.cases
        if source in case.sources
    ]
