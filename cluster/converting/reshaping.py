"""Tensors of a source cut, unstacked and joined, without a byte moved. Pure.

Frameworks store as one tensor what Hugging Face names separately: all layers, all experts, query with key and value.
The functions here return tensors whose pieces point into the same files. Only offsets and strides change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from cluster.converting.source import SourceTensor, StoredPiece
from storage.checkpoints.safetensors_header import DTYPE_BITS


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor of this shape."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def strides_of(piece: StoredPiece) -> tuple[int, ...]:
    """Return the strides of a piece, in elements, whether it names them or is dense."""
    return row_major(piece.shape) if piece.strides is None else piece.strides


def cut(tensor: SourceTensor, axis: int, start: int, end: int) -> SourceTensor:
    """Return the part `[start, end)` of a tensor along one axis.

    Args:
        tensor: Its pieces must be boxes, not runs of the flattened tensor.
        axis: The axis to cut, counted from 0.
        start: First index to keep.
        end: First index after those to keep.

    Returns:
        A tensor of the same name. Pieces outside the part are left out.
    """
    pieces = []
    for piece in tensor.pieces:
        low, high = max(piece.start[axis], start), min(piece.start[axis] + piece.shape[axis], end)
        if low < high:
            pieces.append(_narrow(piece, axis, low, high, start, tensor.dtype))
    shape = (*tensor.shape[:axis], end - start, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, pieces=tuple(pieces))


def unstack(tensor: SourceTensor) -> list[SourceTensor]:
    """Return the tensors that one holds along its first axis, in order. They keep its name.

    Each piece is looked at once, however many tensors there are.
    """
    found: list[list[StoredPiece]] = [[] for _ in range(tensor.shape[0])]
    for piece in tensor.pieces:
        for index in range(piece.start[0], piece.start[0] + piece.shape[0]):
            one = _narrow(piece, 0, index, index + 1, 0, tensor.dtype)
            strides = None if one.strides is None else one.strides[1:]
            found[index].append(replace(one, start=one.start[1:], shape=one.shape[1:], strides=strides))
    return [replace(tensor, shape=tensor.shape[1:], pieces=tuple(pieces)) for pieces in found]


def join(name: str, parts: Iterable[SourceTensor]) -> SourceTensor:
    """Return one tensor that has `parts` after one another along the first axis.

    Args:
        name: Name of the result.
        parts: At least one tensor. All have the same dtype, and the same shape apart from the first axis.
    """
    joined: list[StoredPiece] = []
    rows = 0
    for part in parts:
        joined += (replace(piece, start=(piece.start[0] + rows, *piece.start[1:])) for piece in part.pieces)
        rows += part.shape[0]
        first = part
    return SourceTensor(name, first.dtype, (rows, *first.shape[1:]), tuple(joined))


def _narrow(piece: StoredPiece, axis: int, low: int, high: int, origin: int, dtype: str) -> StoredPiece:
    """Return the part `[low, high)` of a piece along an axis, with indices counted from `origin`."""
    strides = strides_of(piece)
    shape = (*piece.shape[:axis], high - low, *piece.shape[axis + 1 :])
    skipped = (low - piece.start[axis]) * strides[axis]
    return replace(
        piece,
        offset_bytes=piece.offset_bytes + skipped * DTYPE_BITS[dtype] // 8,
        start=(*piece.start[:axis], low - origin, *piece.start[axis + 1 :]),
        shape=shape,
        strides=None if _dense(shape, strides) else strides,
    )


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides are those of a dense tensor. The stride of an axis of one element does not matter."""
    return all(size == 1 or one == wanted for size, one, wanted in zip(shape, strides, row_major(shape), strict=True))
