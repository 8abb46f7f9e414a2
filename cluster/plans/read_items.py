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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.plans.load_plan import TensorSlice
from cluster.plans.slice_patterns import Patterns, find_patterns, pair_with_chunks, touched_runs
from storage.checkpoints.model_index import ChunkTable

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

    def chunk_bytes(self) -> dict[int, int]:
        """chunk id -> bytes that are wanted of it, for every chunk that any item reads."""
        if not len(self):
            return {}
        ids, first = np.unique(self.chunk, return_index=True)
        wanted = np.add.reduceat(self.run_bytes * self.count, first)
        return dict(zip(ids.tolist(), wanted.tolist(), strict=True))

    def chunk_ids(self) -> _Column:
        """The chunks that any item reads, ascending."""
        return np.unique(self.chunk)


def whole_chunks(items: ReadItems, chunks: ChunkTable, max_parts: int) -> _Column:
    """Chunks of which every byte is wanted, in `max_parts` contiguous pieces at most: ids, ascending.

    Such a chunk can be received where it belongs, without a slot in between.
    """
    if not len(items):
        return np.empty(0, np.int64)
    ids, first, parts = np.unique(items.chunk, return_index=True, return_counts=True)
    wanted = np.add.reduceat(items.run_bytes * items.count, first)
    runs = np.add.reduceat(items.count, first)
    # Bytes of a chunk belong to one tensor each, so as many wanted bytes as there are bytes means all of them.
    whole: _Column = ids[(wanted == chunks.sizes_bytes()[ids]) & (runs == parts) & (parts <= max_parts)]
    return whole


def expand_read_items(slices: Sequence[TensorSlice], chunks: ChunkTable) -> ReadItems:
    """Every copy that fills `slices` from `chunks`, in (chunk, src_offset) order.

    Bytes of a slice that lie in no chunk get no item: `planning` refuses such a plan. Raises CutsInsideByte
    for a slice of sub-byte elements that begins or ends within a byte.
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
