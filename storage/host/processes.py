"""Processes by pid and start time, so that a reused pid is never taken for the process that had it.

Also how busy the processors of this host are.

Read from Linux's /proc. A process is alive while any of its threads is: the first one may end, and is a zombie then,
while others still write to the memory that the process maps. Names in these files are bytes: a title is cut at 15 of
them, in the middle of a character as well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_ENDED = (b"Z", b"X", b"x")  # states of a thread that runs no more: zombie, dead
_OURS = str(Path(__file__).resolve().parents[2])
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process of this host, for as long as the host is up."""

    pid: int
    start_time: int  # clock ticks from boot to the process's start: /proc/<pid>/stat field 22

    @classmethod
    def current(cls) -> ProcessId:
        """The calling process."""
        found = cls.of(os.getpid())
        if found is None:
            raise RuntimeError("/proc does not show the calling process")
        return found

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has `pid` now; None when there is none or only its zombie is left.

        Raises OSError when the kernel does not say.
        """
        start_time = _start_time(pid)
        return None if start_time is None else cls(pid, start_time)

    def is_alive(self) -> bool:
        """Whether any thread of this very process still runs, or is stopped. True also when the kernel does not say."""
        try:
            return _start_time(self.pid) == self.start_time
        except OSError:
            return True

    def kill(self) -> bool:
        """SIGKILL, if the pid still belongs to this process. True when the signal was sent."""
        try:
            # The descriptor pins the process: between the check and the signal its pid cannot be given away.
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def _start_time(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat, or None for a process without a living thread. Raises OSError."""
    process = _PROC / str(pid)
    try:
        state, start_time = _stat(process)
        lives = state not in _ENDED or _any_task(process, lambda task: _stat(task)[0] not in _ENDED)
    except _GONE:
        return None
    return start_time if lives else None


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent, 0 where it has none. Raises OSError."""
    return int(_fields(_PROC / str(pid))[1])


def own_module(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment that run a module of this checkout in a child process.

    No folder that the child happens to run in shadows our packages there.
    """
    path = os.pathsep.join(filter(None, (_OURS, os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-P", "-m", module, *arguments], {**os.environ, "PYTHONPATH": path}


def _stat(folder: Path) -> tuple[bytes, int]:
    """(state, start time) of the process or thread in that folder."""
    fields = _fields(folder)
    return fields[0], int(fields[19])


def _fields(folder: Path) -> list[bytes]:
    """Return the fields of a process or thread from the third on."""
    data = (folder / "stat").read_bytes()
    # Field 2 is the command's name in parentheses and may itself hold spaces and parentheses.
    return data[data.rindex(b")") + 2 :].split()


def _any_task(process: Path, holds: Callable[[Path], bool]) -> bool:
    """Whether it holds of any of the process's threads. Raises what `holds` does, but for threads that are gone."""
    while True:
        some_left = False
        for task in os.listdir(process / "task"):
            try:
                if holds(process / "task" / task):
                    return True
            except _GONE:
                some_left = True  # it may have started another one before
        if not some_left:
            return False


def processes_mapping(path: str | os.PathLike[str]) -> list[ProcessId]:
    """Every process that maps the file at `path` now, the calling one included, in pid order.

    Looks at all processes of this pid namespace whose maps may be read: one's own user's, or all for root. Raises
    OSError when there is no such file, or when the kernel does not say.
    """
    wanted = _as_in_maps(path)
    found = []
    for entry in sorted(int(name) for name in os.listdir(_PROC) if name.isdigit()):
        try:
            process = ProcessId.of(entry)
            if process is not None and _maps(_PROC / str(entry), wanted):
                found.append(process)
        except (*_GONE, PermissionError):
            pass
    return found


def may_map(process: ProcessId, path: str | os.PathLike[str]) -> bool:
    """Return False when the process is dead or does not map the file at `path`; True when it does or nobody can say."""
    try:
        return process.is_alive() and _maps(_PROC / str(process.pid), _as_in_maps(path))
    except _GONE:
        return process.is_alive()
    except OSError:
        return True


def _as_in_maps(path: str | os.PathLike[str]) -> list[bytes]:
    """Return device and inode of a file as /proc/PID/maps has them. Raises OSError when there is no such file."""
    info = os.stat(path)
    return [f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}".encode(), str(info.st_ino).encode()]


def _maps(process: Path, wanted: list[bytes]) -> bool:
    """Whether the process maps the file with that device and inode. Raises OSError."""
    lines = _map_lines(process)
    if lines:
        return _names_file(lines, wanted)
    # Its first thread has ended, and shows no maps; those of the others are the process's.
    return _any_task(process, lambda task: _names_file(_map_lines(task), wanted))


def _map_lines(folder: Path) -> list[bytes]:
    return (folder / "maps").read_bytes().split(b"\n")[:-1]


def _names_file(lines: list[bytes], wanted: list[bytes]) -> bool:
    # address perms offset dev inode [path]
    return any(line.split(maxsplit=5)[3:5] == wanted for line in lines)


class CpuClock:
    """Starts now."""

    def __init__(self) -> None:
        self._process_s = time.process_time()
        self._ticks = _busy_and_all()

    def process_s(self) -> float:
        """Processor seconds of all threads of this process since the start."""
        return time.process_time() - self._process_s

    def host_busy(self) -> float:
        """The part of all the host's processor time since the start that anybody used, 0 to 1; 0 when unknown."""
        busy, total = _busy_and_all()
        passed = total - self._ticks[1]
        return min(1.0, (busy - self._ticks[0]) / passed) if passed > 0 else 0.0


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def _busy_and_all() -> tuple[int, int]:
    """Clock ticks of all processors since the host's start: used by anybody, and all."""
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            ticks = [int(field) for field in lines.readline().split()[1:9]]  # guests are in user time already
    except (OSError, ValueError):
        return 0, 0
    idle = sum(ticks[3:5])  # idle, and idle while a disk is waited for
    return sum(ticks) - idle, sum(ticks)
