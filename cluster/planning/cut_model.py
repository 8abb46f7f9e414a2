"""A model as a layout cuts it, in columns. It is small enough to send, and every rank's plan is derived from it.

Tensors of one element type, shape and cut are of one *kind*. Tensors that the same ranks hold have one *holder*. A
rank's regions differ by kind, not by tensor. So the work per rank is that of a few kinds, and arrays do the rest. A
model of 130,000 tensors in experts and layers has about a dozen kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster.errors import LayoutError
from cluster.fit.device_map import DeviceMap
from cluster.layouts.layout import Holder, decide_layout
from cluster.layouts.mesh import Layout, RankCoords
from cluster.layouts.region import Box, Region, element_bits
from cluster.layouts.rules import Rules, TensorCut, region_of
from cluster.precision.recipes import (
    Output,
    Precision,
    Recipe,
    RecordedAmax,
    cut_problem,
    decide_recipes,
    outputs_of,
    read_region,
)
from cluster.units import show_some
from storage.checkpoints.model_index import ModelIndex

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig


AS_STORED = Precision()


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The properties that tensors must share to be cut alike."""

    dtype: str  # safetensors name
    shape: tuple[int, ...]
    size_bytes: int  # of the whole tensor
    cut: TensorCut
    recipe: Recipe | None = None  # how it is converted; None: it stays as stored
    recorded: bool = False  # the plan has its maxima, so a rank reads only what it holds

    def part_bytes(self, elements: int) -> int:
        """Return the size in bytes of this number of elements."""
        return elements * (element_bits(self.shape, self.size_bytes) or 0) // 8


@dataclass(frozen=True, slots=True)
class KindSlice:
    """The region that one rank holds of each of its tensors of one kind, and the region it reads."""

    region: Region  # the region of the tensor that the rank holds
    reads: Region  # the region that it reads; larger if the scales depend on more than it holds
    read_bytes: int  # padding included
    filled_bytes: int  # bytes of them from the store
    outputs: tuple[Output, ...]  # the tensors that the rank holds: one, unless it is quantized
    sizes_bytes: tuple[int, ...]  # bytes of each output

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors that the rank holds."""
        return sum(self.sizes_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class CutModel:
    """Columns of n tensors in manifest order, their k kinds and h holders, and the layout."""

    layout: Layout
    names: tuple[str, ...]
    kinds: tuple[TensorKind, ...]
    holders: tuple[Holder, ...]
    kind: NDArray[np.int32]  # (n,) index into kinds
    holder: NDArray[np.int32]  # (n,) index into holders
    shard: NDArray[np.int32]  # (n,) index into the shards
    start: NDArray[np.int64]  # (n,) first byte of the whole tensor in the shard's file
    device_map: DeviceMap | None = None  # device map of the one rank, when it has several devices
    amax: RecordedAmax | None = None  # maxima of tensors whose kind is `recorded`

    def __len__(self) -> int:
        return len(self.names)

    def sizes_bytes(self) -> NDArray[np.int64]:
        """Return the size of each stored tensor."""
        of_kind = np.array([kind.size_bytes for kind in self.kinds], np.int64)
        return of_kind[self.kind] if len(self) else np.empty(0, np.int64)

    def tensors_of(self, coords: RankCoords) -> NDArray[np.int64]:
        """Return the numbers of the tensors that the rank has, ascending."""
        has = np.array([holder.has(coords) for holder in self.holders], bool)
        return np.flatnonzero(has[self.holder]) if len(self) else np.empty(0, np.int64)

    def kind_counts(self, coords: RankCoords) -> list[int]:
        """Return how many tensors of each kind the rank has."""
        counts = np.bincount(self.kind[self.tensors_of(coords)], minlength=len(self.kinds))
        return [int(count) for count in counts]

    def slices(self, coords: RankCoords) -> list[KindSlice]:
        """Return, by kind, the slice that the rank at `coords` holds of such a tensor if it has one."""
        found = []
        for kind in self.kinds:
            region = region_of(kind.shape, kind.cut, coords, self.layout)
            reads = region if kind.recorded else read_region(kind.recipe, kind.shape, region)
            read_bytes, filled_bytes = kind.part_bytes(math.prod(reads.sizes)), kind.part_bytes(reads.elements)
            outputs = outputs_of(kind.recipe, kind.dtype, kind.shape, region)
            sizes = (read_bytes,) if kind.recipe is None else tuple(output.size_bytes for output in outputs)
            found.append(KindSlice(region, reads, read_bytes, filled_bytes, outputs, sizes))
        return found

    def places(self, ranks: Iterable[int]) -> list[RankCoords]:
        """Return the coordinates of `ranks`, in order. Ranks that hold the same count once."""
        return list(dict.fromkeys(self.layout.place(self.layout.rank_coords(rank)) for rank in ranks))

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        """Return the bytes of the model that at least one of `ranks` reads, each counted once."""
        # A rank that has one tensor of a kind and holder has a slice of all of them.
        pairs, counts = np.unique(self.kind.astype(np.int64) * len(self.holders) + self.holder, return_counts=True)
        # Boxes of one tensor lie on one grid, so two boxes are equal or disjoint. Each different box counts once.
        different: list[dict[Box, int]] = [{} for _ in counts]
        for coords in self.places(ranks):
            boxes_of = [
                [(box, kind.part_bytes(math.prod(box[1]))) for box, _ in piece.reads.boxes()]
                for kind, piece in zip(self.kinds, self.slices(coords), strict=True)
            ]
            for pair, boxes in zip(pairs.tolist(), different, strict=True):
                kind_number, holder = divmod(pair, len(self.holders))
                if self.holders[holder].has(coords):
                    boxes.update(boxes_of[kind_number])
        return sum(int(count) * sum(boxes.values()) for count, boxes in zip(counts, different, strict=True))


def cut_model(
    index: ModelIndex,
    layout: Layout,
    rules: Rules,
    config: ModelConfig | None = None,
    precision: Precision = AS_STORED,
) -> CutModel:
    """Return the model's tensors, each with its cut.

    Raises LayoutError listing every tensor that cannot be placed, and ConfigError for a precision that the model cannot
    have.
    """
    placed = decide_layout(index.tensors, layout, rules, config)
    recipes = decide_recipes(index.tensors, precision, (config.model_type if config else None) or "")
    kinds: dict[TensorKind, int] = {}
    alike: dict[tuple[object, ...], int] = {}  # hashes parts, as large models have 100,000 tensors of a dozen kinds
    kind: list[int] = []
    for tensor, place, recipe in zip(index.tensors, placed, recipes, strict=True):
        parts = tensor.dtype, tensor.shape, tensor.end - tensor.start, id(place.cut), id(recipe)
        number = alike.get(parts)
        if number is None:
            known = TensorKind(tensor.dtype, tensor.shape, tensor.size_bytes, place.cut, recipe)
            number = alike[parts] = kinds.setdefault(known, len(kinds))
        kind.append(number)
    if any(each.recipe is not None and each.recipe.scheme for each in kinds):
        _check_recipes(index, layout, tuple(kinds), kind)
    holders = {id(place.holder): place.holder for place in placed}  # `decide_layout` makes one object per holder
    number_of = {each: number for number, each in enumerate(holders)}
    return CutModel(
        layout=layout,
        names=tuple(tensor.name for tensor in index.tensors),
        kinds=tuple(kinds),
        holders=tuple(holders.values()),
        kind=np.array(kind, np.int32),
        holder=np.array([number_of[id(place.holder)] for place in placed], np.int32),
        shard=np.array([tensor.shard for tensor in index.tensors], np.int32),
        start=np.array([tensor.start for tensor in index.tensors], np.int64),
    )


def _check_recipes(index: ModelIndex, layout: Layout, kinds: Sequence[TensorKind], kind: Sequence[int]) -> None:
    """Raise LayoutError when a rank's slice cannot be quantized on its own."""
    problems: dict[int, str] = {}
    for coords in dict.fromkeys(layout.place(layout.rank_coords(rank)) for rank in range(layout.ranks)):
        for number, each in enumerate(kinds):
            region = region_of(each.shape, each.cut, coords, layout)
            if number not in problems and (problem := cut_problem(each.recipe, each.shape, region)):
                problems[number] = problem
    named = [
        f"{tensor.name!r:.200}: {problems[of]}"
        for tensor, of in zip(index.tensors, kind, strict=True)
        if of in problems
    ]
    if named:
        raise LayoutError(
            f"{len(named)} tensors cannot be quantized in the slices of this layout: {show_some(named, 20)}",
            hint="name them in skip_quantization, use a smaller tensor_parallel_size, or use fp8",
            uncuttable=len(named),
        )
