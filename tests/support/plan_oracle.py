"""A slow check of plans: works out each read item of each rank and lists what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from cluster.layouts.region import CutsInsideByte
from cluster.planning.plan import LoadPlan, RankPlan, TensorSlice
from cluster.planning.read_items import ALIGNMENT_BYTES, ReadItems, expand_read_items
from cluster.precision.recipes import region_bytes
from storage.checkpoints.model_index import ChunkTable, Shard


def check_plan(plan: LoadPlan) -> list[str]:
    """Return the problems of a plan; none means that carrying it out writes every byte of every slice once."""
    problems = list(_chunk_problems(plan.chunks, plan.shards))
    if problems:
        return problems  # read items mean nothing then
    for number, rank in enumerate(plan.ranks):
        if rank.rank != number:
            problems.append(f"rank {rank.rank} stands at place {number}")
        problems.extend(f"rank {rank.rank}: {problem}" for problem in _rank_problems(rank, plan))
    return problems


def _chunk_problems(chunks: ChunkTable, shards: Sequence[Shard]) -> Iterator[str]:
    if not len(chunks):
        return
    if int(chunks.shard.min()) < 0 or int(chunks.shard.max()) >= len(shards):
        yield f"a chunk lies in none of the {len(shards)} shards"
    elif bool((chunks.end > np.array([shard.size_bytes for shard in shards], np.int64)[chunks.shard]).any()):
        yield "a chunk reaches beyond its shard"
    if bool((chunks.start < 0).any() or (chunks.end <= chunks.start).any()):
        yield "a chunk has no bytes"
    same = chunks.shard[1:] == chunks.shard[:-1]
    if bool((chunks.shard[1:] < chunks.shard[:-1]).any() or (same & (chunks.start[1:] < chunks.end[:-1])).any()):
        yield "chunks overlap or are not in order"


def _rank_problems(rank: RankPlan, plan: LoadPlan) -> Iterator[str]:
    sound = []
    for piece in rank.slices:
        if problem := _slice_problem(piece, rank.segment_bytes, len(plan.shards)):
            yield f"{piece.name!r:.200} {problem}"
        else:
            sound.append(piece)
    for number, staged in enumerate(rank.staged, len(rank.segment_bytes)):
        if staged.source.segment != number or not _fits(staged.source) or staged.source.segment_offset:
            yield f"{staged.source.name!r:.200} is staged in a place that does not fit it"
            return
    if len({piece.name for piece in rank.slices}) != len(rank.slices):
        yield "a tensor appears twice"
    filled = sorted((piece for piece in sound if piece.size_bytes), key=lambda p: (p.segment, p.segment_offset))
    for before, after in pairwise(filled):
        if before.segment == after.segment and before.segment_offset + before.size_bytes > after.segment_offset:
            yield f"{before.name!r:.200} and {after.name!r:.200} overlap in segment {after.segment}"
    if len(sound) < len(rank.slices):
        return
    try:
        items = expand_read_items(rank.sources, plan.chunks)
    except CutsInsideByte as exc:
        yield f"a slice is cut inside a byte: {exc}"
        return
    if not np.array_equal(items.chunk_ids(), rank.chunk_ids):
        yield "chunk_ids are not the chunks its slices touch, ascending"
    read = sorted((piece for piece in rank.sources if piece.size_bytes), key=lambda p: (p.segment, p.segment_offset))
    written = _bytes_per_segment_place(items, read)
    for piece, size_bytes in zip(read, written, strict=True):
        if size_bytes != piece.filled_bytes:
            yield f"{piece.name!r:.200} has {piece.filled_bytes} bytes, of which the chunks hold {size_bytes}"


def _slice_problem(piece: TensorSlice, segment_bytes: tuple[int, ...], shards: int) -> str | None:
    if len(piece.shape) != len(piece.region.ranges):
        return "has a region of another rank than its shape"
    for full, ranges in zip(piece.shape, piece.region.ranges, strict=True):
        bounds = [bound for one in ranges for bound in one]
        if bounds != sorted(bounds) or (bounds and (bounds[0] < 0 or bounds[-1] > full)):
            return f"has the ranges {ranges} outside its shape {piece.shape}, or not in order"
    if not 0 <= piece.filled_bytes <= piece.size_bytes or not _fits(piece):
        return f"has {piece.filled_bytes} of {piece.size_bytes} bytes for {piece.sizes}"
    if not 0 <= piece.shard < shards or piece.start < 0:
        return "lies in no shard"
    if not 0 <= piece.segment < len(segment_bytes) or piece.segment_offset < 0:
        return "lies in no segment"
    if piece.segment_offset % ALIGNMENT_BYTES:
        return f"is not aligned to {ALIGNMENT_BYTES} bytes"
    if piece.segment_offset + piece.size_bytes > segment_bytes[piece.segment]:
        return "reaches beyond its segment"
    return None


def _fits(piece: TensorSlice) -> bool:
    """Return whether the bytes are exactly that many elements of one size."""
    held, all_of_it = piece.region.elements, math.prod(piece.sizes)
    if piece.made_from:
        return piece.filled_bytes == 0 and piece.size_bytes == region_bytes(piece.region, piece.dtype)
    if not held:
        return piece.filled_bytes == 0 and bool(all_of_it) == bool(piece.size_bytes)
    bits, rest = divmod(piece.filled_bytes * 8, held)
    return bits > 0 and not rest and all_of_it * bits == piece.size_bytes * 8


def _bytes_per_segment_place(items: ReadItems, filled: Sequence[TensorSlice]) -> list[int]:
    """Bytes that the items write from each slice's place to the next one's; `filled` in that order."""
    if not filled:
        return []
    segment = np.array([piece.segment for piece in filled])
    offset = np.array([piece.segment_offset for piece in filled])
    order = np.lexsort((items.dest_offset, items.segment))
    # Both sides are sorted by (segment, offset): the place of each item is the last slice that begins before
    # it.
    width = np.int64(max(int(offset.max()), int(items.dest_offset.max(initial=0))) + 1)
    place = np.searchsorted(segment * width + offset, (items.segment * width + items.dest_offset)[order], "right") - 1
    written = np.zeros(len(filled), np.int64)
    np.add.at(written, place, (items.run_bytes * items.count)[order])
    return [int(size) for size in written]
