"""The plan of a conversion: which bytes of which file become which bytes of a part. Pure.

    part of a file to write = runs of tensors = boxes of tensors, cut with the pieces of the source
        box of a piece --> Read: bytes of one file, which hold the box with its strides
                           Copy: the box's place and strides in the part

A run of a tensor's bytes need not begin or end at a row. `boxes_of` divides it into at most 2 x dimensions - 1 boxes.
A box whose elements are far apart in its file is divided further, so that a read has at most `max_read_bytes` and
hardly more bytes than are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.converting.reshaping import row_major, strides_of
from cluster.converting.source import SourceTensor, StoredPiece
from storage.checkpoints.safetensors_header import DTYPE_BITS
from storage.problems import Problems, quote

Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and sizes, per dimension
SPARSE = 4  # a read may have that many times the bytes that are needed of it
SMALL_READ_BYTES = 256 << 10  # or be smaller than this


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy: bytes `[offset_bytes, offset_bytes + read_bytes)` of a file, into a part.

    `shape` counts elements, strides are in bytes. The first element is the first of the read.
    """

    file: str
    offset_bytes: int
    read_bytes: int
    shape: tuple[int, ...]
    from_strides: tuple[int, ...]
    to_offset_bytes: int  # of the first element, from the start of the part
    to_strides: tuple[int, ...]


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Yield boxes that hold elements `[start, end)` of a tensor in row-major order, each once.

    Args:
        shape: Of the tensor; () is one element.
        start: First element.
        end: First element after the run.
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, at = divmod(start, row)
    last, rest = divmod(end, row)
    if at or first == last:
        stop = min(end - first * row, row)
        yield from _in_row(first, shape, at, stop)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if rest and last >= first:
        yield from _in_row(last, shape, 0, rest)


def _in_row(index: int, shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    for low, sizes in boxes_of(shape[1:], start, end):
        yield (index, *low), (1, *sizes)


def copies_of(
    tensor: SourceTensor, start: int, end: int, place: int, itemsize: int, max_read_bytes: int
) -> Iterator[Copy]:
    """Yield the copies that fill elements `[start, end)` of a tensor.

    Args:
        tensor: Its pieces cover it, and do not overlap.
        start: First element, in row-major order.
        end: First element after the run.
        place: Place of element `start` in the part, in bytes.
        itemsize: Bytes of an element in the part. It differs from the source's if the tensor is cast.
        max_read_bytes: Most bytes of one read, at least one element.
    """
    source_size = DTYPE_BITS[tensor.dtype] // 8
    size = math.prod(tensor.shape)
    for flat in (True, False):
        pieces = [piece for piece in tensor.pieces if piece.flat is flat]
        shape = (size,) if flat else tensor.shape
        steps = row_major(shape)
        for low, sizes in boxes_of(shape, start, end) if pieces else ():
            for piece in pieces:
                cut = _intersection(low, sizes, piece)
                if cut is None:
                    continue
                at, counts = cut
                strides = strides_of(piece)
                skipped = sum((i - j) * step for i, j, step in zip(at, piece.start, strides, strict=True))
                first = sum(i * step for i, step in zip(at, steps, strict=True)) - start
                whole = Copy(
                    piece.file,
                    piece.offset_bytes + skipped * source_size,
                    _span(counts, strides) * source_size,
                    counts,
                    tuple(step * source_size for step in strides),
                    place + first * itemsize,
                    tuple(step * itemsize for step in steps),
                )
                yield from _divided(whole, source_size, max_read_bytes)


def _intersection(low: Sequence[int], sizes: Sequence[int], piece: StoredPiece) -> Box | None:
    at = tuple(max(i, j) for i, j in zip(low, piece.start, strict=True))
    counts = tuple(
        min(i + n, j + m) - k for i, n, j, m, k in zip(low, sizes, piece.start, piece.shape, at, strict=True)
    )
    return (at, counts) if all(count > 0 for count in counts) else None


def _span(counts: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements from the first to the last of a box, both included."""
    return 1 + sum((count - 1) * step for count, step in zip(counts, strides, strict=True))


def _divided(copy: Copy, itemsize: int, max_read_bytes: int) -> Iterator[Copy]:
    """Yield a copy in pieces that read few bytes in vain and at most `max_read_bytes` at once."""
    useful = math.prod(copy.shape) * itemsize
    dense = copy.read_bytes <= max(SPARSE * useful, SMALL_READ_BYTES)
    if copy.read_bytes <= max_read_bytes and dense:
        yield copy
        return
    axes = [axis for axis, count in enumerate(copy.shape) if count > 1]
    if not axes:
        yield copy
        return
    axis = max(axes, key=lambda axis: copy.from_strides[axis] * (copy.shape[axis] - 1))
    step = copy.from_strides[axis]
    inner = copy.read_bytes - (copy.shape[axis] - 1) * step
    many = 1 if step > SPARSE * inner else max(1, (max_read_bytes - inner) // max(step, 1) + 1)
    for index in range(0, copy.shape[axis], many):
        count = min(many, copy.shape[axis] - index)
        one = replace(
            copy,
            offset_bytes=copy.offset_bytes + index * step,
            read_bytes=inner + (count - 1) * step,
            shape=(*copy.shape[:axis], count, *copy.shape[axis + 1 :]),
            to_offset_bytes=copy.to_offset_bytes + index * copy.to_strides[axis],
        )
        if count == copy.shape[axis]:
            yield one  # it cannot be divided further along this axis
        else:
            yield from _divided(one, itemsize, max_read_bytes)


def coverage_problems(tensor: SourceTensor) -> Problems:
    """Return what is wrong with the pieces of a tensor: holes, overlaps, places outside of it."""
    problems = Problems()
    name = quote(tensor.name)
    size = math.prod(tensor.shape)
    boxes = []
    for piece in tensor.pieces:
        shape = (size,) if piece.flat else tensor.shape
        rank_fits = len(piece.start) == len(piece.shape) == len(shape)
        if not rank_fits or any(
            low < 0 or count < 0 or low + count > whole
            for low, count, whole in zip(piece.start, piece.shape, shape, strict=False)
        ):
            problems.add(f"{name}: {quote(piece.file)} has a part outside of its shape {list(tensor.shape)}")
            return problems
        if math.prod(piece.shape):
            boxes.append(piece)
    held = sum(math.prod(piece.shape) for piece in boxes)
    if _overlap(boxes):
        problems.add(f"{name}: parts of it overlap")
    elif held < size:
        problems.add(f"{name}: {size - held} of {size} elements are in no file")
    if DTYPE_BITS[tensor.dtype] % 8 and (len(boxes) > 1 or any(piece.strides is not None for piece in boxes)):
        problems.add(f"{name}: parts of {tensor.dtype} tensors cannot be joined, as elements share bytes")
    return problems


def _overlap(pieces: Sequence[StoredPiece]) -> bool:
    """Return whether two pieces share an element. Sorts along the axis that separates them best."""
    if len({piece.flat for piece in pieces}) > 1:
        return True  # no framework mixes both; nothing is guessed
    if len(pieces) < 2:
        return False
    if not pieces[0].start:
        return True  # a tensor without dimensions has one element
    axis = max(range(len(pieces[0].start)), key=lambda axis: len({piece.start[axis] for piece in pieces}))
    ordered = sorted(pieces, key=lambda piece: piece.start[axis])
    active: list[StoredPiece] = []
    for piece in ordered:
        active = [other for other in active if other.start[axis] + other.shape[axis] > piece.start[axis]]
        if any(_intersection(piece.start, piece.shape, other) is not None for other in active):
            return True
        active.append(piece)
    return False
