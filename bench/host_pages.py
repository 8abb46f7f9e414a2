"""Pages of a virtual machine that its host has taken back are fetched before the clock starts, for every contender.

Many hosts take free memory away from their guests (free page reporting, balloons). The first write to such a page then
costs a fault in the host, some 3 CPU s per GB, and who pays is chance: whoever runs right after a process that has
freed its memory finds it still there. A short-lived process that touches as much memory as a load needs makes that
the same for all. Pages are fresh all the same: the guest's kernel maps and clears each of them for who takes it.
"""

from __future__ import annotations

import subprocess
import sys

import psutil

_SPARE_BYTES = 1 << 30  # for what else runs
_TOUCH = """
import mmap, sys
kept = []
for huge in (True, False):  # the kernel keeps what was freed of either kind apart for a while
    memory = mmap.mmap(-1, int(sys.argv[1]) // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    kept.append(memory)
"""


def fetch_host_pages(size_bytes: int) -> None:
    """Touch and free `size_bytes`, or what there is: half of it in huge pages, half in small ones."""
    size_bytes = min(size_bytes, psutil.virtual_memory().available - _SPARE_BYTES)
    if size_bytes > 0:
        subprocess.run([sys.executable, "-S", "-c", _TOUCH, str(size_bytes)], check=False)
