"""The files that processes of ours log to on this node. Runs as a Ray task on every node; needs no Ray itself.

Ray sends what a worker process writes to `worker-<id>-<job>-<pid>.err` and `.out` in its session's folder, and begins
the files of an actor with a line that names its class.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.problems import without_secrets

KINDS = {"Coordinator": "coordinator", "NodeAgent": "agent", "GpuWorker": "worker"}  # by the actor's class
HEAD_BYTES = 1024  # in which Ray names the class
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
    """What files of our processes have beyond `seen` (name -> bytes read); files without anything new are left out.

    Raises OSError when the folder cannot be listed.
    """
    pieces: list[LogPiece] = []
    left_bytes = MOST_NODE_BYTES
    for name in sorted(os.listdir(folder)):
        matched = _FILE.fullmatch(name)
        if matched is None:
            continue
        if left_bytes < MOST_BYTES:
            break
        try:
            piece = _read(os.path.join(folder, name), name, int(matched["pid"]), seen.get(name))
        except OSError:  # gone since, or not ours to read
            continue
        if piece is not None:
            left_bytes -= piece.read_bytes
            pieces.append(piece)
    return pieces


def is_full(pieces: Iterable[LogPiece]) -> bool:
    """Whether a node's answer had no room for more: it is to be asked again."""
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
