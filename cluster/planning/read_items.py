"""Read items: the copies that fill a rank's slices from chunks, and the places of slices in the rank's memory.

A read item is a 2-D strided copy: `count` runs of `run_bytes`, `src_stride` apart in the chunk and `dest_stride` apart
in the segment. A box that is cut in one dimension repeats one run at one distance. So a chunk needs at most three items
for it, however many rows it has:

    rows of the tensor   |..####....|..####....|..####....|..####....|      #: needed by this rank
    one chunk                 [                              ]
    its read items            ^^       ^^^^       ^^^^       ^
                              head     whole runs, 2-D       tail

Items are columns of numbers, not objects, because a rank of a 70B model has tens of thousands.

A *pattern* is the same copy before chunks divide it: `count` runs of `run` bytes, `src_stride` apart in the shard. A
box that is cut in one dimension is one pattern.

A *segment* is a block of memory that is allocated whole. Tensors of one layer share segments, so that an engine that
repacks a layer can free it. A segment has at most 512 MiB unless one tensor alone is larger. Tensors begin at multiples
of 256 bytes. With a device map each segment is on one device. On disk a segment is a file with one tensor and no
padding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.fit.device_map import DISK, DeviceKey
from cluster.layouts.mesh import RankCoords
from cluster.layouts.region import BoxRuns, Region, find_runs
from cluster.planning.cut_model import CutModel
from cluster.planning.plan import SliceTable, TensorSlice
from storage.checkpoints.model_index import ChunkTable

_Column = NDArray[np.int64]
_Part = tuple[int, int, int, int, int, int]  # src, run, count, src_stride, dest, dest_stride


@dataclass(frozen=True, slots=True, eq=False)
class SourcePatterns:
    """Columns of patterns in the shards."""

    shard: _Column
    start: _Column  # first byte in the shard's file
    run: _Column
    count: _Column
    src_stride: _Column


@dataclass(frozen=True, slots=True, eq=False)
class Patterns(SourcePatterns):
    """Columns of patterns, with their places in a rank's memory."""

    segment: _Column
    dest: _Column
    dest_stride: _Column


def find_patterns(slices: Sequence[TensorSlice]) -> Patterns:
    """Return the patterns of slices, in their order. Raises CutsInsideByte, or ValueError for a wrong size."""
    table = SliceTable.of(slices)
    parts_of_kind = [
        _parts(kind.shape, kind.region, kind.filled_bytes) if kind.filled_bytes else [] for kind in table.kinds
    ]
    row, (src, run, count, src_stride, dest, dest_stride) = _expand_parts(parts_of_kind, table.kind)
    return Patterns(
        table.shard[row].astype(np.int64),
        table.start[row] + src,
        run,
        count,
        src_stride,
        table.segment[row].astype(np.int64),
        table.segment_offset[row] + dest,
        dest_stride,
    )


def _expand_parts(parts_of_kind: Sequence[list[_Part]], kind: NDArray[np.int32]) -> tuple[_Column, Sequence[_Column]]:
    """Return the number of each part's tensor, and the parts in columns, for tensors of these kinds."""
    counts = np.array([len(parts) for parts in parts_of_kind], np.int64)
    first = np.cumsum(counts) - counts
    table = np.array([part for parts in parts_of_kind for part in parts], np.int64).reshape(-1, 6)
    repeats = counts[kind] if len(kind) else np.empty(0, np.int64)
    row = np.repeat(np.arange(len(kind)), repeats)
    within = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return row, [np.ascontiguousarray(column) for column in table[first[kind[row]] + within].T]


def source_patterns(cut: CutModel, coords: RankCoords) -> SourcePatterns:
    """Return the patterns of the rank's slices, as `find_patterns` does, without making the slices."""
    parts_of_kind = [
        _parts(kind.shape, piece.reads, piece.filled_bytes) if piece.filled_bytes else []
        for kind, piece in zip(cut.kinds, cut.slices(coords), strict=True)
    ]
    here = cut.tensors_of(coords)
    row, (src, run, count, src_stride, _, _) = _expand_parts(parts_of_kind, cut.kind[here])
    tensor = here[row]
    return SourcePatterns(
        cut.shard[tensor].astype(np.int64),
        cut.start[tensor] + src,
        run,
        count,
        src_stride,
    )


def pair_with_chunks(patterns: SourcePatterns, chunks: ChunkTable) -> tuple[_Column, _Column, _Column, _Column]:
    """Return each (pattern, chunk) that overlap, and the chunk's [low, high) from the pattern's first byte."""
    span = (patterns.count - 1) * patterns.src_stride + patterns.run
    # Lay the files of all shards end to end, on one axis.
    shards = int(max(patterns.shard.max(), chunks.shard.max())) + 1
    length = np.zeros(shards, np.int64)
    np.maximum.at(length, patterns.shard, patterns.start + span)
    np.maximum.at(length, chunks.shard, chunks.end)
    base = np.cumsum(length) - length
    begin = base[patterns.shard] + patterns.start
    chunk_begin = base[chunks.shard] + chunks.start
    chunk_end = base[chunks.shard] + chunks.end

    first = np.searchsorted(chunk_end, begin, side="right")
    end = np.searchsorted(chunk_begin, begin + span, side="left")
    counts = np.maximum(end - first, 0)
    pattern = np.repeat(np.arange(len(counts)), counts)
    chunk = first[pattern] + np.arange(len(pattern)) - (np.cumsum(counts) - counts)[pattern]
    return pattern, chunk, chunk_begin[chunk] - begin[pattern], chunk_end[chunk] - begin[pattern]


def touched_runs(
    patterns: SourcePatterns, pattern: _Column, low: _Column, high: _Column
) -> tuple[_Column, _Column, NDArray[np.bool_]]:
    """Return, for each pair, the runs first .. end - 1 of the pattern with bytes in the chunk, and if there are any."""
    run = patterns.run[pattern]
    stride = patterns.src_stride[pattern]
    first = np.maximum((low - run) // stride + 1, 0)
    end = np.minimum(-(-high // stride), patterns.count[pattern])
    return first, end, (first < end) & (low < high)


def touched_chunks(patterns: SourcePatterns, chunks: ChunkTable) -> _Column:
    """Return the ids of the chunks in which a pattern has bytes, ascending."""
    if not len(patterns.shard) or not len(chunks):
        return np.empty(0, np.int64)
    pattern, chunk, low, high = pair_with_chunks(patterns, chunks)
    _, _, touched = touched_runs(patterns, pattern, low, high)
    found = np.zeros(len(chunks), bool)
    found[chunk[touched]] = True
    return np.flatnonzero(found).astype(np.int64, copy=False)


def _parts(shape: tuple[int, ...], region: Region, filled_bytes: int) -> list[_Part]:
    """Return the patterns of one region, with offsets from the first bytes of the tensor and of the slice."""
    bits, rest = divmod(filled_bytes * 8, region.elements)
    if rest or not bits:
        raise ValueError(f"{filled_bytes} bytes do not fit {region.elements} elements")
    parts: list[_Part] = []
    for (offsets, sizes), place in region.boxes():
        runs = find_runs(shape, offsets, sizes, bits, region.sizes, place)
        run = runs.run_bytes
        parts += [
            (runs.start_bytes + src, run, count, src_stride, runs.dest_bytes + dest, dest_stride)
            for src, dest, count, src_stride, dest_stride in _two_dimensional(runs)
        ]
    return parts


def _two_dimensional(runs: BoxRuns) -> list[tuple[int, int, int, int, int]]:
    """Return nested repetitions as (src, dest, count, src_stride, dest_stride): one level kept, others enumerated.

    The level with the most runs is kept. A box that is cut in one dimension has at most one level. Stacked experts that
    are cut in their columns have two.
    """
    if not runs.repeats:
        return [(0, 0, 1, runs.run_bytes, runs.run_bytes)]
    levels = list(runs.repeats)
    kept = levels.pop(max(range(len(levels)), key=lambda level: levels[level][0]))
    return [
        (
            sum(i * src for i, (_, src, _) in zip(at, levels, strict=True)),
            sum(i * dest for i, (_, _, dest) in zip(at, levels, strict=True)),
            *kept,
        )
        for at in itertools.product(*(range(count) for count, _, _ in levels))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class ReadItems:
    """Columns of n copies, ordered by (chunk, src_offset)."""

    chunk: _Column  # (n,) id of the chunk the bytes come from
    src_offset: _Column  # (n,) first byte, from the start of the chunk
    segment: _Column  # (n,) index into RankPlan.segment_bytes
    dest_offset: _Column  # (n,) first byte in that segment
    run_bytes: _Column  # (n,) contiguous bytes of one run, at least 1
    count: _Column  # (n,) runs, at least 1
    src_stride: _Column  # (n,) bytes from run to run in the chunk; run_bytes when count is 1
    dest_stride: _Column  # (n,) bytes from run to run in the segment; run_bytes when count is 1

    def __len__(self) -> int:
        return len(self.chunk)

    @property
    def size_bytes(self) -> int:
        """Return the bytes that all copies write."""
        return int((self.run_bytes * self.count).sum())

    def for_chunk(self, chunk_id: int) -> slice:
        """Return the rows of one chunk, as in `items.count[items.for_chunk(7)]`. Empty if it is not needed."""
        first, end = np.searchsorted(self.chunk, (chunk_id, chunk_id + 1))
        return slice(int(first), int(end))

    def copies(self, rows: slice) -> Iterator[tuple[int, int, int, int, int, int, int]]:
        """Iterate over (segment, src_offset, dest_offset, run_bytes, count, src_stride, dest_stride) of these rows."""
        columns = (self.segment, self.src_offset, self.dest_offset, self.run_bytes, self.count)
        return zip(*(column[rows].tolist() for column in (*columns, self.src_stride, self.dest_stride)), strict=True)

    def chunk_bytes(self) -> dict[int, int]:
        """Return chunk id -> bytes that the items read of it, for every chunk that they read."""
        if not len(self):
            return {}
        ids, first = np.unique(self.chunk, return_index=True)
        wanted = np.add.reduceat(self.run_bytes * self.count, first)
        return dict(zip(ids.tolist(), wanted.tolist(), strict=True))

    def chunk_ids(self) -> _Column:
        """Return the ids of the chunks that any item reads, ascending."""
        return np.unique(self.chunk)


def whole_chunks(items: ReadItems, chunks: ChunkTable, max_parts: int) -> _Column:
    """Return the ids of chunks of which every byte is needed, in at most `max_parts` contiguous pieces, ascending.

    Such a chunk can be received at its place in memory, without a slot in between.
    """
    if not len(items):
        return np.empty(0, np.int64)
    ids, first, parts = np.unique(items.chunk, return_index=True, return_counts=True)
    wanted = np.add.reduceat(items.run_bytes * items.count, first)
    runs = np.add.reduceat(items.count, first)
    # Each byte of a chunk belongs to one tensor only, so equal sums mean that every byte is needed.
    whole: _Column = ids[(wanted == chunks.sizes_bytes()[ids]) & (runs == parts) & (parts <= max_parts)]
    return whole


def expand_read_items(slices: Sequence[TensorSlice], chunks: ChunkTable) -> ReadItems:
    """Return every copy that fills `slices` from `chunks`, in (chunk, src_offset) order.

    Bytes of a slice that lie in no chunk get no item; `build_load_plan` refuses such a plan. Raises CutsInsideByte for
    a slice of sub-byte elements that begins or ends within a byte.
    """
    return _cut_at_chunks(find_patterns(slices), chunks)


def _cut_at_chunks(patterns: Patterns, chunks: ChunkTable) -> ReadItems:
    if not len(patterns.shard) or not len(chunks):
        return ReadItems(*(np.empty(0, np.int64) for _ in range(8)))
    pattern, chunk, low, high = pair_with_chunks(patterns, chunks)
    first, end, any_runs = touched_runs(patterns, pattern, low, high)
    touched = np.flatnonzero(any_runs)
    pattern, chunk, low, high, first, end = (column[touched] for column in (pattern, chunk, low, high, first, end))
    run, stride = patterns.run[pattern], patterns.src_stride[pattern]
    last = end - 1
    cut_first = low > first * stride
    cut_last = high < last * stride + run
    single = first == last
    # The run that the chunk's start cuts, or the only run of this chunk, at whichever end it is cut.
    head = np.flatnonzero(cut_first | (single & cut_last))
    tail = np.flatnonzero(cut_last & ~single)
    whole_first = first.copy()
    whole_first[head] += 1
    whole_count = last + 1 - whole_first
    whole_count[tail] -= 1
    whole = np.flatnonzero(whole_count > 0)

    head_start = np.maximum(first * stride, low)[head]
    head_end = np.minimum(first * stride + run, high)[head]
    row = np.concatenate((head, whole, tail))  # indexes of the pairs
    run_index = np.concatenate((first[head], whole_first[whole], last[tail]))
    begin = np.concatenate((head_start, (whole_first * stride)[whole], (last * stride)[tail]))
    run_bytes = np.concatenate((head_end - head_start, run[whole], (high - last * stride)[tail]))
    count = np.concatenate((np.ones_like(head), whole_count[whole], np.ones_like(tail)))

    source = pattern[row]
    inside_run = begin - run_index * stride[row]
    alone = count == 1
    items = ReadItems(
        chunk=chunk[row],
        src_offset=begin - low[row],
        segment=patterns.segment[source],
        dest_offset=patterns.dest[source] + run_index * patterns.dest_stride[source] + inside_run,
        run_bytes=run_bytes,
        count=count,
        src_stride=np.where(alone, run_bytes, stride[row]),
        dest_stride=np.where(alone, run_bytes, patterns.dest_stride[source]),
    )
    order = np.lexsort((items.src_offset, items.chunk))
    return ReadItems(*(getattr(items, name)[order] for name in ReadItems.__slots__))


SEGMENT_BYTES = 512 << 20  # largest segment that several tensors share
ALIGNMENT_BYTES = 256

_LAYER = re.compile(r"(?:^|.*?\.)[0-9]+(?=\.|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """The places of n slices, in the order they were given."""

    segment: tuple[int, ...]  # (n,) index into segment_bytes
    offset: tuple[int, ...]  # (n,) first byte inside the segment
    segment_bytes: tuple[int, ...]  # multiples of 256, except files; (0,) if all slices are empty
    segment_devices: tuple[DeviceKey, ...] = ()  # device of each segment, with a device map


def place_in_segments(slices: Iterable[tuple[str, int]], limit_bytes: int = SEGMENT_BYTES) -> MemoryMap:
    """Return places for slices given as (tensor name, size in bytes). Same input, same places.

    An empty slice takes no bytes and lies at the start of segment 0.
    """
    segment: list[int] = []
    offset: list[int] = []
    segment_bytes: list[int] = []
    open_segment: dict[str, int] = {}  # layer -> the segment for its next small tensor
    layer = ""  # of the tensor before
    beginning: str | tuple[()] = ()  # of all other names in that layer
    for name, size_bytes in slices:
        padded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if padded == 0:
            segment.append(0)
            offset.append(0)
            continue
        if not name.startswith(beginning):
            layer = layer_of(name)
            beginning = f"{layer}." if layer else ()
        current = target = open_segment.get(layer)
        if target is None or segment_bytes[target] + padded > limit_bytes:
            target = len(segment_bytes)
            segment_bytes.append(0)
            # The layer's next tensors go to the old or the new segment, whichever has more room.
            if padded <= limit_bytes and (current is None or padded < segment_bytes[current]):
                open_segment[layer] = target
        segment.append(target)
        offset.append(segment_bytes[target])
        segment_bytes[target] += padded
    if segment and not segment_bytes:
        segment_bytes.append(0)
    return MemoryMap(tuple(segment), tuple(offset), tuple(segment_bytes))


def place_on_devices(
    slices: Sequence[tuple[str, int]], devices: Sequence[DeviceKey], limit_bytes: int = SEGMENT_BYTES
) -> MemoryMap:
    """Return places for slices on several devices. `devices` has the device of each slice."""
    segment = [0] * len(slices)
    offset = [0] * len(slices)
    segment_bytes: list[int] = []
    segment_devices: list[DeviceKey] = []
    for device in dict.fromkeys(devices):
        here = [number for number, each in enumerate(devices) if each == device]
        if device == DISK:
            for number in here:
                segment[number] = len(segment_bytes)
                segment_bytes.append(slices[number][1])
                segment_devices.append(device)
            continue
        places = place_in_segments([slices[number] for number in here], limit_bytes)
        for number, at, start in zip(here, places.segment, places.offset, strict=True):
            segment[number], offset[number] = len(segment_bytes) + at, start
        segment_bytes += places.segment_bytes
        segment_devices += [device] * len(places.segment_bytes)
    return MemoryMap(tuple(segment), tuple(offset), tuple(segment_bytes), tuple(segment_devices))


def layer_of(name: str) -> str:
    """Return the name up to its first number, such as `model.layers.7`, or "" for a name without numbers."""
    match = _LAYER.match(name)
    return match.group() if match else ""
