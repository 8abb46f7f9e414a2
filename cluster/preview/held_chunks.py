"""What nodes have of a model's chunks already, and what that spares a load. Pure.

keys of all chunks --> node agents --> HeldChunks of each --> NodeSources: bytes by source, in the words of LoadReport
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.reports.report import ModelStatus
from storage.arena.slots import KEY_BYTES

BLOCK_CHUNKS = 4096  # that an agent looks for at once: its ranks wait meanwhile


@dataclass(frozen=True, slots=True)
class HeldChunks:
    """Of the chunks that a node was asked about, in their order: a bit each, packed as numpy does."""

    count: int
    arena: bytes
    disk: bytes

    @classmethod
    def of(cls, held: Sequence[tuple[bool, bool]]) -> HeldChunks:
        """From (in the arena, on disk) of each chunk."""
        arena, disk = (np.packbits(bits).tobytes() for bits in np.array(held, bool).reshape(-1, 2).T)
        return cls(len(held), arena, disk)

    def in_arena(self) -> NDArray[np.bool_]:
        return self._bits(self.arena)

    def on_disk(self) -> NDArray[np.bool_]:
        return self._bits(self.disk)

    def _bits(self, packed: bytes) -> NDArray[np.bool_]:
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=self.count).astype(bool)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a cluster has of a model."""

    nodes: Mapping[str, HeldChunks | str]  # by node id; why nothing is known of a node
    resident: ModelStatus | None = None  # the READY model that a load would be given


@dataclass(frozen=True, slots=True)
class NodeSources:
    """Bytes of the chunks that a node needs, by where it would have them from."""

    store_bytes: int
    cached_bytes: int  # in its arena
    disk_bytes: int


def key_blocks(keys: bytes) -> Iterator[list[bytes]]:
    """Keys that were sent one after the other, a block at a time."""
    size_bytes = BLOCK_CHUNKS * KEY_BYTES
    for at in range(0, len(keys), size_bytes):
        block = keys[at : at + size_bytes]
        yield [block[start : start + KEY_BYTES] for start in range(0, len(block), KEY_BYTES)]


def node_sources(needed: NDArray[np.int64], sizes_bytes: NDArray[np.int64], held: HeldChunks | None) -> NodeSources:
    """For the chunks `needed`: what is in the arena comes from there, else what is on disk. None: it has nothing."""
    sizes = sizes_bytes[needed]
    if held is None:
        return NodeSources(int(sizes.sum()), 0, 0)
    in_arena = held.in_arena()[needed]
    on_disk = held.on_disk()[needed] & ~in_arena
    cached_bytes, disk_bytes = int(sizes[in_arena].sum()), int(sizes[on_disk].sum())
    return NodeSources(int(sizes.sum()) - cached_bytes - disk_bytes, cached_bytes, disk_bytes)
