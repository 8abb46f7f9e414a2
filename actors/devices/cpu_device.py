"""Host memory of the rank's own process as its device. It places with numpy, so a plain load needs no torch.

`SegmentMemory` takes fresh memory, or reuses memory that a former load of this process released:

    take(sizes) --> arrays --> tensors view them --> the last view is gone --> kept for the next take, or unmapped

Fresh pages can be the largest single cost of a load into host memory. Small pages cost 0.2 to 0.6 CPU s per GB, huge
ones 0.1. So pages are huge where that pays, and a worker that is kept warm keeps them. Memory is reused only when
nothing views it any more, so a tensor that user code has stored is never overwritten.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster.errors import DoesNotFit
from cluster.planning.plan import StagedTensor, TensorSlice
from cluster.planning.read_items import ReadItems
from storage.host.memory import advise_huge, populate

if TYPE_CHECKING:
    import torch


_BLOCK_BYTES = 2 << 20  # made present at once; the size of a huge page on all supported machines
_TRIAL_BLOCKS = 16
_SMALL_BYTES = 64 << 10  # a copy of fewer bytes takes less time than letting other threads run meanwhile
# CPU seconds for a block above which huge pages are too expensive: twice the cost of its 512 small pages. A huge page
# normally takes 0.2 ms.
_DEAR_S = 1e-3


class HugePages:
    """The choice between huge and small pages, by measurement.

    Huge pages are expensive where the kernel must first move memory to make room for one. When the first ones are
    expensive, as many blocks of small pages are tried, and the cheaper kind is kept. Small pages do not help where the
    cost comes not from the kernel but from a host that has reclaimed the memory.
    """

    def __init__(self) -> None:
        self.pay = hasattr(mmap, "MADV_HUGEPAGE")
        self._blocks = {True: 0, False: 0}  # by whether they were huge
        self._cpu_s = {True: 0.0, False: 0.0}

    def note(self, cpu_s: float, *, huge: bool) -> None:
        """Record the cost of a block. Two threads at once may lose a count, which is harmless."""
        if self._blocks[huge] >= _TRIAL_BLOCKS:
            return
        self._blocks[huge] += 1
        self._cpu_s[huge] += cpu_s
        if self._blocks[huge] < _TRIAL_BLOCKS:
            return
        if huge:
            self.pay = self._cpu_s[True] <= _DEAR_S * _TRIAL_BLOCKS
        else:
            self.pay = self._cpu_s[True] <= 2 * self._cpu_s[False]


class Segment:
    """Memory that chunks are copied to: a block of `SegmentMemory`, or somebody's tensor. Tensors view its `data`."""

    def __init__(self, data: NDArray[np.uint8], huge: HugePages | None) -> None:
        """`huge`: the choice of pages; None when the memory was used before, so that its pages are present."""
        self.data = data
        self._address = int(data.ctypes.data)
        self._origin = self._address % _BLOCK_BYTES  # of the first byte in its block
        self._huge = huge
        self._advised = False
        self._adding = threading.Lock()
        self.fresh_s = 0.0  # thread-seconds for which its pages were made present
        # 1 for each block that was not touched yet.
        self._absent = bytearray(b"\1" * (0 if huge is None else -(-(self._origin + len(data)) // _BLOCK_BYTES)))

    def touch(self, start: int, end: int) -> tuple[int, int]:
        """Map the pages of bytes `[start, end)`, which are about to be written, the first time. Thread-safe.

        Returns the bytes around them that need no other call.
        """
        if self._huge is None:
            return 0, len(self.data)
        first, after = (self._origin + start) // _BLOCK_BYTES, -(-(self._origin + end) // _BLOCK_BYTES)
        for block in range(first, after):
            if self._absent[block]:
                self._absent[block] = 0  # two threads at once may do it twice, which is harmless
                self._populate(block, self._huge)
        return first * _BLOCK_BYTES - self._origin, after * _BLOCK_BYTES - self._origin

    def _populate(self, block: int, huge: HugePages) -> None:
        if huge.pay != self._advised:
            self._advised = huge.pay
            advise_huge(self._address, len(self.data), huge=huge.pay)
        begin = max(0, block * _BLOCK_BYTES - self._origin)
        end = min(len(self.data), (block + 1) * _BLOCK_BYTES - self._origin)
        since_s, since_cpu_s = time.monotonic(), time.thread_time()
        populate(self._address + begin, end - begin)
        with self._adding:
            self.fresh_s += time.monotonic() - since_s
        if end - begin == _BLOCK_BYTES:
            huge.note(time.thread_time() - since_cpu_s, huge=self._advised)


class SegmentMemory:
    """The memory of one process. Thread-safe."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        """`most_bytes`: limit of the memory that is kept."""
        self._most_bytes = most_bytes
        self._taking = threading.Lock()
        self._keeps = False
        # Finalizers fill it. They may run while this thread holds a lock, so this field has none.
        self._kept: deque[mmap.mmap] = deque()

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for the next `take`."""
        return sum(len(memory) for memory in list(self._kept))

    def keep(self, keeps: bool) -> None:
        """Choose whether released memory is kept or unmapped. `keeps=False` also unmaps the memory kept so far."""
        self._keeps = keeps
        if not keeps:
            self._kept.clear()

    def take(self, sizes: Sequence[int]) -> list[Segment]:
        """Return segments of these sizes. Kept memory is used first, and the rest of it is unmapped. Raises OSError."""
        with self._taking:
            kept = sorted((self._kept.popleft() for _ in range(len(self._kept))), key=len)
            taken: dict[int, Segment] = {}
            huge = HugePages()
            for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # the largest first, from the largest
                taken[index] = self._segment(kept.pop() if kept else None, sizes[index], huge)
            return [taken[index] for index in range(len(sizes))]

    def _segment(self, memory: mmap.mmap | None, size: int, huge: HugePages) -> Segment:
        mapped_bytes = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        fresh = memory is None or len(memory) < mapped_bytes
        if memory is None:
            # Private memory is a fifth cheaper to touch than mmap's default, and is not counted as shared memory.
            memory = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        elif len(memory) != mapped_bytes:
            try:
                memory.resize(mapped_bytes)  # moves pages, not bytes
            except BufferError:  # another thread is just about to end the array that viewed it
                return self._segment(None, size, huge)
        data = np.frombuffer(memory, np.uint8, count=size)
        weakref.finalize(data, self._give_back, memory).atexit = False
        return Segment(data, huge if fresh else None)

    def _give_back(self, memory: mmap.mmap) -> None:
        """Keep or drop memory that nothing views any more."""
        if self._keeps and self.kept_bytes + len(memory) <= self._most_bytes:
            self._kept.append(memory)


PROCESS_MEMORY = SegmentMemory()


def copy_runs(
    target: memoryview,
    begin: int,
    stride: int,
    chunk: memoryview,
    source: int,
    source_stride: int,
    run: int,
    count: int,
) -> None:
    """Copy `count` runs of `run` bytes from a chunk, `source_stride` apart from byte `source`, to the target."""
    if count == 1 and run < _SMALL_BYTES:
        target[begin : begin + run] = chunk[source : source + run]
        return
    # numpy lets other threads run while it copies.
    written: NDArray[np.uint8] = np.ndarray((count, run), np.uint8, target, begin, (stride, 1))
    np.copyto(written, np.ndarray((count, run), np.uint8, chunk, source, (source_stride, 1)))


def place_items(segment_of: Callable[[int], Segment], chunk: memoryview, items: ReadItems, rows: slice) -> None:
    """Copy the read items `rows` out of a chunk to their segments."""
    current, data = -1, memoryview(b"")  # the segment of the row before
    ready, ready_end = 0, -1  # its bytes that may be written
    for number, source, begin, run, count, source_stride, stride in items.copies(rows):
        end = begin + (count - 1) * stride + run
        if number != current:
            segment = segment_of(number)
            current, data, ready_end = number, segment.data.data, -1
        if begin < ready or end > ready_end:
            ready, ready_end = segment.touch(begin, end)
        copy_runs(data, begin, stride, chunk, source, source_stride, run, count)


class CpuDevice:
    """Host memory of this process, as a `Device`."""

    name = "cpu"
    receives = True

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._staged: dict[int, Segment] = {}  # memory of tensors that are still to be converted, by segment
        self._staging = SegmentMemory()  # so that each of them reuses the memory of the one before

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        try:
            self._segments = PROCESS_MEMORY.take(segment_bytes)
        except OSError as error:
            raise DoesNotFit(
                "the rank's host memory could not be taken", need_bytes=sum(segment_bytes), cause=str(error)
            ) from error

    @property
    def fresh_s(self) -> float:
        return sum(segment.fresh_s for segment in self._segments)

    @property
    def held_bytes(self) -> int:
        return sum(len(segment.data) for segment in (*self._segments, *self._staged.values()))

    def attach_arena(self, arena: memoryview, slot_bytes: int) -> None:
        pass

    def detach_arena(self) -> None:
        self._staging.keep(False)

    def stage(self, staged: StagedTensor) -> None:
        source = staged.source
        self._staging.keep(True)
        try:
            (segment,) = self._staging.take((source.size_bytes,))
        except OSError as error:
            raise DoesNotFit(
                "memory for a tensor that is to be converted could not be taken",
                need_bytes=source.size_bytes,
                tensor=source.name,
                cause=str(error),
            ) from error
        segment.data[source.filled_bytes :] = 0  # padding; the memory may hold bytes of another tensor
        self._staged[source.segment] = segment

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        import torch

        from actors.devices.convert import convert

        made = []
        for piece in slices:
            segment, end = self._segments[piece.segment], piece.segment_offset + piece.size_bytes
            segment.touch(piece.segment_offset, end)
            made.append(torch.from_numpy(segment.data)[piece.segment_offset : end])
        source = self._staged.pop(staged.source.segment)
        convert(staged, torch.from_numpy(source.data), slices, made)

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        place_items(self._segment, chunk, items, rows)

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        parts = []
        for row in range(rows.start, rows.stop):
            segment, begin = self._segments[items.segment[row]], int(items.dest_offset[row])
            end = begin + int(items.run_bytes[row])
            segment.touch(begin, end)
            parts.append(segment.data[begin:end].data)
        return parts

    def synchronize(self) -> None:
        pass

    def quiesce(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def view(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Return so many bytes of a segment."""
        return self._segments[segment].data[offset : offset + size_bytes].data

    def tensors(self, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
        import torch

        from actors.devices.convert import tensor_views

        return tensor_views([torch.from_numpy(segment.data) for segment in self._segments], slices)

    def free(self) -> None:
        self._segments = []
        self._staged = {}
        self._staging.keep(False)

    def _segment(self, number: int) -> Segment:
        return self._segments[number] if number < len(self._segments) else self._staged[number]
