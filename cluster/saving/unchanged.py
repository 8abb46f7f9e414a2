"""Parts of a save whose bytes are in the published revision already. Pure.

The digests of a part's chunks are looked up among those of the published manifest. When the chunks follow each other in
one of its files, the store copies them, and nothing is sent. So tensors that did not change are copied as long as the
chunks have the same bounds, which they have when names, dtypes, shapes and `max_shard_bytes` are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from storage.checkpoints.manifest import Manifest
from storage.stores.object_store import ByteRange


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Bytes of a stored object."""

    path: str
    etag: str | None  # the version that has them
    place: ByteRange


class StoredChunks:
    """The chunks of a published revision, by their digests."""

    def __init__(self, manifest: Manifest) -> None:
        """Index the chunks of a manifest."""
        self.hash_name = manifest.hash
        self._files = [(shard.path, shard.etag) for shard in manifest.shards]
        self._chunks: dict[str, tuple[int, int]] = {}  # digest -> (shard, number of the chunk)
        self._places: list[list[ByteRange]] = []
        self._digests: list[Sequence[str]] = []
        for number, shard in enumerate(manifest.shards):
            self._places.append([ByteRange(start, end) for start, end in pairwise((0, *shard.chunk_ends))])
            self._digests.append(shard.chunk_digests)
            for chunk, digest in enumerate(shard.chunk_digests):
                self._chunks.setdefault(digest, (number, chunk))

    def find(self, digests: Sequence[str], size_bytes: int) -> StoredRange | None:
        """Return where chunks with those digests lie one after the other, or None.

        Args:
            digests: Of the chunks, in hex, in order; by the hash of the manifest.
            size_bytes: Of all these chunks together.
        """
        found = self._chunks.get(digests[0]) if digests else None
        if found is None:
            return None
        shard, first = found
        end = first + len(digests)
        if tuple(self._digests[shard][first:end]) != tuple(digests):
            return None
        place = ByteRange(self._places[shard][first].start, self._places[shard][end - 1].end)
        return StoredRange(*self._files[shard], place) if place.size_bytes == size_bytes else None
