"""Regions: the part of a tensor that one rank holds, as ranges of indices per dimension and zeros after them.

A tensor that holds several matrices side by side (q, k and v in one) is cut in each of them, so a rank has several
ranges of one dimension. Together, in order, they make the rank's own tensor:

    rows of a fused (12, n) tensor   q q q q q q q q k k v v       Region(((4, 8), (9, 10), (11, 12)), ((0, n),))
    rank 1 of 2                              # # # #   #   #       is a (6, n) tensor for the rank

`find_runs` returns the contiguous bytes of a box in its row-major tensor, and in the tensor that it is copied to.

    the columns 2..4 of a (3, 6) tensor of 2-byte elements     . . # # . .     into a (3, 2) tensor of their own:
    are 3 runs of 4 bytes, the first at byte 4,                . . # # . .
    one every 12 bytes                                         . . # # . .     BoxRuns(4, 0, 4, ((3, 12, 4),))

`dtensor_region` returns the region that torch's DTensor assigns to a place in a mesh of processes. Take a mesh of
2 x 2 processes and a tensor of 8 rows. The left side has `Shard(0)` on both dimensions of the mesh. The right side is
FSDP2 on a tensor that is cut already, `_StridedShard(0, split_factor=2)` then `Shard(0)`:

    rows    0 1 2 3 4 5 6 7        rows    0 1 2 3 4 5 6 7
    holder  0 0 1 1 2 2 3 3        holder  0 0 2 2 1 1 3 3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Range = tuple[int, int]  # half-open
Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, sizes)


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor that one rank holds. Ranges of a dimension do not overlap."""

    ranges: tuple[tuple[Range, ...], ...]  # ranges per dimension; no range: nothing is held
    padding: int = 0  # zero rows that the rank's tensor has after the ranges of dim 0

    @property
    def filled(self) -> tuple[int, ...]:
        """Return the shape of the part that comes from the stored tensor."""
        return tuple(sum(end - start for start, end in ranges) for ranges in self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the shape of the rank's own tensor, padding included."""
        filled = self.filled
        return (filled[0] + self.padding, *filled[1:]) if self.padding else filled

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the first index held, per dimension."""
        return tuple(ranges[0][0] if ranges else 0 for ranges in self.ranges)

    @property
    def elements(self) -> int:
        """Return how many elements come from the stored tensor."""
        return math.prod(self.filled)

    def boxes(self) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Iterate over the boxes of the tensor that are held, each with its offsets in the rank's own tensor."""
        placed = [list(_with_places(ranges)) for ranges in self.ranges]
        for choice in itertools.product(*placed):
            sizes = tuple(end - start for (start, end), _ in choice)
            if 0 not in sizes:
                yield (tuple(start for (start, _), _ in choice), sizes), tuple(place for _, place in choice)

    def share(self, number: int, parts: int) -> Region:
        """Return part `number` of `parts` along dim 0, as torch.chunk cuts the rank's own tensor.

        Every part has ceil(n / parts) rows, except the last ones, which have fewer or none.
        """
        if not self.ranges or parts == 1:
            return self
        rows = self.sizes[0]
        size = -(-rows // parts)
        first, end = min(number * size, rows), min((number + 1) * size, rows)
        filled = rows - self.padding
        kept = take(self.ranges[0], min(first, filled), min(end, filled)) or ((_index(self.ranges[0], first),) * 2,)
        return Region((kept, *self.ranges[1:]), end - first - sum(b - a for a, b in kept))


def whole(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return Region(tuple(((0, size),) for size in shape))


def take(ranges: Sequence[Range], first: int, end: int) -> tuple[Range, ...]:
    """Return the indices first .. end - 1 of those that `ranges` hold, counted in order."""
    taken = []
    for (start, stop), place in _with_places(ranges):
        low, high = max(first - place, 0), min(end - place, stop - start)
        if low < high:
            taken.append((start + low, start + high))
    return tuple(taken)


def _index(ranges: Sequence[Range], number: int) -> int:
    """Return the index with that number, or the end of the last range if there are fewer."""
    for one, place in _with_places(ranges):
        if number < place + one[1] - one[0]:
            return one[0] + number - place
    return ranges[-1][1] if ranges else 0


def _with_places(ranges: Sequence[Range]) -> Iterator[tuple[Range, int]]:
    place = 0
    for one in ranges:
        yield one, place
        place += one[1] - one[0]


class CutsInsideByte(ValueError):
    """An error: elements are smaller than a byte, and the box begins or ends within a byte."""


@dataclass(frozen=True, slots=True)
class BoxRuns:
    """The contiguous runs of a box, in the order of the box's own bytes."""

    start_bytes: int  # first byte of the box, from the start of its tensor
    dest_bytes: int  # the same in the tensor that it is copied to
    run_bytes: int  # bytes of one run; 0 for an empty box
    # (count, distance in bytes, distance in the target tensor) of nested repetitions, outermost first
    repeats: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        """Return the number of runs."""
        return math.prod(count for count, _, _ in self.repeats)


def find_runs(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    element_bits: int,
    into_shape: tuple[int, ...] | None = None,
    into_offsets: tuple[int, ...] | None = None,
) -> BoxRuns:
    """Return the longest runs that make up a box, and how they repeat. Raises CutsInsideByte.

    The box is copied to `into_offsets` of a tensor of `into_shape`, or by default to a tensor of its own. A box that is
    cut in one dimension, or in dim 0 and one other, has at most one level of repetition.
    """
    into_shape = sizes if into_shape is None else into_shape
    into_offsets = (0,) * len(sizes) if into_offsets is None else into_offsets
    if 0 in sizes:
        return BoxRuns(0, 0, 0, ())
    start = dest = 0
    run = stride = into_stride = element_bits  # equal to the stride while inner dimensions are whole
    repeats: list[tuple[int, int, int]] = []  # innermost first
    dimensions = zip(*map(reversed, (shape, offsets, sizes, into_shape, into_offsets)), strict=True)
    for full, offset, size, into_full, into_offset in dimensions:
        start += offset * stride
        dest += into_offset * into_stride
        if run == stride == into_stride:
            run *= size
        elif size > 1:
            if repeats and (stride, into_stride) == (repeats[-1][0] * repeats[-1][1], repeats[-1][0] * repeats[-1][2]):
                repeats[-1] = (repeats[-1][0] * size, *repeats[-1][1:])
            else:
                repeats.append((size, stride, into_stride))
        stride *= full
        into_stride *= into_full
    if any(bits % 8 for bits in (start, dest, run, *(bits for repeat in repeats for bits in repeat[1:]))):
        raise CutsInsideByte(f"box at {offsets} of {sizes} in {shape}, {element_bits} bits an element")
    return BoxRuns(
        start // 8, dest // 8, run // 8, tuple((count, src // 8, to // 8) for count, src, to in reversed(repeats))
    )


def element_bits(shape: tuple[int, ...], size_bytes: int) -> int | None:
    """Return the bits of one element: 8 for an empty tensor, None if `size_bytes` does not fit the shape."""
    elements = math.prod(shape)
    if elements == 0:
        return 8 if size_bytes == 0 else None
    bits, rest = divmod(size_bytes * 8, elements)
    return None if rest or bits == 0 else bits


@dataclass(frozen=True, slots=True)
class MeshCut:
    """The cut of a tensor by one dimension of the mesh."""

    dim: int  # dimension of the tensor
    parts: int  # processes along the mesh's dimension
    part: int  # the process whose share is returned
    groups: int = 1  # number of groups side by side in the dimension, each cut in parts


def dtensor_region(shape: Sequence[int], cuts: Sequence[MeshCut]) -> Region:
    """Return the region of that place. `cuts` follow the mesh's dimensions, without those that replicate."""
    ranges: list[tuple[Range, ...]] = [((0, size),) for size in shape]
    for cut in cuts:
        kept: list[Range] = []
        for first, end in _chunks(_length(ranges[cut.dim]), cut.groups):
            size = -(-(end - first) // cut.parts)
            low, high = (min(part * size, end - first) for part in (cut.part, cut.part + 1))
            kept += take(ranges[cut.dim], first + low, first + high)
        ranges[cut.dim] = tuple(kept)
    return Region(tuple(ranges))


def same_part(one: Region, other: Region) -> bool:
    """Return whether two regions hold the same elements in the same order, padding aside."""
    if 0 in one.filled or 0 in other.filled:
        return one.filled == other.filled
    return [_joined(ranges) for ranges in one.ranges] == [_joined(ranges) for ranges in other.ranges]


def _chunks(length: int, parts: int) -> list[Range]:
    """Return ranges as torch.chunk cuts: ceil(length / parts) each, the last one less, maybe fewer ranges."""
    size = -(-length // parts) or 1
    return [(first, min(first + size, length)) for first in range(0, length, size)]


def _length(ranges: Sequence[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined
