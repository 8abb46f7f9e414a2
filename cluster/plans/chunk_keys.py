"""By what name arenas and disks keep a chunk: equal names, equal bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from storage.arena.slots import KEY_BYTES, digest_key, location_key
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.checksum import COLLISION_RESISTANT

NO_KEY = bytes(KEY_BYTES)  # nothing is kept under it


def chunk_key(shards: Sequence[Shard], chunks: ChunkTable, store_identity: str, chunk: int, load_id: str = "") -> bytes:
    """Return the key by digest where that is collision resistant, else by store, object, version and range.

    Whoever can write to one store can make other bytes with the XXH3 digest of a chunk in another. So such a digest
    only tells versions apart, as an ETag does. Without either, the chunk is shared inside the load `load_id` only,
    and has no key of its own.
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
    """Of all chunks, one after the other: as every load of the model, and every node, knows them."""
    return b"".join(chunk_key(shards, chunks, store_identity, chunk) for chunk in range(len(chunks)))
