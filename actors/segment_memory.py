"""Host memory for tensors on CPU: taken fresh, or again from what a former load of this process has let go.

    take(sizes) --> arrays --> tensors view them --> the last view is gone --> kept for the next take, or unmapped

Fresh pages are the largest single cost of a load into host memory (0.4 to 0.6 CPU s per GB, more than the network and
the digest together), so a worker that is kept warm keeps them. Memory comes back only when nothing views it any more:
a tensor that somebody has stored away is never written again.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from storage.paging import populate

_BLOCK_BYTES = 1 << 20  # so much is made present at once: as much as is written next, while it is warm


class Segment:
    """One block of private memory. `data` is what tensors view."""

    def __init__(self, data: NDArray[np.uint8], *, fresh: bool) -> None:
        self.data = data
        self._address = int(data.ctypes.data)
        # Blocks that nobody touched yet; none when the memory was used before.
        self._absent = bytearray(b"\1" * (-(-len(data) // _BLOCK_BYTES) if fresh else 0))

    def touch(self, start: int, end: int) -> None:
        """The bytes `[start, end)` are about to be written: map their pages, the first time. Thread-safe."""
        if not self._absent:
            return
        for block in range(start // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
            if self._absent[block]:
                self._absent[block] = 0  # two threads here at once do it twice, which changes nothing
                begin = block * _BLOCK_BYTES
                populate(self._address + begin, min(_BLOCK_BYTES, len(self.data) - begin))


class SegmentMemory:
    """The memory of one process. Thread-safe."""

    def __init__(self) -> None:
        self._taking = threading.Lock()
        self._keeps = False
        # Filled by finalizers, which run anywhere, also where this thread holds a lock: so without one.
        self._kept: deque[mmap.mmap] = deque()

    @property
    def kept_bytes(self) -> int:
        """What is kept and in nobody's use."""
        return sum(len(memory) for memory in list(self._kept))

    def keep(self, keeps: bool) -> None:
        """From now on keep what is let go, or unmap it; what is kept goes with `keeps=False`."""
        self._keeps = keeps
        if not keeps:
            self._kept.clear()

    def take(self, sizes: Sequence[int]) -> list[Segment]:
        """Segments of these sizes. What was kept is used first, and what is left of it unmapped. Raises OSError."""
        with self._taking:
            kept = sorted((self._kept.popleft() for _ in range(len(self._kept))), key=len)
            taken: dict[int, Segment] = {}
            for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # the largest first, from the largest
                taken[index] = self._segment(kept.pop() if kept else None, sizes[index])
            return [taken[index] for index in range(len(sizes))]

    def _segment(self, memory: mmap.mmap | None, size: int) -> Segment:
        mapped_bytes = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        fresh = memory is None or len(memory) < mapped_bytes
        if memory is None:
            # Private: a fifth cheaper to touch than mmap's default, and not counted as shared memory.
            memory = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        elif len(memory) != mapped_bytes:
            memory.resize(mapped_bytes)  # moves pages, not bytes
        data = np.frombuffer(memory, np.uint8, count=size)
        weakref.finalize(data, self._let_go, memory).atexit = False
        return Segment(data, fresh=fresh)

    def _let_go(self, memory: mmap.mmap) -> None:
        """Nothing views it any more."""
        if self._keeps:
            self._kept.append(memory)


PROCESS_MEMORY = SegmentMemory()
