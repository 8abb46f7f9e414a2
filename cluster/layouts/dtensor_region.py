"""Which part of a tensor a place in a mesh of processes holds, as torch's DTensor deals it out. Plain numbers only.

A mesh of 2 x 2 processes, a tensor of 8 rows; `Shard(0)` on both dimensions of the mesh, and what FSDP2 makes of a
tensor that is cut already, `_StridedShard(0, split_factor=2)` then `Shard(0)`:

    rows    0 1 2 3 4 5 6 7        rows    0 1 2 3 4 5 6 7
    holder  0 0 1 1 2 2 3 3        holder  0 0 2 2 1 1 3 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.layouts.region import Range, Region, take


@dataclass(frozen=True, slots=True)
class MeshCut:
    """What one dimension of the mesh does to a tensor that it cuts."""

    dim: int  # of the tensor
    parts: int  # processes along the mesh's dimension
    part: int  # the one whose share is asked for
    groups: int = 1  # the dimension is so many groups side by side, each cut in parts


def dtensor_region(shape: Sequence[int], cuts: Sequence[MeshCut]) -> Region:
    """What that place holds; `cuts` in the order of the mesh's dimensions, without those that replicate."""
    ranges: list[tuple[Range, ...]] = [((0, size),) for size in shape]
    for cut in cuts:
        kept: list[Range] = []
        for first, end in _chunks(_length(ranges[cut.dim]), cut.groups):
            share = _chunks(end - first, cut.parts)
            low, high = share[cut.part] if cut.part < len(share) else (end - first,) * 2
            kept += take(ranges[cut.dim], first + low, first + high)
        ranges[cut.dim] = tuple(kept)
    return Region(tuple(ranges))


def same_part(one: Region, other: Region) -> bool:
    """Whether two regions hold the same elements in the same order, padding aside."""
    if 0 in one.filled or 0 in other.filled:
        return one.filled == other.filled
    return [_joined(ranges) for ranges in one.ranges] == [_joined(ranges) for ranges in other.ranges]


def _chunks(length: int, parts: int) -> list[Range]:
    """As torch.chunk deals out: all of ceil(length / parts) but the last ones; fewer when that is enough."""
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
