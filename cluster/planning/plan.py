"""The load plan: frozen data. `cluster.planning.make_plan` makes it and `actors.rank.executor` carries it out.

    LoadPlan -- cut, chunks                                       small: only these are sent
             -- ranks --> RankPlan -- slices --> TensorSlice     which slice of which tensor, and its place in memory
                                   -- chunk_ids                  the chunks those slices touch, in the order of leasing

A rank may have 100,000 slices, so `SliceTable` has them in columns. It makes a `TensorSlice` when somebody asks for it.

Pure functions derive plans of ranks from the cut (`cluster.planning.packed_plan`), and read items from slices and
chunks (`cluster.planning.read_items`). They run wherever the result is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from cluster.fit.device_map import DeviceKey, DeviceMap, device_name
from cluster.layouts.mesh import RankCoords
from cluster.layouts.region import Region
from cluster.planning.cut_model import CutModel
from cluster.precision.recipes import SCHEMES, Amax, Recipe, RecordedAmax
from storage.checkpoints.model_index import ChunkTable, Shard


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The slice of one tensor that one rank holds, and its place in the rank's memory.

    For a (4, 6) tensor, the region ((0, 4),), ((3, 6),) is the right half: a (4, 3) tensor for the rank.
    """

    name: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]  # global shape
    region: Region
    shard: int  # index into LoadPlan.shards
    start: int  # first byte of the whole tensor in the shard's file
    segment: int  # index into RankPlan.segment_bytes
    segment_offset: int  # first byte inside that segment, a multiple of 256
    size_bytes: int  # bytes of the slice, padding included
    filled_bytes: int  # bytes of it from the store, followed by zeros; 0 when it is made from another tensor
    made_from: str = ""  # the stored tensor that it is converted from; "": it is held as stored
    form: tuple[int, ...] = ()  # shape of the rank's own tensor in formats that store it flat; empty: the region's

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the first index that the rank holds, per dimension."""
        return self.region.offsets

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the shape of the rank's own tensor."""
        return self.form or self.region.sizes


_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class SliceKind:
    """The properties that slices of a table share. The fields are those of `TensorSlice`."""

    dtype: str
    shape: tuple[int, ...]
    region: Region
    size_bytes: int
    filled_bytes: int
    form: tuple[int, ...] = ()
    suffix: str | None = None  # what the name has more than the tensor it is made from; None: it is held as stored

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the shape of the rank's own tensor."""
        return self.form or self.region.sizes


@dataclass(frozen=True, slots=True, eq=False)
class SliceTable(Sequence[TensorSlice]):
    """Slices of a rank, in columns. A `TensorSlice` is made on access."""

    kinds: tuple[SliceKind, ...]
    names: Sequence[str]  # (n,)
    kind: NDArray[np.int32]  # (n,) index into kinds
    shard: NDArray[np.int32]  # (n,)
    start: NDArray[np.int64]  # (n,)
    segment: NDArray[np.int32]  # (n,)
    segment_offset: NDArray[np.int64]  # (n,)

    @classmethod
    def of(cls, slices: Sequence[TensorSlice]) -> SliceTable:
        """Return the slices as a table."""
        if isinstance(slices, SliceTable):
            return slices
        kinds: dict[SliceKind, int] = {}
        rows = []
        for piece in slices:
            suffix = piece.name.removeprefix(piece.made_from) if piece.made_from else None
            alike = (piece.dtype, piece.shape, piece.region, piece.size_bytes, piece.filled_bytes, piece.form, suffix)
            number = kinds.setdefault(SliceKind(*alike), len(kinds))
            rows.append((number, piece.shard, piece.start, piece.segment, piece.segment_offset))
        kind, shard, start, segment, offset = np.array(rows, np.int64).reshape(-1, 5).T.copy()
        small = kind.astype(np.int32), shard.astype(np.int32), start, segment.astype(np.int32), offset
        return cls(tuple(kinds), [piece.name for piece in slices], *small)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, row: int) -> TensorSlice: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[TensorSlice]: ...

    def __getitem__(self, row: int | slice) -> TensorSlice | Sequence[TensorSlice]:
        if isinstance(row, slice):
            return self._part(self.names[row], row)
        name, kind = self.names[row], self.kinds[self.kind[row]]
        columns = (self.shard, self.start, self.segment, self.segment_offset)
        return _slice_of(name, kind, *(int(column[row]) for column in columns))

    def __iter__(self) -> Iterator[TensorSlice]:
        places = zip(self.rows(), self.shard.tolist(), self.start.tolist(), strict=True)
        for (name, kind, segment, offset), shard, start in places:
            yield _slice_of(name, self.kinds[kind], shard, start, segment, offset)

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Iterate over (name, number in `kinds`, segment, segment_offset) of each slice."""
        for first in range(0, len(self), _ROWS_AT_ONCE):  # numbers are small in arrays only
            part = slice(first, first + _ROWS_AT_ONCE)
            columns = (self.kind[part].tolist(), self.segment[part].tolist(), self.segment_offset[part].tolist())
            yield from zip(self.names[part], *columns, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def select(self, rows: NDArray[np.int64]) -> SliceTable:
        """Return a table of these rows."""
        return self._part([self.names[row] for row in rows.tolist()], rows)

    def _part(self, names: Sequence[str], rows: slice | NDArray[np.int64]) -> SliceTable:
        place = self.shard[rows], self.start[rows], self.segment[rows], self.segment_offset[rows]
        return SliceTable(self.kinds, names, self.kind[rows], *place)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all slices."""
        counts = np.bincount(self.kind, minlength=len(self.kinds)).tolist()
        return sum(count * kind.size_bytes for count, kind in zip(counts, self.kinds, strict=True))


def _slice_of(name: str, kind: SliceKind, shard: int, start: int, segment: int, segment_offset: int) -> TensorSlice:
    made_from = "" if kind.suffix is None else name.removesuffix(kind.suffix)
    where = (shard, start, segment, segment_offset, kind.size_bytes, kind.filled_bytes)
    return TensorSlice(name, kind.dtype, kind.shape, kind.region, *where, made_from, kind.form)


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A stored tensor that is read into temporary memory, converted, and then freed."""

    source: TensorSlice  # what is read; its segment number follows those of RankPlan.segment_bytes
    recipe: Recipe
    region: Region  # the region of it that the rank holds
    first: int  # RankPlan.slices[first:end] are made from it
    end: int
    tensor: int = -1  # its number in the cut model
    recorded: RecordedAmax | None = None  # maxima of the cut model, when its scales follow from them

    def amax(self) -> Amax | None:
        """Return the largest absolute values per scale, for the rows that the rank holds (`RecordedAmax.part`)."""
        if self.recorded is None:
            return None
        scale = SCHEMES[self.recipe.scheme].scale
        return self.recorded.part(self.tensor, self.source.shape, scale, self.region)


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """The plan of one rank: what it reads and where it puts it."""

    rank: int  # global, 0-based
    coords: RankCoords
    slices: Sequence[TensorSlice]
    segment_bytes: tuple[int, ...]  # sizes of the device memory blocks to allocate
    chunk_ids: NDArray[np.int64]  # chunks that the rank reads from, ascending
    staged: tuple[StagedTensor, ...] = ()  # staged[i].source.segment == len(segment_bytes) + i
    segment_devices: tuple[DeviceKey, ...] = ()  # device of each segment, with a device map
    device_map: DeviceMap | None = None

    @property
    def sources(self) -> Sequence[TensorSlice]:
        """Return what is read: the slices that stay as stored, and the tensors to convert."""
        if not self.staged:
            return self.slices
        stored = (piece for piece in self.slices if not piece.made_from)
        return (*stored, *(each.source for each in self.staged))

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the rank's slices, without alignment."""
        return SliceTable.of(self.slices).size_bytes

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """Return the bytes on each device, by torch's names and "disk". Empty without a device map."""
        total: dict[str, int] = {}
        for device, size_bytes in zip(self.segment_devices, self.segment_bytes, strict=False):
            total[device_name(device)] = total.get(device_name(device), 0) + size_bytes
        return total

    @property
    def device_bytes(self) -> int:
        """Return the bytes of device memory, alignment included. With a device map, files count too."""
        return sum(self.segment_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """The decisions of a load, made before a byte of weights moves."""

    revision: str
    shards: tuple[Shard, ...]
    chunks: ChunkTable
    cut: CutModel  # every rank's plan is derived from it
    ranks: Sequence[RankPlan]  # ranks[i].rank == i; derived on access (`cluster.planning.packed_plan`)
