"""Cache keys of chunks, and the chunks that nodes already hold. Pure.

Arenas and disks keep a chunk under its key. Equal keys mean equal bytes.

keys of all chunks --> node agents --> HeldChunks of each --> NodeSources: bytes by source, named as in LoadReport
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.telemetry.report import ModelStatus
from cluster.units import show_some
from storage.arena.slots import KEY_BYTES, digest_key, location_key
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.checksum import COLLISION_RESISTANT

NO_KEY = bytes(KEY_BYTES)  # the key of chunks that are not kept


def chunk_key(shards: Sequence[Shard], chunks: ChunkTable, store_identity: str, chunk: int, load_id: str = "") -> bytes:
    """Return the key by digest if the hash is collision resistant, else by store, object, version and range.

    Anybody who can write to one store can make other bytes with the XXH3 digest of a chunk in another store. So such a
    digest only distinguishes versions, as an ETag does. A chunk without digest and version has no key of its own. It
    is shared inside the load `load_id` only.
    """
    digest, byte_range = chunks.digest(chunk), chunks.byte_range(chunk)
    if digest is not None and chunks.hash_name in COLLISION_RESISTANT:
        return digest_key(chunks.hash_name, digest, byte_range.size_bytes)
    shard = shards[chunks.shard[chunk]]
    version = shard.etag or ""
    if digest is not None:
        version += f" {chunks.hash_name}:{digest.hex()}"
    elif not version and load_id:
        version = f"load {load_id}"
    return location_key(store_identity, shard.key, version, byte_range) if version else NO_KEY


def lasting_keys(shards: Sequence[Shard], chunks: ChunkTable, store_identity: str) -> bytes:
    """Return the keys of all chunks, concatenated. They are the same in every load of the model and on every node."""
    return b"".join(chunk_key(shards, chunks, store_identity, chunk) for chunk in range(len(chunks)))


MOST_ASKED = 64  # nodes that are asked what they have, before a load is placed
SAMPLED_CHUNKS = 1024


def sampled_keys(shards: Sequence[Shard], chunks: ChunkTable, store_identity: str) -> bytes:
    """Return the keys of some chunks, spread over the model: all of a small one. They tell which part a node holds."""
    some = np.unique(np.linspace(0, len(chunks) - 1, min(len(chunks), SAMPLED_CHUNKS)).astype(int)).tolist()
    return b"".join(chunk_key(shards, chunks, store_identity, chunk) for chunk in some)


def note_held(hosts: Mapping[str, float]) -> str:
    """Return a sentence for people about nodes that were chosen for what they have. `hosts`: host -> part, 0 to 1."""
    named = show_some((f"{host} ({share:.0%})" for host, share in sorted(hosts.items())), 5, "more nodes")
    return f"placed on nodes that already have chunks of the model: {named}"


BLOCK_CHUNKS = 4096  # chunks that an agent looks up at once; its ranks wait meanwhile


@dataclass(frozen=True, slots=True)
class HeldChunks:
    """One bit per requested chunk, in the order of the request, packed by `numpy.packbits`."""

    count: int
    arena: bytes
    disk: bytes

    @classmethod
    def of(cls, held: Sequence[tuple[bool, bool]]) -> HeldChunks:
        """Create it from (in the arena, on disk) of each chunk."""
        arena, disk = (np.packbits(bits).tobytes() for bits in np.array(held, bool).reshape(-1, 2).T)
        return cls(len(held), arena, disk)

    def in_arena(self) -> NDArray[np.bool_]:
        """Return for each chunk whether the node's arena holds it."""
        return self._bits(self.arena)

    def on_disk(self) -> NDArray[np.bool_]:
        """Return for each chunk whether the node's disk holds it."""
        return self._bits(self.disk)

    @property
    def share(self) -> float:
        """Return which part of the chunks the node holds."""
        return float((self.in_arena() | self.on_disk()).mean()) if self.count else 0.0

    def _bits(self, packed: bytes) -> NDArray[np.bool_]:
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=self.count).astype(bool)


@dataclass(frozen=True, slots=True)
class Holdings:
    """The chunks of a model that the nodes of a cluster hold."""

    nodes: Mapping[str, HeldChunks | str]  # by node id; a text says why nothing is known of a node
    resident: ModelStatus | None = None  # the READY model that a load would attach to


@dataclass(frozen=True, slots=True)
class NodeSources:
    """Bytes of the chunks that a node needs, by source."""

    store_bytes: int
    cached_bytes: int  # in the node's arena
    disk_bytes: int


def key_blocks(keys: bytes) -> Iterator[list[bytes]]:
    """Split concatenated keys and return them a block at a time."""
    size_bytes = BLOCK_CHUNKS * KEY_BYTES
    for at in range(0, len(keys), size_bytes):
        block = keys[at : at + size_bytes]
        yield [block[start : start + KEY_BYTES] for start in range(0, len(block), KEY_BYTES)]


def node_sources(needed: NDArray[np.int64], sizes_bytes: NDArray[np.int64], held: HeldChunks | None) -> NodeSources:
    """Return the bytes of the `needed` chunks by source: the arena first, then the disk, then the store.

    `held` is None when the node holds no chunk of the model.
    """
    sizes = sizes_bytes[needed]
    if held is None:
        return NodeSources(int(sizes.sum()), 0, 0)
    in_arena = held.in_arena()[needed]
    on_disk = held.on_disk()[needed] & ~in_arena
    cached_bytes, disk_bytes = int(sizes[in_arena].sum()), int(sizes[on_disk].sum())
    return NodeSources(int(sizes.sum()) - cached_bytes - disk_bytes, cached_bytes, disk_bytes)
