"""Processes by pid *and* start time, so that a reused pid is never taken for the process that had it.

Read from Linux's /proc. A zombie counts as dead: its threads are gone and its mappings with them.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


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
        """The process that has `pid` now; None when there is none or only its zombie is left."""
        start_time = _start_time(pid)
        return None if start_time is None else cls(pid, start_time)

    def is_alive(self) -> bool:
        """Whether this very process still runs (or is stopped); a zombie does not."""
        return _start_time(self.pid) == self.start_time

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
    """Field 22 of /proc/<pid>/stat, or None for a process that is gone or a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # Field 2 is the command's name in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def processes_mapping(path: str | os.PathLike[str]) -> list[ProcessId]:
    """Every process that maps the file at `path` now, the calling one included, in pid order.

    Looks at all processes of this pid namespace whose maps may be read: one's own user's, or all for root.
    """
    info = os.stat(path)
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    wanted = (device, str(info.st_ino))
    found = []
    for entry in sorted(int(name) for name in os.listdir(_PROC) if name.isdigit()):
        process = ProcessId.of(entry)
        if process is not None and _maps(entry, wanted):
            found.append(process)
    return found


def _maps(pid: int, wanted: tuple[str, str]) -> bool:
    try:
        with open(_PROC / str(pid) / "maps", encoding="utf-8", errors="replace") as lines:
            # address perms offset dev inode [path]
            return any(tuple(line.split(maxsplit=5)[3:5]) == wanted for line in lines)
    except OSError:
        return False
