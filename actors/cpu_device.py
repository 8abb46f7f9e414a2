"""Host memory of the rank's own process as its device. Places with numpy, so that a load needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actors.segment_memory import PROCESS_MEMORY, Segment
from cluster.errors import DoesNotFit
from cluster.load_plan import TensorSlice
from cluster.read_items import ReadItems

if TYPE_CHECKING:
    import torch


class CpuDevice:
    """See `actors.device.Device`."""

    name = "cpu"
    receives = True

    def __init__(self) -> None:
        self._segments: list[Segment] = []

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

    def attach_arena(self, arena: memoryview) -> None:
        pass

    def detach_arena(self) -> None:
        pass

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        for row in range(rows.start, rows.stop):
            run, count = int(items.run_bytes[row]), int(items.count[row])
            begin, stride = int(items.dest_offset[row]), int(items.dest_stride[row])
            segment = self._segments[items.segment[row]]
            segment.touch(begin, begin + (count - 1) * stride + run)
            target: NDArray[np.uint8] = np.ndarray((count, run), np.uint8, segment.data.data, begin, (stride, 1))
            source: NDArray[np.uint8] = np.ndarray(
                (count, run), np.uint8, chunk, int(items.src_offset[row]), (int(items.src_stride[row]), 1)
            )
            np.copyto(target, source)

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

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        import torch

        from actors.tensor_views import tensor_views

        return tensor_views([torch.from_numpy(segment.data) for segment in self._segments], slices)

    def free(self) -> None:
        self._segments = []
