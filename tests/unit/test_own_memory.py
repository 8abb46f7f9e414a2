"""A process's own memory, against pages that this test takes."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from storage.host.memory import PeakMemory, high_water_bytes, own_bytes, reset_high_water

MIB = 1 << 20
SLACK = 8 * MIB  # what the interpreter itself may take or give back meanwhile


def touched(size_bytes: int, flags: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, flags=flags)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


def test_private_memory_counts_and_shared_memory_does_not():
    before = own_bytes()
    assert before > MIB
    private = touched(64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert abs(own_bytes() - before - 64 * MIB) < SLACK
    shared = touched(64 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    assert abs(own_bytes() - before - 64 * MIB) < SLACK
    private.close()
    shared.close()
    assert abs(own_bytes() - before) < SLACK


def test_memory_of_other_and_of_missing_processes():
    assert own_bytes(os.getpid()) > MIB
    assert own_bytes(2**22 + 1) == 0


def test_the_peak_ignores_memory_kept_from_earlier_loads():
    memory = PeakMemory()
    block = touched(64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.sample()
    block.close()
    memory.sample()
    assert abs(memory.peak_bytes - memory.baseline_bytes - 64 * MIB) < SLACK
    assert abs(PeakMemory(kept_bytes=MIB).baseline_bytes - (own_bytes() - MIB)) < SLACK
    assert PeakMemory(kept_bytes=1 << 50).baseline_bytes == 0
    kept = touched(64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = PeakMemory(kept_bytes=len(kept))
    kept.close()  # given back before the load began: no part of its peak
    memory.sample()
    assert memory.peak_bytes - memory.baseline_bytes < SLACK


def test_the_high_water_mark_starts_anew():
    touched(64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    assert high_water_bytes() >= own_bytes() - SLACK
    if os.access("/proc/self/clear_refs", os.W_OK):
        reset_high_water()
        now = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        assert abs(high_water_bytes() - now) < SLACK
        touched(64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        assert high_water_bytes() - now > 64 * MIB - SLACK
