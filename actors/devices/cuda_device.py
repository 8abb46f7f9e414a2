"""A GPU as a rank's memory, and as the place that readers copy to. Only this module and `tests/gpu` call CUDA."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from actors.devices.convert import convert, tensor_views
from cluster.errors import DeviceUnavailable, DoesNotFit
from cluster.planning.plan import StagedTensor, TensorSlice
from cluster.planning.read_items import ReadItems

PORTABLE = 1  # cudaHostRegisterPortable
ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
# Of the arena, registered at a time. Pages that the process has not touched take 0.3 s/GB, the others 0.03 s/GB (H100
# machine, 2026-11-26), so an arena is not registered beyond what a load uses.
PIN_BYTES = 64 << 20
STAGING_BYTES = 32 << 20  # of pinned memory, of which a reader has two


def free_memory() -> list[tuple[int, int]]:
    """Return (free, total) bytes of each GPU that this process sees."""
    return [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]


class CudaDevice:
    """The GPU that Ray gave this process. The arena is registered as pinned memory, block by block as it is used, and
    copies are asynchronous.

    Strided items go through a staging block on the device. The DMA engine makes one contiguous transfer, then the
    device makes a strided copy. Both are on one stream, so the block is free again when the next transfer begins.
    """

    receives = False
    fresh_s = 0.0

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailable(
                "this worker was given a GPU that torch cannot use",
                hint="check the driver and that torch is a CUDA build (longshore doctor shows both)",
                torch=torch.__version__,
            )
        self.name = f"cuda:{index}"
        # No other index is ever used, because a context on another GPU would take memory there.
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._segments: list[torch.Tensor] = []
        self._staging: torch.Tensor | None = None
        self._staged: dict[int, torch.Tensor] = {}  # tensors that are still to be converted, by segment
        self._arena_address = self._arena_bytes = 0
        self._block_bytes = 0  # whole slots of the arena; 0: it is not registered, or cannot be
        self._pinned: dict[int, int] = {}  # of each block that was looked at: its address, or 0 if another pinned it

    @property
    def held_bytes(self) -> int:
        return sum(len(memory) for memory in (*self._segments, *self._staged.values()))

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        with self._room("the rank's device memory could not be taken", sum(segment_bytes)):
            self._segments = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in segment_bytes]
            # Kernels launched earlier may still write to memory that this process used before.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def attach_arena(self, arena: memoryview, slot_bytes: int) -> None:
        self._arena_address, self._arena_bytes = np.frombuffer(arena, np.uint8).ctypes.data, len(arena)
        self._block_bytes = max(1, PIN_BYTES // slot_bytes) * slot_bytes

    def detach_arena(self) -> None:
        self.synchronize()
        with torch.cuda.device(self._device):
            for address in filter(None, self._pinned.values()):
                self._cudart().cudaHostUnregister(address)
        self._pinned, self._block_bytes = {}, 0
        self._staging = None
        torch.cuda.empty_cache()  # no tensor uses the staging memory

    def _pin(self, address: int) -> None:
        """Register the block of the arena that has this address. Without that copies are only slower."""
        block = (address - self._arena_address) // self._block_bytes
        if block in self._pinned:
            return
        start = block * self._block_bytes
        size = min(self._block_bytes, self._arena_bytes - start)
        with torch.cuda.device(self._device):  # the calling thread's device may be another
            # Portable means pinned for every GPU of the process.
            error = int(self._cudart().cudaHostRegister(self._arena_address + start, size, PORTABLE))
            self._pinned[block] = 0 if error else self._arena_address + start
            if error:
                with contextlib.suppress(RuntimeError):  # CUDA reports the kept error at the next kernel launch
                    torch.zeros(1, device=self._device).add_(1)
                if error != ALREADY_REGISTERED:  # as by another GPU of this process
                    self._block_bytes = 0

    def stage(self, staged: StagedTensor) -> None:
        source = staged.source
        problem = "memory for a tensor that is to be converted could not be taken"
        # Allocated on the stream that copies and converts, so released memory is reused in the order of its work.
        with self._room(problem, source.size_bytes, tensor=source.name), torch.cuda.stream(self._stream):
            data = torch.empty(source.size_bytes, dtype=torch.uint8, device=self._device)
            data[source.filled_bytes :].zero_()
        self._staged[source.segment] = data

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        source = self._staged.pop(staged.source.segment)
        made = [
            self._segments[piece.segment][piece.segment_offset : piece.segment_offset + piece.size_bytes]
            for piece in slices
        ]
        problem = "there is no memory to convert a tensor in"
        with self._room(problem, None, tensor=staged.source.name), torch.cuda.stream(self._stream):
            convert(staged, source, slices, made)

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        source = torch.frombuffer(chunk, dtype=torch.uint8)
        if self._block_bytes:
            self._pin(source.data_ptr())
        with torch.cuda.stream(self._stream):
            staged = None
            for row in range(rows.start, rows.stop):
                run, count = int(items.run_bytes[row]), int(items.count[row])
                begin, dest = int(items.src_offset[row]), int(items.dest_offset[row])
                number = int(items.segment[row])
                segment = self._segments[number] if number < len(self._segments) else self._staged[number]
                if count == 1:
                    segment[dest : dest + run].copy_(source[begin : begin + run], non_blocking=True)
                    continue
                if staged is None:
                    staged = self._stage(source)
                target = segment.as_strided((count, run), (int(items.dest_stride[row]), 1), dest)
                target.copy_(staged.as_strided((count, run), (int(items.src_stride[row]), 1), begin))

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        raise DeviceUnavailable("a socket cannot write to the memory of a GPU", device=self.name)

    @contextlib.contextmanager
    def _room(self, problem: str, need_bytes: int | None, **details: str) -> Iterator[None]:
        """Raise DoesNotFit with the problem when torch runs out of memory in the block."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise DoesNotFit(problem, need_bytes=need_bytes, free_bytes=free, total_bytes=total, **details) from error

    def _cudart(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def _stage(self, source: torch.Tensor) -> torch.Tensor:
        if self._staging is None or len(self._staging) < len(source):
            with self._room("memory to copy chunks through could not be taken", len(source)):
                self._staging = torch.empty(len(source), dtype=torch.uint8, device=self._device)
        staged = self._staging[: len(source)]
        staged.copy_(source, non_blocking=True)
        return staged

    def synchronize(self) -> None:
        self._stream.synchronize()

    def quiesce(self) -> None:
        torch.cuda.synchronize(self._device)

    def finish(self) -> None:
        pass

    def tensors(self, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
        return tensor_views(self._segments, slices)

    def free(self) -> None:
        try:
            self.detach_arena()
        finally:
            self._segments = []
            self._staged = {}
        torch.cuda.empty_cache()  # torch keeps freed memory for itself, and this process may live on


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def boxes(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Divide a tensor of at least one dimension into boxes of at most so many elements, in row-major order."""
    row = math.prod(shape[1:])
    if row > most:
        for index in range(shape[0]):
            for offsets, sizes in boxes(shape[1:], most):
                yield (index, *offsets), (1, *sizes)
        return
    rows = most // max(1, row)
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])


class PinnedStaging:
    """Pinned host memory through which a reader's tensors go to a GPU: one block is filled while another is copied."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[torch.Tensor] = []

    def copy(self, target: torch.Tensor, fill: Callable[[Sequence[int], torch.Tensor], object]) -> None:
        """Fill a contiguous tensor of at least one dimension. It has its bytes when this returns.

        `fill(offsets, host)` reads the box with these offsets and the shape of `host` into `host`.
        """
        pinned, flat, done = target.is_cuda, target.view(-1), 0
        copies: list[torch.cuda.Event | None] = [None, None]  # out of each block
        with self._lock:
            if not self._blocks:
                self._blocks = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in copies]
            try:
                for number, (offsets, sizes) in enumerate(boxes(target.shape, STAGING_BYTES // target.itemsize)):
                    _wait(copies[number % 2])
                    count = math.prod(sizes)
                    host = self._blocks[number % 2][: count * target.itemsize].view(target.dtype)
                    fill(offsets, host.view(sizes))
                    flat[done : done + count].copy_(host, non_blocking=True)
                    done += count
                    copies[number % 2] = torch.cuda.current_stream(target.device).record_event() if pinned else None
            finally:
                for copied in copies:
                    _wait(copied)

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._blocks = []


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
