"""Which lines of which process are wanted, in the order of their times. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.process_logs.log_files import LogPiece
from cluster.reports.rank_report import Jsonable

_VALUE = r"\"(?:[^\"\\]|\\.)*\"|[^\s\"=]+"  # as `cluster.logs` writes it
_TEXT = re.compile(rf"(?P<time>\d{{4}}-\d\d-\d\dT[\d:.]+Z) [A-Z]+ [^\s:]+(?P<fields>(?: \w+=(?:{_VALUE}))*): ")
_FIELD = re.compile(rf" (?P<name>\w+)=(?P<value>{_VALUE})")


@dataclass(frozen=True, slots=True)
class LogProcess:
    """A process of ours, by its actor's name."""

    kind: str  # "coordinator", "agent", "worker"
    load: str = ""  # of a worker: the first load that it served
    rank: int | None = None
    incarnation: int = 0

    @property
    def label(self) -> str:
        """`rank 3`, `rank 3 (worker 2)` for a replacement."""
        if self.rank is None:
            return self.kind
        return f"rank {self.rank}" + (f" (worker {self.incarnation + 1})" if self.incarnation else "")


@dataclass(frozen=True, slots=True)
class LogLine(Jsonable):
    """One line, and who wrote it."""

    time: str  # UTC, as in the line; of a line without one, that of the line before; empty when there is none
    host: str
    process: str
    pid: int
    text: str


@dataclass(frozen=True, slots=True)
class LogFilter:
    """What is wanted; None: anything."""

    load: str | None = None  # or the beginning of its id
    rank: int | None = None

    def wants(self, process: LogProcess, load: str | None, rank: int | None) -> bool:
        """Of a line with these fields (None: it has none), written by that process."""
        whose = load or (process.load if process.kind == "worker" else None)
        which = rank if rank is not None else process.rank
        return (self.load is None or (whose or "").startswith(self.load)) and self.rank in (None, which)


class LineReader:
    """Reads pieces one after the other. A line without fields of its own goes with the one before it: a traceback."""

    def __init__(self, wanted: LogFilter) -> None:
        self._wanted = wanted
        self._last: dict[str, tuple[str, str | None, int | None]] = {}  # file -> what its last line was about

    def read(self, host: str, piece: LogPiece, process: LogProcess | None) -> list[LogLine]:
        """Lines that are wanted. `process`: whose file it is; None when Ray does not know (any more)."""
        label = process.label if process is not None else f"earlier {piece.kind}"
        lines = []
        for text in piece.lines:
            about = fields_of(text) or self._last.get(piece.file, ("", None, None))
            self._last[piece.file] = about
            time, load, rank = about
            if self._wanted.wants(process or LogProcess(piece.kind), load, rank):
                lines.append(LogLine(time, host, label, piece.pid, text))
        return lines


def fields_of(line: str) -> tuple[str, str | None, int | None] | None:
    """(time, load, rank) of a line of our loggers, text or JSON; None for any other."""
    if line.startswith("{"):
        try:
            said = json.loads(line)
        except ValueError:
            return None
        if not isinstance(said, dict) or not isinstance(said.get("time"), str):
            return None
        rank = said.get("rank")
        load = said.get("load")
        return said["time"], load if isinstance(load, str) else None, rank if isinstance(rank, int) else None
    found = _TEXT.match(line)
    if found is None:
        return None
    fields = {match["name"]: match["value"] for match in _FIELD.finditer(found["fields"])}
    rank_text = fields.get("rank", "")
    return found["time"], fields.get("load"), int(rank_text) if rank_text.isdecimal() else None


def merged(lines: Iterable[LogLine]) -> list[LogLine]:
    """By time; lines of one process stay in their order."""
    return sorted(lines, key=lambda line: line.time)
