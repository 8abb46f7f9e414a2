"""One rank's plan, worked out from the cut model wherever it is needed: by the rank itself, its agent, a summary.

So no plan of a rank ever travels, and nobody holds the plans of a thousand ranks at once. Same input, same plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from cluster.cut_model import CutModel
from cluster.layout import RankCoords
from cluster.load_plan import RankPlan, TensorSlice
from cluster.segments import ALIGNMENT_BYTES, MemoryMap, place_in_segments
from cluster.slice_patterns import source_patterns, touched_chunks
from storage.model_index import ChunkTable

KEPT_PLANS = 8  # of different ranks, by a RankPlans


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a coordinator decides by: no rank's plan is needed for it."""

    size_bytes: int  # of the rank's slices
    device_bytes: int  # memory that they take, alignment included


def rank_facts(cut: CutModel) -> tuple[RankFacts, ...]:
    """Of every rank, in order."""
    counts = cut.kind_counts()
    one_replica = cut.layout.tensor_parallel_size * cut.layout.fsdp_size
    found: list[RankFacts] = []
    for rank in range(cut.layout.ranks):
        if rank >= one_replica:
            found.append(found[rank - one_replica])
            continue
        sizes = [piece.size_bytes for piece in cut.slices(cut.layout.rank_coords(rank))]
        padded = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        found.append(
            RankFacts(
                sum(count * size for count, size in zip(counts, sizes, strict=True)),
                sum(count * size for count, size in zip(counts, padded, strict=True)),
            )
        )
    return tuple(found)


def rank_chunks(cut: CutModel, chunks: ChunkTable, coords: RankCoords) -> NDArray[np.int64]:
    """Ids of the chunks that any slice of the rank touches, ascending."""
    return touched_chunks(source_patterns(cut, coords), chunks)


def node_chunks(cut: CutModel, chunks: ChunkTable, ranks: Iterable[int]) -> NDArray[np.int64]:
    """Chunks that any of `ranks` touches, ascending: what a node hosting those ranks fetches once."""
    needed = np.zeros(len(chunks), bool)
    for coords in {replace(cut.layout.rank_coords(rank), data=0) for rank in ranks}:
        needed[rank_chunks(cut, chunks, coords)] = True
    return np.flatnonzero(needed)


def memory_map(cut: CutModel, sizes_bytes: Sequence[int]) -> MemoryMap:
    """Where a rank puts its slices; `sizes_bytes` of a slice of each kind."""
    return place_in_segments((name, sizes_bytes[kind]) for name, kind in zip(cut.names, cut.kind.tolist(), strict=True))


def plan_rank(cut: CutModel, chunks: ChunkTable, rank: int) -> RankPlan:
    """All that one rank has to do."""
    coords = cut.layout.rank_coords(rank)
    pieces = cut.slices(coords)
    kinds = cut.kind.tolist()
    places = memory_map(cut, [piece.size_bytes for piece in pieces])
    slices = tuple(
        TensorSlice(
            name,
            cut.kinds[kind].dtype,
            cut.kinds[kind].shape,
            pieces[kind].box[0],
            pieces[kind].box[1],
            shard,
            start,
            segment,
            segment_offset,
            pieces[kind].size_bytes,
        )
        for name, kind, shard, start, segment, segment_offset in zip(
            cut.names, kinds, cut.shard.tolist(), cut.start.tolist(), places.segment, places.offset, strict=True
        )
    )
    return RankPlan(rank, coords, slices, places.segment_bytes, rank_chunks(cut, chunks, coords))


class RankPlans(Sequence[RankPlan]):
    """The plans of all ranks, each worked out when it is asked for; the last few are kept."""

    def __init__(self, cut: CutModel, chunks: ChunkTable) -> None:
        self._cut = cut
        self._chunks = chunks
        self._kept: OrderedDict[tuple[int, int], RankPlan] = OrderedDict()

    def __len__(self) -> int:
        return self._cut.layout.ranks

    @overload
    def __getitem__(self, rank: int) -> RankPlan: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[RankPlan]: ...

    def __getitem__(self, rank: int | slice) -> RankPlan | Sequence[RankPlan]:
        numbers = range(len(self))[rank]
        if isinstance(numbers, range):
            return tuple(self._plan(number) for number in numbers)
        return self._plan(numbers)

    def _plan(self, rank: int) -> RankPlan:
        coords = self._cut.layout.rank_coords(rank)
        key = coords.fsdp, coords.tensor  # a replica holds what the first one does
        plan = self._kept.pop(key, None) or plan_rank(self._cut, self._chunks, rank)
        self._kept[key] = plan
        while len(self._kept) > KEPT_PLANS:
            self._kept.popitem(last=False)
        return plan if plan.rank == rank else replace(plan, rank=rank, coords=coords)
