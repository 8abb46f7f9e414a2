"""The devices of a rank that has several (a device map), as one: GPUs, host memory, files.

    read items of a chunk --by segment--> cuda:0 | cuda:1 | cpu | disk        each has segments of its own, from 0 on

Which segment is on which device the plan says; no segment is on two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actors.devices.device import Device, OpeningDevice
from actors.devices.offload_folder import OffloadFolder
from cluster.device_map.deciding import CPU, DISK, DeviceKey, device_name, device_order
from cluster.device_map.options import index_entry
from cluster.errors import DeviceUnavailable
from cluster.messages import RankJob
from cluster.plans.load_plan import RankPlan, StagedTensor, TensorSlice
from cluster.plans.read_items import ReadItems

if TYPE_CHECKING:
    import torch


class MappedDevice:
    """See `actors.devices.device.Device`."""

    def __init__(self, plan: RankPlan, parts: Mapping[DeviceKey, Device]) -> None:
        """`parts`: one for each device in `plan.segment_devices`."""
        self._order = sorted(parts, key=device_order)
        self._parts = [parts[key] for key in self._order]
        self._part = [self._order.index(key) for key in plan.segment_devices]  # of each segment
        self._local = np.zeros(len(self._part), np.int64)  # number of each segment on its device
        for number in range(len(self._parts)):
            here = [segment for segment, part in enumerate(self._part) if part == number]
            self._local[here] = np.arange(len(here))
        self._segments = len(self._part)
        for staged in plan.staged:  # what is converted is staged where it will be, under the plan's own number
            self._part.append(self._part[plan.slices[staged.first].segment])
        self._renumbered: tuple[ReadItems, ReadItems] | None = None  # the plan's items, and as the parts have them
        self.receives = all(part.receives for part in self._parts)

    @property
    def name(self) -> str:
        """ "cuda:0+cuda:1+cpu+disk"."""
        return "+".join(device_name(key) for key in self._order)

    @property
    def fresh_s(self) -> float:
        return sum(part.fresh_s for part in self._parts)

    @property
    def held_bytes(self) -> int:
        return sum(part.held_bytes for part in self._parts)

    def allocate(self, segment_bytes: tuple[int, ...]) -> None:
        for number, part in enumerate(self._parts):
            here = zip(segment_bytes, self._part, strict=False)
            part.allocate(tuple(size_bytes for size_bytes, of in here if of == number))

    def attach_arena(self, arena: memoryview) -> None:
        for part in self._parts:
            part.attach_arena(arena)

    def detach_arena(self) -> None:
        self.synchronize()  # the GPU that unpins it does so for all
        for part in self._parts:
            part.detach_arena()

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        for part, items_of, here in self._split(items, rows):
            part.place(chunk, items_of, here)

    def parts(self, items: ReadItems, rows: slice) -> list[memoryview]:
        return [view for part, items_of, here in self._split(items, rows) for view in part.parts(items_of, here)]

    def stage(self, staged: StagedTensor) -> None:
        self._parts[self._part[staged.source.segment]].stage(staged)

    def convert(self, staged: StagedTensor, slices: Sequence[TensorSlice]) -> None:
        self._parts[self._part[staged.source.segment]].convert(staged, [self._on_part(piece) for piece in slices])

    def synchronize(self) -> None:
        for part in self._parts:
            part.synchronize()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def tensors(self, slices: tuple[TensorSlice, ...]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self._parts):
            here = tuple(self._on_part(piece) for piece in slices if self._part[piece.segment] == number)
            found.update(part.tensors(here))
        return {piece.name: found[piece.name] for piece in slices}

    def free(self) -> None:
        with contextlib.ExitStack() as parts:  # each of them, also when another cannot
            for part in self._parts:
                parts.callback(part.free)
            self.synchronize()  # as in `detach_arena`

    def _split(self, items: ReadItems, rows: slice) -> Iterator[tuple[Device, ReadItems, slice]]:
        """Rows in order, those that follow each other on one device together."""
        local = self._on_parts(items)
        part_of = (self._part[segment] for segment in items.segment[rows].tolist())
        start = rows.start
        for number, run in groupby(part_of):
            end = start + sum(1 for _ in run)
            yield self._parts[number], local, slice(start, end)
            start = end

    def _on_parts(self, items: ReadItems) -> ReadItems:
        known = self._renumbered
        if known is None or known[0] is not items:
            numbers = np.concatenate((self._local, np.arange(self._segments, len(self._part))))
            known = self._renumbered = (items, replace(items, segment=numbers[items.segment]))
        return known[1]

    def _on_part(self, piece: TensorSlice) -> TensorSlice:
        return replace(piece, segment=int(self._local[piece.segment]))


def open_mapped(
    plan: RankPlan, folder: str, owner: str, open_gpu: Callable[[int], Device] | None = None
) -> MappedDevice:
    """The devices that the plan names, none of their memory taken yet. `owner`: see `OffloadFolder`."""
    parts: dict[DeviceKey, Device] = {}
    for key in sorted(set(plan.segment_devices), key=device_order):
        if key == DISK:
            from actors.devices.offload_folder import OffloadFolder

            on_disk = sorted(
                (piece for piece in plan.slices if plan.segment_devices[piece.segment] == DISK),
                key=lambda piece: piece.segment,
            )
            parts[key] = DiskDevice(OffloadFolder(folder, owner), tuple(on_disk))
        elif key == CPU:
            from actors.devices.cpu_device import CpuDevice

            parts[key] = CpuDevice()
        elif isinstance(key, int):
            parts[key] = (open_gpu or _open_gpu)(key)
    return MappedDevice(plan, parts)


def open_mapped_rank(plan: RankPlan, job: RankJob) -> Device:
    """The same for a rank's job: host memory and files at once, GPUs while the first chunks are fetched."""
    owner = f"{job.load_id} {job.rank}"
    if not any(isinstance(key, int) for key in plan.segment_devices):
        return open_mapped(plan, job.offload_folder, owner)
    return OpeningDevice(lambda: open_mapped(plan, job.offload_folder, owner))


def _open_gpu(index: int) -> Device:
    from actors.devices.cuda_device import CudaDevice

    return CudaDevice(index)


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
