"""How busy this host's processors are, and how much of that is this process. From the counters of Linux."""

from __future__ import annotations

import os
import time


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
