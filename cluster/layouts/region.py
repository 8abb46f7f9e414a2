"""What one rank holds of a tensor: ranges of indices per dimension, and zeros after them.

A tensor that holds several matrices side by side (q, k and v in one) is cut in each of them, so a rank has several
ranges of one dimension. Together, in order, they make the rank's own tensor:

    rows of a fused (12, n) tensor   q q q q q q q q k k v v       Region(((4, 8), (9, 10), (11, 12)), ((0, n),))
    rank 1 of 2                              # # # #   #   #       is a (6, n) tensor for the rank
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
    """See above. Ranges of a dimension do not overlap."""

    ranges: tuple[tuple[Range, ...], ...]  # per dimension; no range: nothing is held
    padding: int = 0  # indices of dim 0 that the rank's tensor has after them, all zero

    @property
    def filled(self) -> tuple[int, ...]:
        """Shape of what comes from the tensor."""
        return tuple(sum(end - start for start, end in ranges) for ranges in self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        filled = self.filled
        return (filled[0] + self.padding, *filled[1:]) if self.padding else filled

    @property
    def offsets(self) -> tuple[int, ...]:
        """First index held, per dimension."""
        return tuple(ranges[0][0] if ranges else 0 for ranges in self.ranges)

    @property
    def elements(self) -> int:
        """How many come from the tensor."""
        return math.prod(self.filled)

    def boxes(self) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each box of the tensor that is held, and where it begins in the rank's own tensor."""
        placed = [list(_with_places(ranges)) for ranges in self.ranges]
        for choice in itertools.product(*placed):
            sizes = tuple(end - start for (start, end), _ in choice)
            if 0 not in sizes:
                yield (tuple(start for (start, _), _ in choice), sizes), tuple(place for _, place in choice)

    def share(self, number: int, parts: int) -> Region:
        """Part `number` of `parts` along dim 0, as torch.chunk cuts the rank's own tensor: all of ceil(n / parts) but
        the last ones, which have fewer, down to none.
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
    """All of a tensor."""
    return Region(tuple(((0, size),) for size in shape))


def take(ranges: Sequence[Range], first: int, end: int) -> tuple[Range, ...]:
    """Of the indices that `ranges` hold, in order, the ones numbered first .. end - 1."""
    taken = []
    for (start, stop), place in _with_places(ranges):
        low, high = max(first - place, 0), min(end - place, stop - start)
        if low < high:
            taken.append((start + low, start + high))
    return tuple(taken)


def _index(ranges: Sequence[Range], number: int) -> int:
    """The index with that number; the end of the last range for one beyond."""
    for one, place in _with_places(ranges):
        if number < place + one[1] - one[0]:
            return one[0] + number - place
    return ranges[-1][1] if ranges else 0


def _with_places(ranges: Sequence[Range]) -> Iterator[tuple[Range, int]]:
    place = 0
    for one in ranges:
        yield one, place
        place += one[1] - one[0]
