"""Results of a benchmark: runs, lines with their medians, and ratios to the ceiling and the limits. Pure data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.harness.contender import Case, Contender, Source

CEILING = "ceiling_raw"


@dataclass
class Run:
    """One load of one line, as `bench.harness.measure` prints it."""

    bytes: int  # the model's size
    wall_s: float = 0.0
    cpu_s: float = 0.0
    touched_before_bytes: int = 0  # destination memory touched before: part of the baseline, named apart
    baseline_bytes: int = 0  # PSS of the process tree just before
    peak_bytes: int = 0  # highest PSS of the process tree over the baseline
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.bytes / 1e9)

    @property
    def memory_over_bytes(self) -> float:
        """Peak of all processes above the baseline, recycled memory included, over the model's size."""
        return (self.peak_bytes + self.touched_before_bytes) / self.bytes

    @property
    def stream_gb_per_s(self) -> float | None:
        """Speed from the first chunk to the last byte placed, where the contender reports it."""
        stream_s = self.extra.get("stream_s")
        return self.bytes / stream_s / 1e9 if stream_s else None


@dataclass(slots=True)
class Line:
    """One line of the tables: a contender in one of its modes, reading from one source."""

    contender: str
    contender_title: str
    case: Case
    source: Source
    settings: Sequence[Mapping[str, Any]] = ({},)
    setting: Mapping[str, Any] = field(default_factory=dict)  # the one that counts
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
        """Return the run's placement when this line asked for another one, else ""."""
        wanted, had = self.case.options.get("placement"), run.extra.get("placement")
        return str(had) if wanted and had and had != wanted else ""

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
        """Return the line for the JSON file."""
        medians = ("gb_per_s", "cpu_s_per_gb", "memory_over_bytes", "stream_gb_per_s") if self.runs else ()
        return {
            **{name: getattr(self, name) for name in ("id", "title", "source", "absent", "failure", *medians)},
            **{name: getattr(self.case, name) for name in ("checks", "keeps", "memory", "limit")},
            "setting": dict(self.setting),
            "runs": [asdict(run) for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that one call of the benchmark measured."""

    machine: Mapping[str, str]
    versions: Mapping[str, str]
    model: Mapping[str, Any]  # bytes, files
    rounds: int
    lines: Sequence[Line]
    tuned: bool = True  # settings were found by trying
    partial: bool = False  # interrupted: not every line has all its runs

    def line(self, wanted: str) -> Line | None:
        """Return the line of that id, when it has runs."""
        return next((line for line in self.lines if line.id == wanted and line.runs), None)

    def ceiling(self, source: Source) -> Line | None:
        """Return the line that bounds everything that reads from `source`."""
        return self.line(line_id(CEILING, "", source))

    def limit_of(self, line: Line) -> Line | None:
        """Return the hand-written limit that does the same work from the same source."""
        contender, _, case = line.case.limit.partition(":")
        return self.line(line_id(contender, case, line.source)) if contender else None

    def as_dict(self) -> dict[str, Any]:
        """Return everything for the JSON file."""
        names = ("machine", "versions", "model", "rounds", "tuned", "partial")
        return {**{name: getattr(self, name) for name in names}, "lines": [line.as_dict() for line in self.lines]}


def line_id(contender: str, case: str, source: Source) -> str:
    """Return an id such as "longshore_load:direct_fresh@http", "ceiling_raw@file"."""
    return f"{contender}:{case}@{source}" if case else f"{contender}@{source}"


def lines_of(contenders: Iterable[Contender], sources: Sequence[Source]) -> list[Line]:
    """Return every line that these contenders have, source by source, in their order."""
    everyone = list(contenders)
    return [
        Line(contender.name, contender.title, case, source, contender.settings, contender.settings[0])
        for source in sources
        for contender in everyone
        for case in contender.cases
        if source in case.sources
    ]
