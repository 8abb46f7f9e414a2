"""Files as a rank's memory: tensors that a device map sends to disk. Placed by writes, so that no page stays mapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actors.devices.offload_folder import OffloadFolder
from cluster.device_map.options import index_entry
from cluster.errors import DeviceUnavailable
from cluster.plans.load_plan import StagedTensor, TensorSlice
from cluster.plans.read_items import ReadItems

if TYPE_CHECKING:
    import torch


class DiskDevice:
    """See `actors.devices.device.Device`. Segment i is the file of `slices[i]`."""

    name = "disk"
    receives = False
    fresh_s = 0.0

    def __init__(self, folder: OffloadFolder, slices: tuple[TensorSlice, ...]) -> None:
        self._folder = folder
        self._slices = slices
        self._staged: dict[int, NDArray[np.uint8]] = {}  # tensors that are still to be converted, by segment

    @property
    def held_bytes(self) -> int:
        return self._folder.size_bytes + sum(len(memory) for memory in self._staged.values())

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        names = (piece.name for piece in self._slices)
        self._folder.open(dict(zip(names, segment_bytes, strict=True)))

    def attach_arena(self, arena: memoryview) -> None:
        pass

    def detach_arena(self) -> None:
        pass

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        for row in range(rows.start, rows.stop):
            run, begin, dest = int(items.run_bytes[row]), int(items.src_offset[row]), int(items.dest_offset[row])
            for _ in range(int(items.count[row])):
                self._write(int(items.segment[row]), chunk[begin : begin + run], dest)
                begin, dest = begin + int(items.src_stride[row]), dest + int(items.dest_stride[row])

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        raise DeviceUnavailable("a socket cannot write to files", device=self.name)

    def stage(self, staged: StagedTensor) -> None:
        self._staged[staged.source.segment] = np.zeros(staged.source.size_bytes, np.uint8)

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        import torch

        from actors.devices.convert import convert

        made = [torch.empty(piece.size_bytes, dtype=torch.uint8) for piece in slices]
        convert(staged, torch.from_numpy(self._staged.pop(staged.source.segment)), slices, made)
        for piece, data in zip(slices, made, strict=True):
            self._write(piece.segment, data.numpy().data, 0)

    def synchronize(self) -> None:
        pass

    def finish(self) -> None:
        from actors.handover.tensor_views import torch_dtype

        index = {}
        for piece in self._slices:
            if piece.size_bytes:  # Accelerate maps files, and nothing can be mapped of an empty one
                dtype, shape = torch_dtype(piece.dtype, piece.sizes)
                index[piece.name] = index_entry(str(dtype).removeprefix("torch."), shape)
        self._folder.seal(index)

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        """Mapped from the files; what is written to them changes no file."""
        from actors.handover.tensor_views import tensor_views

        return tensor_views([self._mapped(piece) for piece in self._slices], slices)

    def _mapped(self, piece: TensorSlice) -> torch.Tensor:
        import torch

        if not piece.size_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        with self._folder.readable(piece.name) as path:
            try:  # Python's own mappings keep a descriptor each, and there may be thousands of tensors
                return torch.from_file(path, shared=False, size=piece.size_bytes, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:  # so torch says what the system refused
                raise OSError(0, str(error).splitlines()[0]) from error

    def _write(self, segment: int, data: memoryview, offset: int) -> None:
        if segment < len(self._slices):
            self._folder.write(self._slices[segment].name, data, offset)
        else:
            self._staged[segment][offset : offset + len(data)] = data

    def free(self) -> None:
        self._folder.remove()
