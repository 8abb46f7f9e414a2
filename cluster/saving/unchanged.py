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

MAX_TRIES = 256  # places of one chunk that are compared with a part


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
        self._chunks: dict[str, list[tuple[int, int]]] = {}  # digest -> [(shard, number of the chunk), ...]
        self._places: list[list[ByteRange]] = []
        self._digests: list[Sequence[str]] = []
        for number, shard in enumerate(manifest.shards):
            self._places.append([ByteRange(start, end) for start, end in pairwise((0, *shard.chunk_ends))])
            self._digests.append(shard.chunk_digests)
            for chunk, digest in enumerate(shard.chunk_digests):
                self._chunks.setdefault(digest, []).append((number, chunk))

    def find(self, digests: Sequence[str], size_bytes: int) -> StoredRange | None:
        """Return where chunks with those digests lie one after the other, or None.

        Args:
            digests: Of the chunks, in hex, in order; by the hash of the manifest.
            size_bytes: Of all these chunks together.
        """
        if not digests:
            return None
        # The rarest chunk has the fewest places to try. A common one, such as zeros, may have very many.
        rarest = min(range(len(digests)), key=lambda number: len(self._chunks.get(digests[number], ())))
        for shard, chunk in self._chunks.get(digests[rarest], ())[:MAX_TRIES]:
            first, end = chunk - rarest, chunk - rarest + len(digests)
            if first < 0 or tuple(self._digests[shard][first:end]) != tuple(digests):
                continue
            place = ByteRange(self._places[shard][first].start, self._places[shard][end - 1].end)
            if place.size_bytes == size_bytes:
                return StoredRange(*self._files[shard], place)
        return None
