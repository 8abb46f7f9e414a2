"""From slices and chunks to copies: which bytes of a chunk go where in a rank's memory.

A read item is a 2-D strided copy: `count` runs of `run_bytes`, `src_stride` apart in the chunk and
`dest_stride` apart in the segment. A box that is cut in one dimension repeats one run at one distance, so a
chunk needs at most three items for it, however many rows it has:

    rows of the tensor   |..####....|..####....|..####....|..####....|      #: wanted by this rank
    one chunk                 [                              ]
    its read items            ^^       ^^^^       ^^^^       ^
                              head     whole runs, 2-D       tail

Items are columns of numbers, not objects: a rank of a 70B model has tens of thousands.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.box import BoxRuns, element_bits, find_runs
from cluster.load_plan import TensorSlice
from storage.model_index import ChunkTable

_Column = NDArray[np.int64]


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
        """Bytes that all copies write."""
        return int((self.run_bytes * self.count).sum())

    def for_chunk(self, chunk_id: int) -> slice:
        """The rows of one chunk, as in `items.count[items.for_chunk(7)]`; empty when it is not needed."""
        first, end = np.searchsorted(self.chunk, (chunk_id, chunk_id + 1))
        return slice(int(first), int(end))

    def chunk_ids(self) -> _Column:
        """The chunks that any item reads, ascending."""
        return np.unique(self.chunk)


def expand_read_items(slices: Sequence[TensorSlice], chunks: ChunkTable) -> ReadItems:
    """Every copy that fills `slices` from `chunks`, in (chunk, src_offset) order.

    Bytes of a slice that lie in no chunk get no item: `planning` refuses such a plan. Raises CutsInsideByte
    for a slice of sub-byte elements that begins or ends within a byte.
    """
    return _cut_at_chunks(_find_patterns(slices), chunks)


@dataclass(frozen=True, slots=True, eq=False)
class _Patterns:
    """Columns of 2-D patterns: whole repetitions, not yet cut by chunks."""

    shard: _Column
    start: _Column  # first byte in the shard's file
    run: _Column
    count: _Column
    src_stride: _Column
    segment: _Column
    dest: _Column
    dest_stride: _Column


def _find_patterns(slices: Sequence[TensorSlice]) -> _Patterns:
    rows: list[tuple[int, ...]] = []
    for piece in slices:
        if piece.size_bytes == 0:
            continue
        bits = element_bits(piece.sizes, piece.size_bytes)
        if bits is None:
            raise ValueError(f"{piece.name!r:.200}: {piece.size_bytes} bytes do not fit the sizes {piece.sizes}")
        runs = find_runs(piece.shape, piece.offsets, piece.sizes, bits)
        start = piece.start + runs.start_bytes
        if not runs.repeats:
            run = runs.run_bytes
            rows.append((piece.shard, start, run, 1, run, piece.segment, piece.segment_offset, run))
            continue
        for src, dest, count, src_stride, dest_stride in _two_dimensional(runs):
            rows.append(
                (
                    piece.shard,
                    start + src,
                    runs.run_bytes,
                    count,
                    src_stride,
                    piece.segment,
                    piece.segment_offset + dest,
                    dest_stride,
                )
            )
    columns = np.array(rows, np.int64).reshape(-1, 8).T
    return _Patterns(*np.ascontiguousarray(columns))


def _two_dimensional(runs: BoxRuns) -> list[tuple[int, int, int, int, int]]:
    """Nested repetitions as (src, dest, count, src_stride, dest_stride): one level kept, others enumerated.

    The level with the most runs is kept. Layouts of today make one level; two need cuts in two dimensions,
    neither of them dim 0.
    """
    levels = []  # (count, src_stride, dest_stride), innermost first
    dest_stride = runs.run_bytes
    for count, src_stride in reversed(runs.repeats):
        levels.append((count, src_stride, dest_stride))
        dest_stride *= count
    kept = levels.pop(max(range(len(levels)), key=lambda level: levels[level][0]))
    return [
        (
            sum(i * src for i, (_, src, _) in zip(at, levels, strict=True)),
            sum(i * dest for i, (_, _, dest) in zip(at, levels, strict=True)),
            *kept,
        )
        for at in itertools.product(*(range(count) for count, _, _ in levels))
    ]


def _cut_at_chunks(patterns: _Patterns, chunks: ChunkTable) -> ReadItems:
    if not len(patterns.shard) or not len(chunks):
        return ReadItems(*(np.empty(0, np.int64) for _ in range(8)))
    pattern, chunk, low, high = _pair_with_chunks(patterns, chunks)
    run = patterns.run[pattern]
    stride = patterns.src_stride[pattern]
    # Runs first .. end - 1 have bytes in [low, high), counted from the pattern's first byte.
    first = np.maximum((low - run) // stride + 1, 0)
    end = np.minimum(-(-high // stride), patterns.count[pattern])
    touched = np.flatnonzero((first < end) & (low < high))
    pattern, chunk, low, high, run, stride, first, end = (
        column[touched] for column in (pattern, chunk, low, high, run, stride, first, end)
    )
    last = end - 1
    cut_first = low > first * stride
    cut_last = high < last * stride + run
    single = first == last
    # The run cut by the chunk's start, or the only run of this chunk, whichever of its ends are cut.
    head = np.flatnonzero(cut_first | (single & cut_last))
    tail = np.flatnonzero(cut_last & ~single)
    whole_first = first.copy()
    whole_first[head] += 1
    whole_count = last + 1 - whole_first
    whole_count[tail] -= 1
    whole = np.flatnonzero(whole_count > 0)

    head_start = np.maximum(first * stride, low)[head]
    head_end = np.minimum(first * stride + run, high)[head]
    row = np.concatenate((head, whole, tail))  # of the pairs
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


def _pair_with_chunks(patterns: _Patterns, chunks: ChunkTable) -> tuple[_Column, _Column, _Column, _Column]:
    """Every (pattern, chunk) that overlap, and the chunk's [low, high) from the pattern's first byte."""
    span = (patterns.count - 1) * patterns.src_stride + patterns.run
    # One axis for all shards: the shards' files laid end to end.
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
