"""Where a rank's tensors live: memory for the segments, and 2-D copies into it.

A device allocates exactly the plan's segments, once. `place` copies the read items of one chunk out of an arena slot;
`synchronize` returns when those copies no longer read the slot. Tensors are views into the segments, which they keep
alive: memory that was handed out is never written again.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.errors import DeviceUnavailable, DoesNotFit
from cluster.load_plan import TensorSlice
from cluster.read_items import ReadItems
from storage.dtypes import tensor_bytes

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """One rank's memory."""

    name: str  # "cpu" or "cuda:0"

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        """Take the memory. Raises DoesNotFit."""
        ...

    def attach_arena(self, arena: memoryview) -> None:
        """Told once about the mapped arena that `place` will read from."""
        ...

    def detach_arena(self) -> None:
        """The arena is about to be unmapped."""
        ...

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        """Copy the read items `rows` out of `chunk` (all its bytes). May return before the copy is done."""
        ...

    def synchronize(self) -> None:
        """Return when no copy reads a chunk any more."""
        ...

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        """The rank's tensors by name: views into the segments."""
        ...

    def free(self) -> None:
        """Let go of the memory; it returns to the system when no tensor views it any more. Idempotent."""
        ...


class CpuDevice:
    """Host memory of the rank's own process. Copies with numpy, so placing needs no torch."""

    name = "cpu"

    def __init__(self) -> None:
        self._segments: list[NDArray[np.uint8]] = []

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        try:
            # Anonymous maps are page-aligned and go back to the system at once when the last view of them is gone.
            # Private ones: a fifth cheaper to touch than mmap's default, and not counted as shared memory.
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._segments = [
                np.frombuffer(mmap.mmap(-1, max(size, 1), flags=private), np.uint8, count=size)
                for size in segment_bytes
            ]
        except OSError as error:
            raise DoesNotFit(
                "the rank's host memory could not be taken", need_bytes=sum(segment_bytes), cause=str(error)
            ) from error

    def attach_arena(self, arena: memoryview) -> None:
        pass

    def detach_arena(self) -> None:
        pass

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        for row in range(rows.start, rows.stop):
            run, count = int(items.run_bytes[row]), int(items.count[row])
            segment = self._segments[items.segment[row]]
            target: NDArray[np.uint8] = np.ndarray(
                (count, run),
                np.uint8,
                segment.data,
                int(items.dest_offset[row]),
                (int(items.dest_stride[row]), 1),
            )
            source: NDArray[np.uint8] = np.ndarray(
                (count, run), np.uint8, chunk, int(items.src_offset[row]), (int(items.src_stride[row]), 1)
            )
            np.copyto(target, source)

    def synchronize(self) -> None:
        pass

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        import torch

        return _tensor_views([torch.from_numpy(segment) for segment in self._segments], slices)

    def free(self) -> None:
        self._segments = []


class CudaDevice:
    """The one GPU that Ray gave this process. The arena is registered as pinned memory once; copies are asynchronous.

    Strided items go through a staging block on the device: one contiguous transfer by the DMA engine, then a strided
    copy on the device, both on one stream, so the block is free again when the next chunk's transfer begins.
    """

    def __init__(self, index: int = 0) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceUnavailable(
                "this worker was given a GPU that torch cannot use",
                hint="check the driver and that torch is a CUDA build (longshore doctor shows both)",
                torch=torch.__version__,
            )
        self.name = f"cuda:{index}"
        self._torch = torch
        # Only this index is ever named: a context on any other GPU would take memory there.
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._segments: list[torch.Tensor] = []
        self._staging: torch.Tensor | None = None
        self._pinned: int | None = None

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        torch = self._torch
        try:
            self._segments = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in segment_bytes]
        except torch.cuda.OutOfMemoryError as error:
            self._segments = []
            free, total = torch.cuda.mem_get_info(self._device)
            raise DoesNotFit(
                "the rank's device memory could not be taken",
                need_bytes=sum(segment_bytes),
                free_bytes=free,
                total_bytes=total,
            ) from error

    def attach_arena(self, arena: memoryview) -> None:
        torch = self._torch
        address = np.frombuffer(arena, np.uint8).ctypes.data
        with torch.cuda.device(self._device):  # the calling thread's device may be another
            # One registration for the whole arena: registering each slot or view is a thousand times slower.
            if int(self._cudart().cudaHostRegister(address, len(arena), 0)) == 0:
                self._pinned = address
                return
            # Without it copies are slower, no more. But CUDA keeps the error for whoever launches a kernel next.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)

    def detach_arena(self) -> None:
        self.synchronize()
        if self._pinned is not None:
            with self._torch.cuda.device(self._device):
                self._cudart().cudaHostUnregister(self._pinned)
            self._pinned = None
        self._staging = None

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        torch = self._torch
        source = torch.frombuffer(chunk, dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            staged = None
            for row in range(rows.start, rows.stop):
                run, count = int(items.run_bytes[row]), int(items.count[row])
                begin, dest = int(items.src_offset[row]), int(items.dest_offset[row])
                segment = self._segments[items.segment[row]]
                if count == 1:
                    segment[dest : dest + run].copy_(source[begin : begin + run], non_blocking=True)
                    continue
                if staged is None:
                    staged = self._stage(source)
                target = segment.as_strided((count, run), (int(items.dest_stride[row]), 1), dest)
                target.copy_(staged.as_strided((count, run), (int(items.src_stride[row]), 1), begin))

    def _cudart(self) -> Any:
        return self._torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def _stage(self, source: torch.Tensor) -> torch.Tensor:
        if self._staging is None or len(self._staging) < len(source):
            self._staging = self._torch.empty(len(source), dtype=self._torch.uint8, device=self._device)
        staged = self._staging[: len(source)]
        staged.copy_(source, non_blocking=True)
        return staged

    def synchronize(self) -> None:
        self._stream.synchronize()

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        return _tensor_views(self._segments, slices)

    def free(self) -> None:
        self.detach_arena()
        self._segments = []
        self._torch.cuda.empty_cache()  # torch keeps freed memory for itself, and this process may live on


def open_device(kind: str) -> Device:
    """The device of this process: `kind` is "cpu", or "cuda" for the one GPU that is visible first."""
    return CpuDevice() if kind == "cpu" else CudaDevice(0)


def _tensor_views(segments: list[torch.Tensor], slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
    views = {}
    for piece in slices:
        dtype, shape = torch_dtype(piece.dtype, piece.sizes)
        segment = segments[piece.segment]
        data = segment[piece.segment_offset : piece.segment_offset + piece.size_bytes]
        views[piece.name] = data.view(dtype).reshape(shape)
    return views


def torch_dtype(name: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The torch dtype for a safetensors dtype, and the shape in its elements.

    Dtypes that this torch lacks, and those smaller than a byte, come as `uint8` with the packed bytes in the last
    dimension (flat when the shape has none).
    """
    import torch

    known = getattr(torch, _TORCH_NAMES.get(name, ""), None)
    if isinstance(known, torch.dtype):
        return known, shape
    total = tensor_bytes(name, shape)
    leading = 1
    for length in shape[:-1]:
        leading *= length
    if shape and leading and total % leading == 0:
        return torch.uint8, (*shape[:-1], total // leading)
    return torch.uint8, (total,)


# safetensors' dtype names -> attribute of the torch module
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
