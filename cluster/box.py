"""Where the bytes of a box lie in its row-major tensor. Geometry only.

    the columns 2..4 of a (3, 6) tensor of 2-byte elements     . . # # . .
    are 3 runs of 4 bytes, the first at byte 4,                . . # # . .
    one every 12 bytes                                         . . # # . .     -> BoxRuns(4, 4, ((3, 12),))

In the box's own dense tensor the runs follow each other without gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


class CutsInsideByte(ValueError):
    """Elements are smaller than a byte and the box begins or ends within one."""


@dataclass(frozen=True, slots=True)
class BoxRuns:
    """The contiguous runs of a box, in the order of the box's own bytes."""

    start_bytes: int  # first byte of the box, from the start of its tensor
    run_bytes: int  # bytes of one run; 0 for an empty box
    repeats: tuple[tuple[int, int], ...]  # (count, distance in bytes) of nested repetitions, outermost first

    @property
    def count(self) -> int:
        return math.prod(count for count, _ in self.repeats)


def find_runs(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], element_bits: int) -> BoxRuns:
    """The longest runs that make up a box, and how they repeat. Raises CutsInsideByte.

    A box that is cut in one dimension, or in dim 0 and one other, has at most one level of repetition.
    """
    if 0 in sizes:
        return BoxRuns(0, 0, ())
    start = 0
    run = stride = element_bits  # while every inner dimension is whole, one step here is as long as the run
    repeats: list[tuple[int, int]] = []  # innermost first
    for full, offset, size in zip(reversed(shape), reversed(offsets), reversed(sizes), strict=True):
        start += offset * stride
        if run == stride:
            run *= size
        elif size > 1:
            if repeats and stride == repeats[-1][0] * repeats[-1][1]:
                repeats[-1] = (repeats[-1][0] * size, repeats[-1][1])
            else:
                repeats.append((size, stride))
        stride *= full
    if start % 8 or run % 8 or any(distance % 8 for _, distance in repeats):
        raise CutsInsideByte(f"box at {offsets} of {sizes} in {shape}, {element_bits} bits an element")
    return BoxRuns(start // 8, run // 8, tuple((count, distance // 8) for count, distance in reversed(repeats)))


def element_bits(shape: tuple[int, ...], size_bytes: int) -> int | None:
    """Bits of one element; 8 for an empty tensor, None when `size_bytes` does not fit the shape."""
    elements = math.prod(shape)
    if elements == 0:
        return 8 if size_bytes == 0 else None
    bits, rest = divmod(size_bytes * 8, elements)
    return None if rest or bits == 0 else bits
