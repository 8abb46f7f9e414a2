"""Where the bytes of a box lie in its row-major tensor, and in the one that it is copied to. Geometry only.

the columns 2..4 of a (3, 6) tensor of 2-byte elements     . . # # . .     into a (3, 2) tensor of their own:
are 3 runs of 4 bytes, the first at byte 4,                . . # # . .
one every 12 bytes                                         . . # # . .     BoxRuns(4, 0, 4, ((3, 12, 4),))
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
    dest_bytes: int  # and from the start of the tensor that it is copied to
    run_bytes: int  # bytes of one run; 0 for an empty box
    # (count, distance in bytes, distance where it is copied to) of nested repetitions, outermost first
    repeats: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        return math.prod(count for count, _, _ in self.repeats)


def find_runs(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    element_bits: int,
    into_shape: tuple[int, ...] | None = None,
    into_offsets: tuple[int, ...] | None = None,
) -> BoxRuns:
    """The longest runs that make up a box, and how they repeat. Raises CutsInsideByte.

    It is copied to `into_offsets` of a tensor of `into_shape`; to a tensor of its own without. A box that is cut in one
    dimension, or in dim 0 and one other, has at most one level of repetition.
    """
    into_shape = sizes if into_shape is None else into_shape
    into_offsets = (0,) * len(sizes) if into_offsets is None else into_offsets
    if 0 in sizes:
        return BoxRuns(0, 0, 0, ())
    start = dest = 0
    run = stride = into_stride = element_bits  # while inner dimensions are whole, one step is as long as the run
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
    """Bits of one element; 8 for an empty tensor, None when `size_bytes` does not fit the shape."""
    elements = math.prod(shape)
    if elements == 0:
        return 8 if size_bytes == 0 else None
    bits, rest = divmod(size_bytes * 8, elements)
    return None if rest or bits == 0 else bits
