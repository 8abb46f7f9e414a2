"""A tensor of a save as boxes on ranks: what is neither whole, nor cut as a DTensor.

`boxes_of` says which boxes of a tensor of a state dict every rank holds, without a message: a DTensor's mesh and
placements are known on all ranks. `boxed_view` changes that to the boxes of a tensor that is made of it, such as one
expert of many that are fused.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.handover.modules import as_dtensor
from cluster.errors import SaveRefused
from cluster.layouts.region import Box, MeshCut, dtensor_region
from cluster.saving.names import BoxPart, Mosaic, MosaicPiece, parts_of_box
from storage.problems import quote


@dataclass(frozen=True, slots=True)
class BoxedTensor:
    """A tensor that ranks hold in boxes. Every rank lists the boxes of all of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]  # (global rank, offsets, sizes)
    local: Mapping[tuple[int, ...], torch.Tensor]  # this rank's, by offsets; views, not always contiguous


class SourceBoxes:
    """The boxes of one tensor of a state dict, on all ranks."""

    def __init__(self, name: str, value: Any) -> None:
        """Read a DTensor or FSDP1's ShardedTensor. Raises TypeError for other tensors, which are whole.

        Raises SaveRefused as `cuts_of` does.
        """
        if isinstance(value, BoxedTensor) or not hasattr(value, "size"):
            raise TypeError(f"{type(value).__name__} is not cut by torch")
        self.shape = tuple(value.size())
        self._held: list[tuple[int, Box]] = []
        self._local: dict[Box, torch.Tensor] = {}  # this rank's
        dtensor = as_dtensor(value) if isinstance(value, torch.Tensor) else None
        if dtensor is not None:
            self.dtype = dtensor.dtype
            self._read_dtensor(name, dtensor.detach())
        elif as_sharded(value) is not None:
            self.dtype = value.metadata().tensor_properties.dtype
            for shard in value.metadata().shards_metadata:
                self._held.append((shard.placement.rank(), (tuple(shard.shard_offsets), tuple(shard.shard_sizes))))
            for shard in value.local_shards():
                box = (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
                self._local[box] = shard.tensor.detach()
        else:
            raise TypeError(f"{type(value).__name__} is not cut")
        self._held = [(rank, box) for rank, box in self._held if 0 not in box[1]]
        table = (len(self._held), len(self.shape))  # of a scalar, rows without columns
        strides = np.cumprod([1, *reversed(self.shape[1:])])[::-1][: table[1]].astype(np.int64)
        first = np.array([box[0] for _, box in self._held], np.int64).reshape(table)
        sizes = np.array([box[1] for _, box in self._held], np.int64).reshape(table)
        self._first = first @ strides  # the element with which each box begins, in row-major order of the whole
        self._last = (first + sizes - 1) @ strides

    def parts(self, piece: MosaicPiece, mosaic: Mosaic) -> Iterator[tuple[int, BoxPart, torch.Tensor | None]]:
        """Yield the parts of one piece of a mosaic: the rank that has it, the part, and its box here or None."""
        one = Mosaic(mosaic.shape, (piece,))
        end = piece.start + sum((n - 1) * stride for n, stride in zip(piece.sizes, piece.strides, strict=True))
        for number in np.flatnonzero((self._first <= end) & (self._last >= piece.start)):
            rank, box = self._held[number]
            for part in parts_of_box(one, piece.source, self.shape, box):
                yield rank, part, self._local.get(box) if rank == _own_rank() else None

    def _read_dtensor(self, name: str, value: Any) -> None:
        mesh, cuts = value.device_mesh, cuts_of(name, value)
        local, own = value.to_local(), _own_rank()
        for rank, box, place in _mesh_boxes(
            self.shape, tuple(mesh.mesh.shape), tuple(mesh.mesh.reshape(-1).tolist()), cuts
        ):
            self._held.append((rank, box))
            if rank == own:
                self._local[box] = local[tuple(slice(at, at + size) for at, size in zip(place, box[1], strict=True))]

    def as_boxed(self) -> BoxedTensor:
        """Return the tensor itself as boxes."""
        boxes = tuple((rank, *box) for rank, box in self._held)
        return BoxedTensor(self.shape, self.dtype, boxes, {box[0]: values for box, values in self._local.items()})


@functools.lru_cache(maxsize=256)
def _mesh_boxes(
    shape: tuple[int, ...], mesh: tuple[int, ...], ranks: tuple[int, ...], cuts: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, Box, tuple[int, ...]], ...]:
    """Return the boxes of every rank of a mesh, with their places in the rank's own tensor."""
    found: list[tuple[int, Box, tuple[int, ...]]] = []
    for rank, here in zip(ranks, itertools.product(*map(range, mesh)), strict=True):
        region = dtensor_region(
            shape, [MeshCut(dim, mesh[number], here[number], groups) for number, dim, groups in cuts]
        )  # fmt: skip
        found += [(rank, box, place) for box, place in region.boxes()]
    return tuple(found)


def cuts_of(name: str, tensor: Any) -> tuple[tuple[int, int, int], ...]:
    """Return how a DTensor is cut, as `Cutting.cuts` lists it.

    Raises SaveRefused for placements that are no part of the values, such as Partial.
    """
    cuts: list[tuple[int, int, int]] = []
    for number, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            kind = type(placement).__name__
            raise SaveRefused(f"{quote(name)} is {kind} over a mesh: its values are sums that are not made yet")
        cuts.append((number, dim % tensor.ndim, int(getattr(placement, "split_factor", 1))))
    return tuple(cuts)


def as_boxed(name: str, value: Any) -> Any:
    """Return a tensor that is cut as boxes, and any other value as it is."""
    try:
        return SourceBoxes(name, value).as_boxed()
    except TypeError:
        return value


def boxed_view(mosaic: Mosaic, dtype: torch.dtype, sources: Mapping[str, Any]) -> torch.Tensor | BoxedTensor:
    """Return a tensor that is made of tensors of the state dict: a view, or boxes if those are cut.

    Args:
        mosaic: How it is made.
        dtype: Its dtype.
        sources: For each source, its `SourceBoxes`, or the tensor itself if every rank has it whole.
    """
    boxes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], None] = {}
    local: dict[tuple[int, ...], torch.Tensor] = {}
    whole: list[tuple[MosaicPiece, torch.Tensor]] = []
    for piece in mosaic.pieces:
        source = sources[piece.source]
        if isinstance(source, SourceBoxes):
            for rank, part, values in source.parts(piece, mosaic):
                boxes[rank, part.at, part.sizes] = None
                if values is not None:
                    local[part.at] = view_of_part(values, part)
        else:
            dense = source.detach().contiguous()
            start = dense.storage_offset() + piece.start
            whole.append((piece, torch.as_strided(dense, piece.sizes, piece.strides, start)))
    if not whole and mosaic.pieces:
        return BoxedTensor(mosaic.shape, dtype, tuple(boxes), local)
    if len(whole) == len(mosaic.pieces) == 1:
        return whole[0][1]
    if boxes:
        raise TypeError("a tensor is made of one that is cut and one that is not")
    made = torch.empty(mosaic.shape, dtype=dtype)
    for piece, values in whole:
        made[tuple(slice(at, at + size) for at, size in zip(piece.at, piece.sizes, strict=True))] = values
    return made


def view_of_part(values: torch.Tensor, part: BoxPart) -> torch.Tensor:
    """Return the values of a part, as a view of those of the box that holds it."""
    strides = [values.stride(of) * step for of, step in part.steps] if values.ndim else []
    start = sum(first * stride for first, stride in zip(part.first, values.stride(), strict=True))
    return torch.as_strided(values, part.sizes, strides, values.storage_offset() + start)


def _own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def as_sharded(value: Any) -> Any:
    """Return the value when it is FSDP1's ShardedTensor, else None. Imports nothing: the object implies the import."""
    kind: Any = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", None)
    return value if kind is not None and isinstance(value, kind) else None
