"""A load plan as it is sent: tables that each node receives once, and facts for the coordinator's decisions.

Agents and workers unpack the same tables and derive what their ranks touch and hold. So what the coordinator sends
grows with nodes, not with ranks times tensors. Only messages between our own processes are unpickled, never stored
data.

`plan_rank` derives the plan of one rank from the cut model wherever it is needed: by the rank, its agent or a summary.
So no plan of a rank is ever sent, and no process holds the plans of a thousand ranks at once. Same input, same plan.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from cluster.fit.device_map import DeviceKey, device_order
from cluster.layouts.mesh import Layout, RankCoords
from cluster.planning.cut_model import CutModel, KindSlice
from cluster.planning.plan import LoadPlan, RankPlan, SliceKind, SliceTable, StagedTensor, TensorSlice
from cluster.planning.read_items import (
    ALIGNMENT_BYTES,
    MemoryMap,
    place_in_segments,
    place_on_devices,
    source_patterns,
    touched_chunks,
)
from cluster.telemetry.stats import ProcessMemory
from storage.checkpoints.model_index import ChunkTable, Shard


def staging_room(sizes_bytes: Sequence[tuple[int, int]], chunk_bytes: int) -> int:
    """Return the most bytes that are staged at once, for tensors given as (size, count) in chunks of `chunk_bytes`.

    Tensors are filled in the order of the plan, so one tensor is incomplete at a time. While the chunk that completes
    it is copied, whole small tensors in that chunk and the beginning of one more may be staged too.
    """
    total_bytes = sum(size * count for size, count in sizes_bytes)
    return min(total_bytes, 2 * max((size for size, count in sizes_bytes if count), default=0) + chunk_bytes)


KEPT_PLANS = 8  # plans of different ranks that a RankPlans keeps


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The sizes of one rank. The coordinator decides by them and needs no rank's plan."""

    size_bytes: int  # bytes of the rank's slices
    device_bytes: int  # device memory of the slices, alignment included
    read_bytes: int  # bytes that it copies out of chunks; not `size_bytes` when tensors are converted
    staging_bytes: int = 0  # peak memory beside the slices, for tensors that are still to be converted
    devices: tuple[tuple[DeviceKey, int], ...] = ()  # share of device_bytes of each device, with a device map


def rank_facts(cut: CutModel, chunk_bytes: int = 0) -> tuple[RankFacts, ...]:
    """Return the facts of every rank, in order.

    `chunk_bytes` is the size of the model's largest chunk, which may hold many small tensors.
    """
    found: dict[RankCoords, RankFacts] = {}
    places = [cut.layout.place(cut.layout.rank_coords(rank)) for rank in range(cut.layout.ranks)]
    counts_of: dict[tuple[int, int], list[int]] = {}
    for coords in places:
        if coords in found:
            continue
        who = coords.stage, coords.expert
        counts = counts_of[who] if who in counts_of else counts_of.setdefault(who, cut.kind_counts(coords))
        pieces = cut.slices(coords)
        padded = [sum(-(-size // ALIGNMENT_BYTES) for size in piece.sizes_bytes) * ALIGNMENT_BYTES for piece in pieces]
        staged = [
            (piece.read_bytes, count)
            for kind, piece, count in zip(cut.kinds, pieces, counts, strict=True)
            if kind.recipe is not None
        ]
        devices = () if cut.device_map is None else _bytes_by_device(memory_map(cut, coords, pieces))
        found[coords] = RankFacts(
            sum(count * piece.size_bytes for count, piece in zip(counts, pieces, strict=True)),
            sum(size for _, size in devices) or sum(count * size for count, size in zip(counts, padded, strict=True)),
            sum(count * piece.filled_bytes for count, piece in zip(counts, pieces, strict=True)),
            staging_room(staged, chunk_bytes),
            devices,
        )
    return tuple(found[coords] for coords in places)


def rank_chunks(cut: CutModel, chunks: ChunkTable, coords: RankCoords) -> NDArray[np.int64]:
    """Return the ids of the chunks that the rank reads from, ascending."""
    return touched_chunks(source_patterns(cut, coords), chunks)


def node_chunks(cut: CutModel, chunks: ChunkTable, ranks: Iterable[int]) -> NDArray[np.int64]:
    """Return the chunks that any of `ranks` touches, ascending. A node that hosts those ranks fetches each once."""
    needed = np.zeros(len(chunks), bool)
    for coords in cut.places(ranks):
        needed[rank_chunks(cut, chunks, coords)] = True
    return np.flatnonzero(needed)


def memory_map(cut: CutModel, coords: RankCoords, pieces: Sequence[KindSlice]) -> MemoryMap:
    """Return the places of a rank's slices in its memory, in order. `pieces` is indexed by kind."""
    kinds = cut.kind.tolist()
    slices = [
        (cut.names[at], size_bytes)
        for at in cut.tensors_of(coords).tolist()
        for size_bytes in pieces[kinds[at]].sizes_bytes
    ]
    if cut.device_map is None:
        return place_in_segments(slices)
    return place_on_devices(slices, cut.device_map.assign([name for name, _ in slices]))


def _bytes_by_device(memory: MemoryMap) -> tuple[tuple[DeviceKey, int], ...]:
    total: Counter[DeviceKey] = Counter()
    for device, size_bytes in zip(memory.segment_devices, memory.segment_bytes, strict=True):
        total[device] += size_bytes
    return tuple(sorted(total.items(), key=lambda each: device_order(each[0])))


def plan_rank(cut: CutModel, chunks: ChunkTable, rank: int) -> RankPlan:
    """Return the plan of one rank."""
    coords = cut.layout.rank_coords(rank)
    pieces = cut.slices(coords)
    here = cut.tensors_of(coords)
    memory = memory_map(cut, coords, pieces)
    slices = _slice_table(cut, here, pieces, memory)
    staged: list[StagedTensor] = []
    outputs = np.array([len(piece.outputs) for piece in pieces], np.int64)[cut.kind[here]]
    first = np.cumsum(outputs) - outputs  # number of each tensor's first slice
    converted = np.array([kind.recipe is not None for kind in cut.kinds], bool)
    for row in np.flatnonzero(converted[cut.kind[here]]).tolist():
        at = int(here[row])
        kind, piece = cut.kinds[cut.kind[at]], pieces[cut.kind[at]]
        place = (int(cut.shard[at]), int(cut.start[at]), len(memory.segment_bytes) + len(staged), 0)
        source = TensorSlice(
            cut.names[at], kind.dtype, kind.shape, piece.reads, *place, piece.read_bytes, piece.filled_bytes
        )
        made = int(first[row]), int(first[row] + outputs[row])
        if kind.recipe is not None:
            staged.append(
                StagedTensor(source, kind.recipe, piece.region, *made, at, cut.amax if kind.recorded else None)
            )
    touched = rank_chunks(cut, chunks, coords)
    return RankPlan(
        rank,
        coords,
        slices,
        memory.segment_bytes,
        touched,
        tuple(staged),
        memory.segment_devices,
        cut.device_map,
    )


def _slice_table(cut: CutModel, here: NDArray[np.int64], pieces: Sequence[KindSlice], memory: MemoryMap) -> SliceTable:
    """Return the slices of the tensors `here`, in order. `pieces` is indexed by kind."""
    kinds: list[SliceKind] = []
    outputs = [len(piece.outputs) for piece in pieces]
    for kind, piece in zip(cut.kinds, pieces, strict=True):
        for output, size_bytes in zip(piece.outputs, piece.sizes_bytes, strict=True):
            made = (0, output.form, output.suffix) if kind.recipe else (piece.filled_bytes, output.form)
            kinds.append(SliceKind(output.dtype, output.shape, output.region, size_bytes, *made))
    counts = np.array(outputs, np.int64)[cut.kind[here]]
    rows = np.repeat(here, counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    kind_of = (np.cumsum(outputs) - outputs)[cut.kind[rows]] + within
    names: Sequence[str] = (
        [cut.names[at] for at in rows.tolist()] if not len(here) == len(rows) == len(cut) else cut.names
    )
    if any(kind.suffix for kind in kinds):
        suffixes = [kind.suffix or "" for kind in kinds]
        names = [name + suffixes[number] for name, number in zip(names, kind_of.tolist(), strict=True)]
    return SliceTable(
        tuple(kinds),
        names,
        kind_of.astype(np.int32),
        cut.shard[rows],
        cut.start[rows],
        np.array(memory.segment, np.int32),
        np.array(memory.offset, np.int64),
    )


class RankPlans(Sequence[RankPlan]):
    """The plans of all ranks. Each is derived on access, and the last few are kept."""

    def __init__(self, cut: CutModel, chunks: ChunkTable) -> None:
        self._cut = cut
        self._chunks = chunks
        self._kept: OrderedDict[RankCoords, RankPlan] = OrderedDict()

    def __len__(self) -> int:
        return self._cut.layout.ranks

    def __iter__(self) -> Iterator[RankPlan]:
        # Sequence.__iter__ stops silently at an IndexError, so a bug in a plan would look like no ranks.
        return map(self._plan, range(len(self)))

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
        key = self._cut.layout.place(coords)  # all replicas hold the same slices
        plan = self._kept.pop(key, None) or plan_rank(self._cut, self._chunks, rank)
        self._kept[key] = plan
        while len(self._kept) > KEPT_PLANS:
            self._kept.popitem(last=False)
        return plan if plan.rank == rank else replace(plan, rank=rank, coords=coords)


@dataclass(frozen=True, slots=True, eq=False)
class SharedTables:
    """The tables that all ranks and agents of one load share."""

    shards: tuple[Shard, ...]
    chunks: ChunkTable
    cut: CutModel

    def chunk_ids(self, rank: int) -> NDArray[np.int64]:
        """Return the ids of the chunks that the rank touches, ascending."""
        return rank_chunks(self.cut, self.chunks, self.cut.layout.rank_coords(rank))

    def parts(self, ranks: Iterable[int]) -> Hashable:
        """Return a value that is equal for ranks that hold the same parts of the model."""
        return frozenset(self.cut.places(ranks))

    def rank_plan(self, rank: int) -> RankPlan:
        """Return the plan of one rank."""
        return plan_rank(self.cut, self.chunks, rank)

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        """Return the bytes of the model that at least one of `ranks` holds."""
        return self.cut.wanted_bytes(ranks)


@dataclass(frozen=True, slots=True, eq=False)
class ReaderTables(SharedTables):
    """The tables of a group of readers (`actors.reader`). Any of them may read any chunk."""

    @classmethod
    def of(cls, shards: tuple[Shard, ...], chunks: ChunkTable) -> ReaderTables:
        """Return the tables of readers of a model with these shards and chunks."""
        none = np.empty(0, np.int32)
        return cls(shards, chunks, CutModel(Layout(), (), (), (), none, none, none, np.empty(0, np.int64)))

    def chunk_ids(self, rank: int) -> NDArray[np.int64]:
        """Return the ids of all chunks."""
        return np.arange(len(self.chunks))

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        """Return the bytes of all chunks."""
        return int(self.chunks.sizes_bytes().sum())


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlan:
    """A load plan as the planning process returns it."""

    revision: str
    verified: str  # hash name, or "transport"
    model_bytes: int
    ranks: tuple[RankFacts, ...]
    shared: bytes = field(repr=False)  # pickled SharedTables
    signed_by: str = ""  # id of the trusted key that signed the manifest
    memory: ProcessMemory | None = None  # memory of the planning process
    quantization_config: dict[str, Any] | None = None  # see cluster.precision.written_quantization

    def outline(self) -> PackedPlan:
        """Return the fields that a report of the load needs, without those that grow with ranks and tensors."""
        return replace(self, ranks=(), shared=b"")

    def with_ranks(self, ranks: tuple[RankFacts, ...], shared: bytes) -> PackedPlan:
        """Return the plan of the same model with these ranks and their tables."""
        return replace(self, ranks=ranks, shared=shared)


def with_layout(tables: SharedTables, layout: Layout) -> SharedTables:
    """Return the tables of the same model with another number of replicas (`Layout.with_replicas`)."""
    return replace(tables, cut=replace(tables.cut, layout=layout))


def pack_shared(plan: LoadPlan) -> bytes:
    """Pickle the tables that all ranks share."""
    return pickle.dumps(SharedTables(plan.shards, plan.chunks, plan.cut), protocol=5)


def unpack_shared(data: bytes) -> SharedTables:
    """Unpickle what `pack_shared` returned, from a process of our own."""
    tables: SharedTables = pickle.loads(data)
    return tables
