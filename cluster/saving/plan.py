"""The plan of a save: who puts which part together, and who sends what to whom. Pure, and equal on every rank.

    part of a file: [ tensor a, rows 5..9 ][ tensor b ][ tensor c, rows 0..2 ]
    rank 0 holds most of it --> it is the assembler; ranks 1 and 3 send it their bytes, one message each

Each rank goes through all parts and keeps what concerns it. The bytes of a region in a part are consecutive in the
local tensor of its holder, because both are in row-major order. So a message is a slice of local memory, and only the
assembler, which puts it in place, deals with rows (`blocks`).

Work goes in rounds. In each, a rank assembles at most `per_round` parts, so the bytes that it holds for others are
bounded, whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cluster.layouts.region import Region
from cluster.saving.held import Regions, SavedTensor, bytes_before
from cluster.saving.shards import ShardLayout


class Piece(NamedTuple):
    """Bytes of one region of one tensor in one part."""

    tensor: int  # number of the saved tensor
    region: int  # number of its region
    start: int  # first byte in the tensor of the range that the part has of it
    end: int
    local_start: int  # first byte in the holder's own tensor
    local_end: int

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes that the holder contributes."""
        return self.local_end - self.local_start


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A part, its assembler, and what each rank contributes."""

    shard: int
    part: int
    assembler: int
    sources: dict[int, list[Piece]]  # rank -> its pieces, in the order of the part's bytes

    def message_bytes(self, rank: int) -> int:
        """Return the size of what that rank contributes."""
        return sum(piece.size_bytes for piece in self.sources.get(rank, ()))


def plan_parts(
    layouts: Sequence[ShardLayout], tensors: Sequence[SavedTensor], world_size: int, *, in_order: bool = False
) -> Iterator[PlannedPart]:
    """Yield every part of the checkpoint, in the order of the files.

    The assembler is a rank that owns at least half as much of the part as the one that owns most. Of these it is the
    one with the least to write so far. Of several holders of a region the assembler is preferred, then the rank that
    has sent the least. With `in_order`, one rank assembles all parts of a file, chosen in the same way.
    """

    def choose(owned: np.ndarray) -> int:
        able = np.flatnonzero(owned * 2 >= owned.max())
        return int(able[np.lexsort((able, -owned[able], writes[able]))[0]])

    def owned_by_rank(regions: Regions, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        region_of, rank_of = regions.holders
        return np.bincount(rank_of, weights=(high - low)[region_of], minlength=world_size)

    number_of = {tensor.spec.name: number for number, tensor in enumerate(tensors)}
    writes = np.zeros(world_size, np.int64)
    sends = [0] * world_size
    for shard, layout in enumerate(layouts):
        inside = [tensor for tensor in layout.tensors if tensor.end > tensor.start]
        first = 0
        if in_order:
            owned = np.zeros(world_size)
            for stored in inside:
                regions = tensors[number_of[stored.name]].regions
                owned += owned_by_rank(regions, regions.before(0), regions.before(stored.end - stored.start))
            assembler = choose(owned)
        for part, place in enumerate(layout.parts):
            while first < len(inside) and inside[first].end <= place.start:
                first += 1
            shares: list[tuple[int, int, int, np.ndarray, np.ndarray]] = []
            owned = np.zeros(world_size)
            for stored in inside[first:]:
                if stored.start >= place.end:
                    break
                number = number_of[stored.name]
                regions = tensors[number].regions
                start = max(place.start - stored.start, 0)
                end = min(place.end, stored.end) - stored.start
                low, high = regions.before(start), regions.before(end)
                shares.append((number, start, end, low, high))
                owned += owned_by_rank(regions, low, high)
            if not in_order:
                assembler = choose(owned)
            writes[assembler] += place.size_bytes
            sources: dict[int, list[Piece]] = {}
            for number, start, end, low, high in shares:
                held = tensors[number].regions.held
                for region in np.flatnonzero(high > low).tolist():
                    holders = held[region][1]
                    if len(holders) == 1 or assembler not in holders:
                        source = holders[0] if len(holders) == 1 else min(holders, key=lambda rank: (sends[rank], rank))
                    else:
                        source = assembler
                    piece = Piece(number, region, start, end, int(low[region]), int(high[region]))
                    sources.setdefault(source, []).append(piece)
                    if source != assembler:
                        sends[source] += piece.size_bytes
            yield PlannedPart(shard, part, assembler, sources)


@dataclass(slots=True)
class Round:
    """The work of one rank in one round."""

    assemble: list[PlannedPart] = field(default_factory=list)
    send: list[tuple[int, int, list[Piece]]] = field(default_factory=list)  # (assembler, tag, pieces)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds of one rank. All ranks have the same number of them."""

    rounds: tuple[Round, ...]
    moved_bytes: int  # by all ranks, over the process group

    @property
    def largest_round(self) -> int:
        """Return the most parts that this rank assembles in a round."""
        return max((len(one.assemble) for one in self.rounds), default=0)


def schedule(
    layouts: Sequence[ShardLayout],
    tensors: Sequence[SavedTensor],
    world_size: int,
    rank: int,
    per_round: int,
    *,
    in_order: bool = False,
) -> Schedule:
    """Return what one rank does in each round. A message's tag is the number of the part in its assembler's list."""
    counts = [0] * world_size
    rounds: list[Round] = []
    moved = 0
    for part in plan_parts(layouts, tensors, world_size, in_order=in_order):
        tag = counts[part.assembler]
        counts[part.assembler] += 1
        number = tag // per_round
        while len(rounds) <= number:
            rounds.append(Round())
        if part.assembler == rank:
            rounds[number].assemble.append(part)
        elif rank in part.sources:
            rounds[number].send.append((part.assembler, tag, part.sources[rank]))
        moved += sum(part.message_bytes(source) for source in part.sources if source != part.assembler)
    return Schedule(tuple(rounds), moved)


class Block(NamedTuple):
    """Runs of bytes at equal distances, in the range of a tensor and in a message."""

    into: int  # first byte, counted from the start of the range
    source: int  # first byte in the message
    times: int  # number of runs
    into_step: int  # from run to run
    source_step: int
    run: int  # bytes of a run


def blocks(shape: Sequence[int], region: Region, start: int, end: int) -> Iterator[Block]:
    """Yield where the bytes of a region go in the range [start, end) of its row-major tensor of bytes."""
    shape, region = _simplified(shape, region)
    base = bytes_before(shape, region, start)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    last = max((dim for dim in range(len(shape)) if region.ranges[dim] != ((0, shape[dim]),)), default=0)

    def walk(dim: int, row: int) -> Iterator[Block]:
        stride = strides[dim]
        for low, high in region.ranges[dim]:
            if dim == last:
                first, stop = max(row + low * stride, start), min(row + high * stride, end)
                if first < stop:
                    yield Block(first - start, bytes_before(shape, region, first) - base, 1, 0, 0, stop - first)
                continue
            # rows that the range touches, and those that it has whole
            touched = max(low, (start - row) // stride), min(high, -(-(end - row) // stride))
            index = touched[0]
            while index < touched[1]:
                whole_rows = 0
                if dim == last - 1 and row + index * stride >= start:
                    whole_rows = min(touched[1], (end - row) // stride) - index
                if whole_rows <= 0:
                    yield from walk(dim + 1, row + index * stride)
                    index += 1
                    continue
                held = sum(stop - first for first, stop in region.ranges[last]) * strides[last]
                for first, stop in region.ranges[last]:
                    at = row + index * stride + first * strides[last]
                    source = bytes_before(shape, region, at) - base
                    yield Block(at - start, source, whole_rows, stride, held, (stop - first) * strides[last])
                index += whole_rows

    yield from walk(0, 0)


def _simplified(shape: Sequence[int], region: Region) -> tuple[tuple[int, ...], Region]:
    """Return the same bytes with neighbouring whole dimensions taken as one, which makes longer runs and fewer rows."""
    sizes: list[int] = []
    ranges: list[tuple[tuple[int, int], ...]] = []
    for size, held in zip(shape, region.ranges, strict=True):
        if sizes and held == ((0, size),) and ranges[-1] == ((0, sizes[-1]),):
            sizes[-1] *= size
            ranges[-1] = ((0, sizes[-1]),)
        else:
            sizes.append(size)
            ranges.append(held)
    return tuple(sizes), Region(tuple(ranges))
