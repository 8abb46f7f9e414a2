"""How much memory a rank has for tensors that are still to be converted, beside what it holds in the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def staging_room(sizes_bytes: Sequence[tuple[int, int]], chunk_bytes: int) -> int:
    """Of tensors (size, how many of it), with chunks of at most `chunk_bytes`: the most that is staged at once.

    Tensors begin in the order of the plan. So there is one that is not complete, and while the chunk that completes it
    is copied there may be whole small ones in that chunk, and the beginning of one more.
    """
    total_bytes = sum(size * count for size, count in sizes_bytes)
    return min(total_bytes, 2 * max((size for size, count in sizes_bytes if count), default=0) + chunk_bytes)
