"""A rank's state dict: the table of its tensors for the plan, and slices of their bytes.

    plain tensor             whole, on every rank that has it
    DTensor                  the region of this process's place in the mesh, by its placements
    FSDP1's ShardedTensor    boxes
    BoxedTensor              boxes

Nothing is copied but what is asked for. A slice of contiguous memory of the host is a view.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actors.devices.convert import stored_dtype
from actors.handover.modules import as_dtensor
from actors.saving.boxed import BoxedTensor, as_sharded, cuts_of
from cluster.errors import SaveRefused
from cluster.layouts.region import MeshCut, dtensor_region
from cluster.saving.held import Cutting, RankTable, SavedTensor
from storage.problems import Problems, quote

DIGEST_BYTES = hashlib.sha256().digest_size
SAMPLE_RUNS = 64
SAMPLE_BYTES = SAMPLE_RUNS << 10


class HeldTensors:
    """The tensors of one rank."""

    def __init__(self, state: Mapping[str, Any], ranks: Mapping[int, int], arguments: Mapping[str, str]) -> None:
        """Read a state dict.

        Args:
            state: Tensors by name.
            ranks: Global rank -> rank in the group of the save.
            arguments: Texts that must be equal on all ranks.
        """
        self._ranks = ranks
        self._local: dict[str, torch.Tensor] = {}  # whole tensors and shards of DTensors
        self._boxes: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}  # by name and offsets
        self._problems = Problems()
        self._columns: list[tuple[str, str, tuple[int, ...], int]] = []
        self._cuttings: dict[Cutting, int] = {}
        self._memory: dict[Any, str] = {}
        self._ties: list[tuple[str, str]] = []
        for name, value in state.items():
            self._take(name, value)
        self.table = RankTable(
            names=tuple(row[0] for row in self._columns),
            dtypes=tuple(row[1] for row in self._columns),
            shapes=tuple(row[2] for row in self._columns),
            cutting_of=tuple(row[3] for row in self._columns),
            cuttings=tuple(self._cuttings),
            ties=tuple(self._ties),
            problems=(*self._problems, *self._more()),
            arguments=dict(arguments),
        )

    @property
    def any_on_gpu(self) -> bool:
        """Return whether a tensor is in a GPU's memory."""
        return any(tensor.is_cuda for tensor in (*self._local.values(), *self._boxes.values()))

    def local_of(self, tensor: SavedTensor, number: int) -> torch.Tensor:
        """Return this rank's own part of a tensor, by the number of its region."""
        name, (region, _) = tensor.spec.name, tensor.regions.held[number]
        found = self._local.get(name)
        return self._boxes[name, region.offsets[:-1]] if found is None else found  # without the one of bytes

    def digest(self, tensor: SavedTensor, number: int) -> bytes:
        """Return a digest of a sample of this rank's own part of a tensor."""
        data: Any = sample(self.local_of(tensor, number)).numpy()  # which has the buffer protocol
        return hashlib.sha256(data).digest()

    def _more(self) -> list[str]:
        more = len(self._problems) - len(list(self._problems))
        return [f"and {more} more"] if more else []

    def _take(self, name: Any, value: Any) -> None:
        if not isinstance(name, str):
            self._problems.add(f"a name is no str: {quote(name)}")
            return
        if as_sharded(value) is not None:
            self._take_boxes(name, value, value.local_shards())
            return
        if isinstance(value, BoxedTensor):
            boxes = tuple((self._ranks.get(rank, -1), offsets, sizes) for rank, offsets, sizes in value.boxes)
            tensors = [tensor.detach() for tensor in value.local.values()]
            if all([self._is_sound(name, tensor) for tensor in tensors]):
                for offsets, tensor in zip(value.local, tensors, strict=True):
                    self._boxes[name, offsets] = tensor
                self._add(name, value.dtype, value.shape, Cutting(boxes=boxes), tensors)
            return
        if not isinstance(value, torch.Tensor):
            self._problems.add(f"{quote(name)} is no tensor but {type(value).__name__}")
            return
        value = value.detach()
        dtensor = as_dtensor(value)
        cutting = Cutting()
        local = value
        if dtensor is not None:
            found = self._cutting_of(name, dtensor)
            if found is None:
                return
            cutting, local = found, dtensor.to_local()
            if hasattr(local, "wait"):  # an AsyncCollectiveTensor, which another process may still fill
                local = local.wait()
        if not self._is_sound(name, local):
            return
        self._local[name] = local
        self._add(name, local.dtype, tuple(value.shape), cutting, (local,))

    def _take_boxes(self, name: str, value: Any, shards: Sequence[Any]) -> None:
        boxes = []
        for shard in value.metadata().shards_metadata:
            rank = self._ranks.get(shard.placement.rank(), -1)
            boxes.append((rank, tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
        tensors = [shard.tensor.detach() for shard in shards]
        if not all([self._is_sound(name, tensor) for tensor in tensors]):
            return
        for shard, tensor in zip(shards, tensors, strict=True):
            self._boxes[name, tuple(shard.metadata.shard_offsets)] = tensor
        dtype = value.metadata().tensor_properties.dtype
        self._add(name, dtype, tuple(value.size()), Cutting(boxes=tuple(boxes)), tensors)

    def _is_sound(self, name: str, tensor: torch.Tensor) -> bool:
        if stored_dtype(tensor.dtype) is None:
            self._problems.add(f"{quote(name)} has a dtype that safetensors lacks: {tensor.dtype}")
        elif tensor.is_meta:
            self._problems.add(f"{quote(name)} is on the meta device and has no values")
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            self._problems.add(f"{quote(name)} is no dense tensor: {tensor.layout}")
        elif tensor.is_conj() or tensor.is_neg():
            self._problems.add(f"{quote(name)} is a lazy conjugate or negative; save `tensor.resolve_conj()`")
        elif type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter | torch.nn.Buffer):
            self._problems.add(f"{quote(name)} is a {type(tensor).__name__}, which is no plain tensor")
        else:
            return True
        return False

    def _add(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], cutting: Cutting, tensors: Sequence[torch.Tensor]
    ) -> None:
        number = self._cuttings.setdefault(cutting, len(self._cuttings))
        self._columns.append((name, stored_dtype(dtype) or "", shape, number))
        if any(tensor.numel() for tensor in tensors):
            memory = tuple(
                (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
                for tensor in tensors
            )
            kept = self._memory.setdefault((dtype, shape, memory), name)
            if kept != name:
                self._ties.append((name, kept))

    def _cutting_of(self, name: str, tensor: Any) -> Cutting | None:
        mesh, shape = tensor.device_mesh, tuple(tensor.shape)
        try:
            cuts = cuts_of(name, tensor)
        except SaveRefused as error:
            self._problems.add(error.message)
            return None
        grid = mesh.mesh
        ranks = tuple(self._ranks.get(rank, -1) for rank in grid.reshape(-1).tolist())
        here = mesh.get_coordinate()
        if here is not None:
            wanted = dtensor_region(
                shape, [MeshCut(dim, mesh.size(number), here[number], groups) for number, dim, groups in cuts]
            ).filled
            local = tuple(tensor._local_tensor.shape)
            if wanted != local and not (0 in wanted and 0 in local):
                self._problems.add(f"{quote(name)} has a local part of shape {local}, its placements say {wanted}")
                return None
        return Cutting(mesh=tuple(grid.shape), ranks=ranks, cuts=cuts)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return bytes of a tensor in row-major order, in host memory: all up to SAMPLE_BYTES, else runs of 1 KiB.

    The runs have equal distances. Those of a GPU are put together there.
    """
    size_bytes, run = tensor.numel() * tensor.element_size(), SAMPLE_BYTES // SAMPLE_RUNS
    if size_bytes <= SAMPLE_BYTES:
        return byte_slice(tensor, 0, size_bytes).cpu()
    step = (size_bytes - run) // (SAMPLE_RUNS - 1) // 16 * 16  # whole elements
    if tensor.is_contiguous():
        runs = _flat(tensor).as_strided((SAMPLE_RUNS, run), (step, 1))
        return runs.contiguous().reshape(-1).cpu()
    starts = range(0, SAMPLE_RUNS * step, step)
    return torch.cat([byte_slice(tensor, start, start + run) for start in starts]).cpu()


def byte_slice(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return bytes [start, end) of a tensor in row-major order, flat, on the tensor's device: a view if possible."""
    if tensor.is_contiguous():
        return _flat(tensor)[start:end]
    while tensor.shape[0] == 1:
        tensor = tensor[0]
        if tensor.is_contiguous():
            return _flat(tensor)[start:end]
    row_bytes = tensor.numel() * tensor.element_size() // tensor.shape[0]
    first, last = start // row_bytes, -(-end // row_bytes)
    pieces = []
    at = first
    while at < last:
        low, high = max(start - at * row_bytes, 0), min(end - at * row_bytes, row_bytes)
        if (low, high) != (0, row_bytes) and tensor.dim() > 1:
            pieces.append(byte_slice(tensor[at], low, high))
            at += 1
            continue
        stop = at + 1 if (low, high) != (0, row_bytes) else max(at + 1, end // row_bytes)
        rows = _flat(tensor[at:stop].contiguous())
        pieces.append(rows[low : high if stop == at + 1 else None])
        at = stop
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor. One with a single element may have any stride, which `view` refuses."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
