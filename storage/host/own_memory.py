"""Memory that a process has to itself, cheaply: what it holds apart from shared memory, now and at its highest.

Private pages and mapped files (libraries), from the kernel's counters: some 15 microseconds, whatever the size. The
proportional set size says it a little better (a library's pages are divided by those who map them) but walks the page
tables for it: 15 to 20 ms of CPU per mapped GB, with the address space locked. So this is what is sampled while bytes
stream, and a slight overestimate. The kernel's own high-water mark counts the arena in, which many processes share.
"""

from __future__ import annotations

import contextlib


def own_bytes(pid: int | None = None) -> int:
    """Resident memory apart from shared memory; of the calling process when `pid` is None. 0 where nothing tells."""
    total = 0
    try:
        with open(f"/proc/{'self' if pid is None else pid}/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(("RssAnon:", "RssFile:")):
                    total += int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    return total


def high_water_bytes() -> int:
    """The most that the calling process ever held, shared memory included, since `reset_high_water`; 0 if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def reset_high_water() -> None:
    """Where the kernel does not allow it, the mark is of the process's whole life."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as mark:
        mark.write("5")


class PeakMemory:
    """The calling process's memory since now. `kept_bytes` of it, to be reused or given back, are not counted before
    the first `sample`.
    """

    def __init__(self, kept_bytes: int = 0) -> None:
        self.baseline_bytes = self.peak_bytes = max(0, own_bytes() - kept_bytes)

    def sample(self) -> None:
        """Look now. Whoever wants the peak of something calls this while it goes on."""
        self.peak_bytes = max(self.peak_bytes, own_bytes())
