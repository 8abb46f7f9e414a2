"""Processes by pid and start time, so that a reused pid is never taken for the former process. Also CPU usage.

Everything is read from Linux's /proc. A process is alive while any of its threads is. Its first thread may end and
become a zombie while others still write to the memory that the process maps. Names in these files are bytes, because
the kernel cuts titles at 15 bytes, even inside a character.
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
_ENDED = (b"Z", b"X", b"x")  # states of a thread that has ended: zombie, dead
_OURS = str(Path(__file__).resolve().parents[2])
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """The identity of one process on this host, unique until the host restarts."""

    pid: int
    start_time: int  # clock ticks from boot to the process's start: /proc/<pid>/stat field 22

    @classmethod
    def current(cls) -> ProcessId:
        """Return the calling process."""
        found = cls.of(os.getpid())
        if found is None:
            raise RuntimeError("/proc does not show the calling process")
        return found

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the process that has `pid` now; None if there is none or only its zombie is left.

        Raises OSError if the kernel does not report it.
        """
        start_time = _start_time(pid)
        return None if start_time is None else cls(pid, start_time)

    def is_alive(self) -> bool:
        """Return whether any thread of this process still runs or is stopped. True if the kernel does not report it."""
        try:
            return _start_time(self.pid) == self.start_time
        except OSError:
            return True

    def kill(self) -> bool:
        """Send SIGKILL if the pid still belongs to this process. Returns whether the signal was sent."""
        try:
            # The descriptor pins the process, so its pid cannot be reused between the check and the signal.
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


def pid_namespace() -> str:
    """Return the name of this machine's boot and of the PID namespace: processes that have it in common know pids."""
    boot = Path(_PROC, "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat(Path(_PROC, 'self/ns/pid')).st_ino}"


def _start_time(pid: int) -> int | None:
    """Return field 22 of /proc/<pid>/stat; None for a process without a living thread. Raises OSError."""
    process = _PROC / str(pid)
    try:
        state, start_time = _stat(process)
        lives = state not in _ENDED or _any_task(process, lambda task: _stat(task)[0] not in _ENDED)
    except _GONE:
        return None
    return start_time if lives else None


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent, or 0 if it has none. Raises OSError."""
    return int(_fields(_PROC / str(pid))[1])


def own_module(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment that run a module of this checkout in a child process.

    The child finds our packages even if its working folder has others of the same names.
    """
    path = os.pathsep.join(filter(None, (_OURS, os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-P", "-m", module, *arguments], {**os.environ, "PYTHONPATH": path}


def _stat(folder: Path) -> tuple[bytes, int]:
    """Return (state, start time) of the process or thread in that folder of /proc."""
    fields = _fields(folder)
    return fields[0], int(fields[19])


def _fields(folder: Path) -> list[bytes]:
    """Return the fields of the stat file of a process or thread, from the third on."""
    data = (folder / "stat").read_bytes()
    # Field 2 is the command's name in parentheses, which may itself contain spaces and parentheses.
    return data[data.rindex(b")") + 2 :].split()


def _any_task(process: Path, holds: Callable[[Path], bool]) -> bool:
    """Return whether `holds` is true for any thread. Raises what `holds` raises, except for threads that have ended."""
    while True:
        some_left = False
        for task in os.listdir(process / "task"):
            try:
                if holds(process / "task" / task):
                    return True
            except _GONE:
                some_left = True  # it may have started another thread before it ended
        if not some_left:
            return False


def processes_mapping(path: str | os.PathLike[str]) -> list[ProcessId]:
    """Return every process that maps the file at `path` now, including the caller, in pid order.

    Examines all processes of this pid namespace whose maps the caller may read: its own user's, or all for root. Raises
    OSError if the file does not exist or the kernel does not report it.
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
    """Return False if the process is dead or does not map the file at `path`; True if it does or that is unknown."""
    try:
        return process.is_alive() and _maps(_PROC / str(process.pid), _as_in_maps(path))
    except _GONE:
        return process.is_alive()
    except OSError:
        return True


def _as_in_maps(path: str | os.PathLike[str]) -> list[bytes]:
    """Return device and inode of a file in the form of /proc/PID/maps. Raises OSError if it does not exist."""
    info = os.stat(path)
    return [f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}".encode(), str(info.st_ino).encode()]


def _maps(process: Path, wanted: list[bytes]) -> bool:
    """Return whether the process maps the file with that device and inode. Raises OSError."""
    lines = _map_lines(process)
    if lines:
        return _names_file(lines, wanted)
    # The first thread has ended and shows no maps. Those of the other threads are the process's maps.
    return _any_task(process, lambda task: _names_file(_map_lines(task), wanted))


def _map_lines(folder: Path) -> list[bytes]:
    return (folder / "maps").read_bytes().split(b"\n")[:-1]


def _names_file(lines: list[bytes], wanted: list[bytes]) -> bool:
    # address perms offset dev inode [path]
    return any(line.split(maxsplit=5)[3:5] == wanted for line in lines)


class CpuClock:
    """A clock of CPU usage since it was created."""

    def __init__(self) -> None:
        self._process_s = time.process_time()
        self._ticks = _busy_and_all()

    def process_s(self) -> float:
        """Return the CPU seconds of all threads of this process since the clock was created."""
        return time.process_time() - self._process_s

    def host_busy(self) -> float:
        """Return the share of the host's CPU time that was used since then, 0 to 1; 0 if unknown."""
        busy, total = _busy_and_all()
        passed = total - self._ticks[1]
        return min(1.0, (busy - self._ticks[0]) / passed) if passed > 0 else 0.0


def usable_cpus() -> int:
    """Return the number of processors on which this process may run."""
    return len(os.sched_getaffinity(0))


def _busy_and_all() -> tuple[int, int]:
    """Return the clock ticks of all processors since the host's start: the busy ones, and all."""
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            ticks = [int(field) for field in lines.readline().split()[1:9]]  # user time includes guests
    except (OSError, ValueError):
        return 0, 0
    idle = sum(ticks[3:5])  # idle, and idle while waiting for a disk
    return sum(ticks) - idle, sum(ticks)
