"""One chunk on its way into memory, over all tries of one lease: what has arrived stays, with its running digest.

try 1   |#########------------------|   the connection was reset: 9 bytes stand, hashed
try 2            |##################|   asked for the rest only, of the same version
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.plans.packed_plan import SharedTables
from storage.checksum import Hasher, new_hasher
from storage.errors import IntegrityError, LongshoreError
from storage.stores.object_store import ByteRange, ObjectStore, cut, read_pieces
from storage.stores.read_limit import ReadLimit
from storage.stores.store_checksum import Span, SpanHasher


@dataclass(slots=True)
class StageClock:
    """What one thread did, in seconds and bytes. Written by that thread only."""

    busy_s: float = 0.0  # reading (fetch thread) or copying (place thread)
    bytes: int = 0
    verify_s: float = 0.0
    verify_bytes: int = 0
    wait_s: float = 0.0
    disk_s: float = 0.0  # reading and checking chunks on the node's disk
    disk_bytes: int = 0


class ChunkRead:
    """Fills `parts`, which together have the chunk's size. One thread."""

    def __init__(
        self,
        store: ObjectStore,
        tables: SharedTables,
        chunk: int,
        parts: Sequence[memoryview],
        limit: ReadLimit,
        clock: StageClock,
    ) -> None:
        chunks = tables.chunks
        self.arrived_bytes = 0  # of the chunk, from its start; all of them hashed
        self._store = store
        self._shard = tables.shards[chunks.shard[chunk]]
        self._byte_range = chunks.byte_range(chunk)
        self._parts = parts
        self._limit = limit
        self._clock = clock
        self._hash_name = chunks.hash_name
        self._expected = chunks.digest(chunk) if chunks.hash_name is not None else None
        self._hasher = self._new_hasher()  # None: there is nothing to compare with
        # With neither a version nor a digest nobody would notice that the two halves are of different objects.
        self._resumes = self._shard.etag is not None or self._expected is not None

    def read(self) -> None:
        """One try: read what is missing and check the digest, each piece while it is warm.

        Raises what a read raises; what had arrived by then stays. Raises IntegrityError, and nothing stays.
        """
        rest = ByteRange(self._byte_range.start + self.arrived_bytes, self._byte_range.end)
        before_bytes = self.arrived_bytes
        begun_s, hashed_s = time.monotonic(), self._clock.verify_s
        try:
            read_pieces(
                self._store,
                self._shard.key,
                rest,
                _after(self._parts, self.arrived_bytes),
                self._seen,
                etag=self._shard.etag,
                limit=self._limit,
            )
        except LongshoreError as error:
            self._keep(before_bytes + int(error.details.get("received_bytes", 0)))
            raise
        finally:
            self._clock.busy_s += time.monotonic() - begun_s - (self._clock.verify_s - hashed_s)
            self._clock.bytes += self.arrived_bytes - before_bytes
            if not self._resumes and self.arrived_bytes < self._byte_range.size_bytes:
                self._begin_anew()
        self._check()

    def _seen(self, piece: memoryview) -> None:
        self.arrived_bytes += len(piece)
        if self._hasher is not None:
            begun_s = time.monotonic()
            self._hasher.update(piece)
            self._clock.verify_s += time.monotonic() - begun_s

    def _keep(self, arrived_bytes: int) -> None:
        """So many bytes of the chunk stand in the parts: hash those that came last."""
        missing_bytes = min(arrived_bytes, self._byte_range.size_bytes) - self.arrived_bytes
        for part in _after(self._parts, self.arrived_bytes):
            for piece in cut(part[: max(0, missing_bytes)]):
                missing_bytes -= len(piece)
                self._seen(piece)

    def spans(self) -> tuple[Span, ...]:
        """Of a chunk without a digest, whole: what the store's checksum of its object is put together from."""
        return self._hasher.spans() if isinstance(self._hasher, SpanHasher) else ()

    def _check(self) -> None:
        if self._hasher is None or isinstance(self._hasher, SpanHasher) or self._expected is None:
            return
        self._clock.verify_bytes += self._byte_range.size_bytes
        found = self._hasher.digest()
        if found != self._expected:
            self._begin_anew()
            raise IntegrityError(
                "bytes from the store are not the published ones",
                hint="the object is damaged, or was replaced after it was published: longshore verify shows all of it",
                expected=f"{self._hash_name}:{self._expected.hex()}",
                found=f"{self._hash_name}:{found.hex()}",
            )

    def _begin_anew(self) -> None:
        self.arrived_bytes = 0
        self._hasher = self._new_hasher()

    def _new_hasher(self) -> Hasher | SpanHasher | None:
        if self._expected is not None:
            return new_hasher(str(self._hash_name))
        return SpanHasher(self._shard.checksum, self._byte_range) if self._shard.checksum is not None else None


def spans_of(tables: SharedTables, chunk: int, parts: Sequence[memoryview]) -> tuple[Span, ...]:
    """As `ChunkRead.spans`, of a chunk that stands in `parts` by another way."""
    checksum = tables.shards[tables.chunks.shard[chunk]].checksum
    if tables.chunks.hash_name is not None or checksum is None:
        return ()
    hasher = SpanHasher(checksum, tables.chunks.byte_range(chunk))
    for part in parts:
        hasher.update(part)
    return hasher.spans()


def _after(parts: Sequence[memoryview], skipped_bytes: int) -> list[memoryview]:
    """The parts without their first `skipped_bytes`."""
    rest = []
    for part in parts:
        if skipped_bytes < len(part):
            rest.append(part[skipped_bytes:])
        skipped_bytes = max(0, skipped_bytes - len(part))
    return rest
