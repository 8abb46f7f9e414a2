"""What a load plan is: frozen data. `cluster.planning.make_plan` makes it, `actors.rank.executor` carries it out.

    LoadPlan -- cut, chunks                                       small: this is what travels
             -- ranks --> RankPlan -- slices --> TensorSlice     which part of which tensor, where it is put
                                   -- chunk_ids                  the chunks those parts touch, in the order of leasing

Plans of ranks are worked out from the cut (`cluster.planning.rank_plans`), read items (`cluster.planning.read_items`)
from slices and chunks, by the same pure functions wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What one rank holds of one tensor, and its place in the rank's memory.

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
    filled_bytes: int  # of them, from the store; zeros follow. 0 when it is made from another tensor
    made_from: str = ""  # name of the stored tensor that it is made from on its way in; "": it is stored so
    form: tuple[int, ...] = ()  # of the rank's own tensor, in formats that lay it out flat; empty: as the region has it

    @property
    def offsets(self) -> tuple[int, ...]:
        """First index that is held, per dimension."""
        return self.region.offsets

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        return self.form or self.region.sizes


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A stored tensor that is converted on its way in: read into memory of its own, which is given up then."""

    source: TensorSlice  # what is read; its segment is none of RankPlan.segment_bytes, but a number after them
    recipe: Recipe
    region: Region  # what the rank holds of it
    first: int  # the tensors that are made from it: RankPlan.slices[first:end]
    end: int
    tensor: int = -1  # its number in the cut model
    recorded: RecordedAmax | None = None  # of the cut model, when its scales follow from them

    def amax(self) -> Amax | None:
        """The largest absolute values of what shares a scale, of the rows that the rank holds (`RecordedAmax.part`)."""
        if self.recorded is None:
            return None
        scale = SCHEMES[self.recipe.scheme].scale
        return self.recorded.part(self.tensor, self.source.shape, scale, self.region)


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """All that one rank has to do."""

    rank: int  # global, 0-based
    coords: RankCoords
    slices: tuple[TensorSlice, ...]
    segment_bytes: tuple[int, ...]  # sizes of the device memory blocks to allocate
    chunk_ids: NDArray[np.int64]  # chunks that anything is read from, ascending
    staged: tuple[StagedTensor, ...] = ()  # staged[i].source.segment == len(segment_bytes) + i
    segment_devices: tuple[DeviceKey, ...] = ()  # of each segment, with a device map; none is on two
    device_map: DeviceMap | None = None

    @property
    def sources(self) -> tuple[TensorSlice, ...]:
        """What is read: slices that are held as they are stored, and tensors to convert."""
        if not self.staged:
            return self.slices
        stored = (piece for piece in self.slices if not piece.made_from)
        return (*stored, *(each.source for each in self.staged))

    @property
    def size_bytes(self) -> int:
        """Bytes of the rank's slices, without alignment."""
        return sum(piece.size_bytes for piece in self.slices)

    @property
    def bytes_by_device(self) -> dict[str, int]:
        """With a device map: what each device has of it, by torch's names and "disk". Else none."""
        total: dict[str, int] = {}
        for device, size_bytes in zip(self.segment_devices, self.segment_bytes, strict=False):
            total[device_name(device)] = total.get(device_name(device), 0) + size_bytes
        return total

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory the rank takes, alignment included; of files too, with a device map."""
        return sum(self.segment_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """What a load will do, decided before a byte of weights moves."""

    revision: str
    shards: tuple[Shard, ...]
    chunks: ChunkTable
    cut: CutModel  # what every rank's plan is worked out from
    ranks: Sequence[RankPlan]  # ranks[i].rank == i; each made when it is asked for (`cluster.planning.rank_plans`)
