"""Logs of a whole cluster, with a Ray task per node: no dashboard is needed, and no coordinator.

    LogCollector.collect --read_logs, a task per node--> LogPieces --LineReader--> lines by time

Files of a node that is gone went with it. What Ray has rotated away is not looked for. Files of ended processes are: as
soon as a node has more than 200 files, Ray moves them to the folder `old` (`_close_all_files` of its log monitor).

The files that processes of ours log to on this node. Runs as a Ray task on every node; needs no Ray itself.

Ray sends what a worker process writes to `worker-<id>-<job>-<pid>.err` and `.out` in its session's folder, and begins
the files of an actor with a line that names its class.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config import Config
from cluster.errors import ClusterLost, ConfigError
from cluster.joining.connection import join_cluster
from cluster.joining.node_tasks import Node, living_nodes, on_every_node, why_no_answer
from cluster.joining.patience import HeadWatch, lost_after_s
from cluster.joining.ray_join import address_of
from cluster.joining.ray_private import logs_folder
from cluster.telemetry.stats import Jsonable
from storage.problems import without_secrets

KINDS = {"Coordinator": "coordinator", "NodeAgent": "agent", "GpuWorker": "worker"}  # by the actor's class
HEAD_BYTES = 16 << 10  # in which Ray names the class, after warnings that the process had before
OLD = "old"  # folder of files of ended processes, in the folder of logs
MOST_BYTES = 1 << 20  # of one file in one answer; of a file that is new to the reader, the last ones
MOST_NODE_BYTES = 16 << 20  # of all files of a node in one answer
_FILE = re.compile(r"worker-[0-9a-f]+-[0-9a-f]+-(?P<pid>\d+)\.(?:err|out)")
_CLASS = re.compile(rb"^:actor_name:(\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Whole lines of one file."""

    file: str  # its name
    kind: str  # "coordinator", "agent", "worker"
    pid: int
    lines: tuple[str, ...]  # without secrets, and without what Ray writes for itself
    end: int  # bytes of the file that have been read, to go on from
    read_bytes: int = 0  # for this


def read_logs(folder: str, seen: Mapping[str, int]) -> list[LogPiece]:
    """Return new contents of our processes' log files beyond `seen` (name -> bytes read).

    Raises OSError when the folder cannot be listed.
    """
    pieces: list[LogPiece] = []
    left_bytes = MOST_NODE_BYTES
    places = dict.fromkeys(os.listdir(folder), folder)
    with contextlib.suppress(OSError):
        places |= dict.fromkeys(os.listdir(os.path.join(folder, OLD)), os.path.join(folder, OLD))
    for name, place in sorted(places.items()):
        matched = _FILE.fullmatch(name)
        if matched is None:
            continue
        if left_bytes < MOST_BYTES:
            break
        try:
            piece = _read(os.path.join(place, name), name, int(matched["pid"]), seen.get(name))
        except OSError:  # gone since, or not ours to read
            continue
        if piece is not None:
            left_bytes -= piece.read_bytes
            pieces.append(piece)
    return pieces


def is_full(pieces: Iterable[LogPiece]) -> bool:
    """Return whether a node's answer was cut for size, so that it should be asked again."""
    return sum(piece.read_bytes for piece in pieces) > MOST_NODE_BYTES - MOST_BYTES


def _read(path: str, name: str, pid: int, seen: int | None) -> LogPiece | None:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if seen is not None and seen >= size:
            return None
        kind = KINDS.get(_class_of(file.read(HEAD_BYTES)), "")
        if not kind:
            return None
        start = max(0, size - MOST_BYTES) if seen is None else seen
        file.seek(start)
        data = file.read(MOST_BYTES)
    whole = data.rfind(b"\n") + 1
    if whole == 0 and len(data) == MOST_BYTES:
        whole = len(data)  # one line without an end
    lines = data[:whole].decode(errors="replace").splitlines()
    if seen is None and start > 0:
        lines = lines[1:]  # it began before
    kept = tuple(without_secrets(line) for line in lines if line and not line.startswith(":"))
    return LogPiece(name, kind, pid, kept, start + whole, len(data))


def _class_of(head: bytes) -> str:
    found = _CLASS.search(head)
    return found[1].decode() if found else ""


_VALUE = r"\"(?:[^\"\\]|\\.)*\"|[^\s\"=]+"  # as `cluster.telemetry.logs` writes it
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
    """The wanted log lines; None means any."""

    load: str | None = None  # or the beginning of its id
    rank: int | None = None

    def wants(self, process: LogProcess, load: str | None, rank: int | None) -> bool:
        """Return whether a line of that process with these fields is wanted. None: the line has no fields."""
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
            fields = json.loads(line)
        except ValueError:
            return None
        if not isinstance(fields, dict) or not isinstance(fields.get("time"), str):
            return None
        rank = fields.get("rank")
        load = fields.get("load")
        return fields["time"], load if isinstance(load, str) else None, rank if isinstance(rank, int) else None
    found = _TEXT.match(line)
    if found is None:
        return None
    fields = {match["name"]: match["value"] for match in _FIELD.finditer(found["fields"])}
    rank_text = fields.get("rank", "")
    return found["time"], fields.get("load"), int(rank_text) if rank_text.isdecimal() else None


def merged(lines: Iterable[LogLine]) -> list[LogLine]:
    """By time; lines of one process stay in their order."""
    return sorted(lines, key=lambda line: line.time)


MOST_ROUNDS = 64  # of answers, when there is more than one can hold
READ_S = 30.0  # a node's first task starts a Python process


class LogCollector:
    """Joins the cluster; each `collect` answers with what has been logged since the last one."""

    def __init__(self, address: str | None, wanted: LogFilter, host: str | None = None) -> None:
        """`host`: only of that node, by name, IP or the beginning of its Ray id. Raises ClusterLost."""
        self._ray, self._launch = join_cluster(address)
        patience_s = lost_after_s(Config.from_env().cluster_lost_after_s)
        self._head = HeadWatch(address_of(self._ray), patience_s)
        self._host = host
        self._reader = LineReader(wanted)
        self._seen: dict[str, int] = {}  # file -> bytes read; names are unique in a cluster
        self._heard = False  # there was a node to ask
        self.silent: dict[str, str] = {}  # host -> why the last collect had nothing of it

    def collect(self) -> list[LogLine]:
        """Lines by time. Raises ClusterLost when the head or the node that was named is gone, ConfigError for none."""
        self._head.wait()  # Ray's own calls do not come back without it
        nodes = [node for node in living_nodes(self._ray) if self._host is None or is_called(node, self._host)]
        if not nodes:
            if self._heard:
                raise ClusterLost("the node is gone, and its logs with it", node=self._host)
            raise ConfigError("no living node is called that", hint="`longshore status` lists hosts", node=self._host)
        self._heard = True
        self.silent = {}
        lines: list[LogLine] = []
        for _ in range(MOST_ROUNDS):
            found, nodes = self._round(nodes)
            lines += found
            if not nodes:
                break
        return merged(lines)

    def _round(self, nodes: Sequence[Node]) -> tuple[list[LogLine], list[Node]]:
        """Return the lines of one answer of each node, and the nodes to ask again: all that answered, if one has more.

        Nodes of one machine read the same files, and only the process's own node knows its name. So none is left out.
        """
        names: dict[tuple[str, int, str], LogProcess] = self._launch.processes()
        found: dict[str, tuple[Node, LogPiece]] = {}  # nodes of one machine may share the folder: each file once
        more = False
        answered = []
        for node, answer in on_every_node(self._ray, [(node, (self._seen,)) for node in nodes], read_here, READ_S):
            if isinstance(answer, BaseException):
                self.silent[node["NodeManagerHostname"]] = why_no_answer(answer)
                continue
            answered.append(node)
            more = more or is_full(answer)
            for piece in answer:
                if piece.file not in found or (node["NodeID"], piece.pid, piece.kind) in names:
                    found[piece.file] = node, piece
        lines: list[LogLine] = []
        for node, piece in found.values():
            self._seen[piece.file] = piece.end
            process = names.get((node["NodeID"], piece.pid, piece.kind))
            lines += self._reader.read(node["NodeManagerHostname"], piece, process)
        return lines, answered if more else []


def is_called(node: Node, name: str) -> bool:
    """Return whether `name` means this node of `ray.nodes()`."""
    return name in (node["NodeManagerHostname"], node["NodeManagerAddress"]) or (
        len(name) >= 6 and node["NodeID"].startswith(name)
    )


def read_here(seen: dict[str, int]) -> list[LogPiece]:
    """The task: on the node that it runs on."""
    return read_logs(logs_folder(), seen)
