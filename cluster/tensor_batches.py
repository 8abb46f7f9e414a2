"""A rank's tensors on their way to a client, in batches of bounded size. Pure but for `tensors`, which makes tensors.

A tensor that is larger than a batch comes in several; small ones come many at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

BATCH_BYTES = 8 << 20  # a worker, the object store and a client hold two or three at once; the smallest store has 75 MB
ENTRY_BYTES = 256  # what a tensor counts beside its bytes: its name, dtype and shape travel too


class Cursor(NamedTuple):
    """Where a batch begins."""

    tensor: int = 0  # number in the rank's order
    offset: int = 0  # byte in that tensor


class Part(NamedTuple):
    """A range of bytes of a tensor."""

    tensor: int
    offset: int
    size_bytes: int


class Entry(NamedTuple):
    """One part as it travels: its bytes follow those of the parts before it."""

    name: str
    dtype: str  # attribute of the torch module
    shape: tuple[int, ...]
    whole_bytes: int  # of the tensor
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Parts of consecutive tensors."""

    entries: tuple[Entry, ...]
    data: NDArray[np.uint8]
    after: Cursor | None  # where the next batch begins; None: this was the last


def cut_batch(sizes: Iterable[int], start: Cursor, most_bytes: int) -> tuple[list[Part], Cursor | None]:
    """Choose the parts of one batch, one of each tensor from `start` on, and where the next batch begins.

    `sizes`: bytes of the rank's tensors from `start.tensor` on; no more are looked at than the batch has room for.
    """
    parts: list[Part] = []
    room, offset = most_bytes, start.offset
    for tensor, size_bytes in enumerate(sizes, start.tensor):
        room -= ENTRY_BYTES
        if parts and room <= 0:
            return parts, Cursor(tensor, offset)
        taken = min(size_bytes - offset, max(room, 1))
        parts.append(Part(tensor, offset, taken))
        room -= taken
        if offset + taken < size_bytes:
            return parts, Cursor(tensor, offset + taken)
        offset = 0
    return parts, None


def tensors(batches: Iterable[TensorBatch]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a rank's batches, in order. The tensors' memory is their own."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8)
    for batch in batches:
        start = 0
        for name, dtype, shape, whole_bytes, offset, size_bytes in batch.entries:
            if not offset:
                whole = torch.empty(whole_bytes, dtype=torch.uint8)
            # Copied: what Ray hands out is a read-only view of its object store, which is small.
            whole.numpy()[offset : offset + size_bytes] = batch.data[start : start + size_bytes]
            start += size_bytes
            if offset + size_bytes == whole_bytes:
                yield name, whole.view(getattr(torch, dtype)).reshape(shape)
