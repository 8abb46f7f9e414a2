"""Where the bytes of slices lie in the shards and in a rank's memory, before chunks cut them: 2-D patterns.

A pattern is `count` runs of `run` bytes, `src_stride` apart in the shard. A box cut in one dimension is one pattern.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.layouts.box import BoxRuns, find_runs
from cluster.layouts.mesh import RankCoords
from cluster.layouts.region import Region
from cluster.plans.cut_model import CutModel
from cluster.plans.load_plan import TensorSlice
from storage.checkpoints.model_index import ChunkTable

_Column = NDArray[np.int64]
_Part = tuple[int, int, int, int, int, int]  # src, run, count, src_stride, dest, dest_stride


@dataclass(frozen=True, slots=True, eq=False)
class SourcePatterns:
    """Columns of patterns, as far as the store is concerned."""

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
    """The patterns of slices, in their order. Raises CutsInsideByte, and ValueError for a size that does not fit."""
    known: dict[tuple[object, ...], list[_Part]] = {}  # slices that are cut alike have the same parts
    rows: list[tuple[int, ...]] = []
    for piece in slices:
        if piece.filled_bytes == 0:
            continue
        alike = (piece.shape, piece.region, piece.filled_bytes)
        parts = known.get(alike)
        if parts is None:
            parts = known[alike] = _parts(piece.shape, piece.region, piece.filled_bytes)
        for src, run, count, src_stride, dest, dest_stride in parts:
            rows.append(
                (
                    piece.shard,
                    piece.start + src,
                    run,
                    count,
                    src_stride,
                    piece.segment,
                    piece.segment_offset + dest,
                    dest_stride,
                )
            )
    columns = np.array(rows, np.int64).reshape(-1, 8).T
    return Patterns(*np.ascontiguousarray(columns))


def source_patterns(cut: CutModel, coords: RankCoords) -> SourcePatterns:
    """The same patterns as `find_patterns` gives for the slices of the rank at `coords`, without making slices."""
    parts_of_kind = [
        _parts(kind.shape, piece.reads, piece.filled_bytes) if piece.filled_bytes else []
        for kind, piece in zip(cut.kinds, cut.slices(coords), strict=True)
    ]
    counts = np.array([len(parts) for parts in parts_of_kind], np.int64)
    first = np.cumsum(counts) - counts
    table = np.array([part for parts in parts_of_kind for part in parts], np.int64).reshape(-1, 6)
    here = cut.tensors_of(coords)
    repeats = counts[cut.kind[here]] if len(here) else np.empty(0, np.int64)
    tensor = np.repeat(here, repeats)
    within = np.arange(len(tensor)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    src, run, count, src_stride, _, _ = table[first[cut.kind[tensor]] + within].T
    return SourcePatterns(
        cut.shard[tensor].astype(np.int64),
        cut.start[tensor] + src,
        run,
        count,
        src_stride,
    )


def pair_with_chunks(patterns: SourcePatterns, chunks: ChunkTable) -> tuple[_Column, _Column, _Column, _Column]:
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


def touched_runs(
    patterns: SourcePatterns, pattern: _Column, low: _Column, high: _Column
) -> tuple[_Column, _Column, NDArray[np.bool_]]:
    """For each pair, runs first .. end - 1 of the pattern have bytes in the chunk; and whether there are any."""
    run = patterns.run[pattern]
    stride = patterns.src_stride[pattern]
    first = np.maximum((low - run) // stride + 1, 0)
    end = np.minimum(-(-high // stride), patterns.count[pattern])
    return first, end, (first < end) & (low < high)


def touched_chunks(patterns: SourcePatterns, chunks: ChunkTable) -> _Column:
    """Ids of the chunks in which a pattern has bytes, ascending."""
    if not len(patterns.shard) or not len(chunks):
        return np.empty(0, np.int64)
    pattern, chunk, low, high = pair_with_chunks(patterns, chunks)
    _, _, touched = touched_runs(patterns, pattern, low, high)
    found = np.zeros(len(chunks), bool)
    found[chunk[touched]] = True
    return np.flatnonzero(found).astype(np.int64, copy=False)


def _parts(shape: tuple[int, ...], region: Region, filled_bytes: int) -> list[_Part]:
    """The patterns of one region, from the tensor's first byte and the slice's own."""
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
    """Nested repetitions as (src, dest, count, src_stride, dest_stride): one level kept, others enumerated.

    The level with the most runs is kept. A box that is cut in one dimension has one level at most; stacked experts
    that are cut in their columns have two.
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
