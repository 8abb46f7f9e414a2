"""A model as a layout cuts it, in columns: small enough to travel, and all that any rank's plan is worked out from.

Tensors of one element type, shape and tensor-parallel cut are of one *kind*. A rank's boxes differ by kind, not by
tensor, so the work per rank is that of a few kinds, and arrays do the rest: a model of 130,000 tensors in experts and
layers has about a dozen kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster.layout import Box, Layout, RankCoords, TensorCut, cut_box, decide_cuts
from cluster.layout_rules import Rules
from storage.model_index import ModelIndex

if TYPE_CHECKING:
    from cluster.model_config import ModelConfig  # brings pydantic


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What tensors must have in common to be cut alike."""

    dtype: str  # safetensors name
    shape: tuple[int, ...]
    size_bytes: int  # of the whole tensor
    cut: TensorCut


@dataclass(frozen=True, slots=True)
class KindSlice:
    """What one rank holds of every tensor of one kind."""

    box: Box  # (offsets, sizes)
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CutModel:
    """Columns of n tensors in manifest order, their k kinds, and the layout."""

    layout: Layout
    names: tuple[str, ...]
    kinds: tuple[TensorKind, ...]
    kind: NDArray[np.int32]  # (n,) index into kinds
    shard: NDArray[np.int32]  # (n,) index into the shards
    start: NDArray[np.int64]  # (n,) first byte of the whole tensor in the shard's file

    def __len__(self) -> int:
        return len(self.names)

    def kind_counts(self) -> list[int]:
        """Tensors of each kind."""
        return [int(count) for count in np.bincount(self.kind, minlength=len(self.kinds))]

    def slices(self, coords: RankCoords) -> list[KindSlice]:
        """By kind, what the rank at `coords` holds of such a tensor."""
        found = []
        for kind in self.kinds:
            offsets, sizes = cut_box(kind.shape, kind.cut, coords, self.layout)
            size_bytes = kind.size_bytes * math.prod(sizes) // max(math.prod(kind.shape), 1)
            found.append(KindSlice((offsets, sizes), size_bytes))
        return found

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        """Bytes of the model that at least one of `ranks` holds, each counted once."""
        places = {(coords.fsdp, coords.tensor): coords for coords in map(self.layout.rank_coords, ranks)}
        # Boxes of one tensor are parts of one grid: equal or disjoint. So each different box counts once.
        different: list[dict[tuple[int, ...], int]] = [{} for _ in self.kinds]
        for coords in places.values():
            for boxes, piece in zip(different, self.slices(coords), strict=True):
                if piece.size_bytes:
                    boxes[piece.box[0]] = piece.size_bytes
        return sum(count * sum(boxes.values()) for count, boxes in zip(self.kind_counts(), different, strict=True))


def cut_model(index: ModelIndex, layout: Layout, rules: Rules, config: ModelConfig | None = None) -> CutModel:
    """The model's tensors, each with its cut. Raises LayoutError listing every tensor that cannot be cut."""
    cuts = decide_cuts(index.tensors, layout, rules, config)
    numbers: dict[TensorKind, int] = {}
    kind = [
        numbers.setdefault(TensorKind(tensor.dtype, tensor.shape, tensor.size_bytes, cut), len(numbers))
        for tensor, cut in zip(index.tensors, cuts, strict=True)
    ]
    return CutModel(
        layout=layout,
        names=tuple(tensor.name for tensor in index.tensors),
        kinds=tuple(numbers),
        kind=np.array(kind, np.int32),
        shard=np.array([tensor.shard for tensor in index.tensors], np.int32),
        start=np.array([tensor.start for tensor in index.tensors], np.int64),
    )
