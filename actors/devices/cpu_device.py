"""Host memory of the rank's own process as its device. Places with numpy, so that a load that converts nothing needs
no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actors.devices.segment_memory import PROCESS_MEMORY, Segment, SegmentMemory
from cluster.errors import DoesNotFit
from cluster.plans.load_plan import StagedTensor, TensorSlice
from cluster.plans.read_items import ReadItems

if TYPE_CHECKING:
    import torch


class CpuDevice:
    """See `actors.devices.device.Device`."""

    name = "cpu"
    receives = True

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._staged: dict[int, Segment] = {}  # memory of tensors that are still to be converted, by segment
        self._staging = SegmentMemory()  # what one of them leaves, the next one takes

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

    def attach_arena(self, arena: memoryview) -> None:
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
        segment.data[source.filled_bytes :] = 0  # padding; the memory may be that of another tensor
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
        for row in range(rows.start, rows.stop):
            run, count = int(items.run_bytes[row]), int(items.count[row])
            begin, stride = int(items.dest_offset[row]), int(items.dest_stride[row])
            segment = self._segment(int(items.segment[row]))
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

    def finish(self) -> None:
        pass

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        import torch

        from actors.handover.tensor_views import tensor_views

        return tensor_views([torch.from_numpy(segment.data) for segment in self._segments], slices)

    def free(self) -> None:
        self._segments = []
        self._staged = {}
        self._staging.keep(False)

    def _segment(self, number: int) -> Segment:
        return self._segments[number] if number < len(self._segments) else self._staged[number]
