"""From a lease to a verified chunk: read, check the digest, try again, give up.

The tries here are those of one worker; when they are used up the chunk goes back to the agent, which gives it to
another worker or ends the load (`cluster.retry` has both budgets).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.messages import Commit, FetchFailure, LeaseOrder
from cluster.packed_plan import SharedTables
from cluster.report import StageTimes
from cluster.retry import Fail, cause_of, decide
from storage.checksum import new_hasher
from storage.errors import IntegrityError, LongshoreError
from storage.object_store import ObjectStore, read_pieces


@dataclass(slots=True)
class StageClock:
    """What one thread did, in seconds and bytes. Written by that thread only."""

    busy_s: float = 0.0  # reading (fetch thread) or copying (place thread)
    bytes: int = 0
    verify_s: float = 0.0
    verify_bytes: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """How a lease ended: committed, failed, or (neither) handed back unused."""

    lease_id: str
    commit: Commit | None = None
    failure: FetchFailure | None = None
    retries: dict[str, int] = field(default_factory=dict)  # by cause


class ChunkFetcher:
    """Carries out leases; thread-safe, one `StageClock` per thread."""

    def __init__(self, store: ObjectStore, tables: SharedTables, attempts: int) -> None:
        self._store = store
        self._tables = tables
        self._attempts = attempts
        self._stopped = threading.Event()
        self._closed: set[str] = set()
        self._clocks: list[StageClock] = []
        # How a thread waits before another try: (cause, seconds). Ends early when the tries are stopped.
        self.pause: Callable[[str, float], object] = lambda _, delay_s: self._stopped.wait(delay_s)

    def clock(self) -> StageClock:
        """A clock for the calling thread."""
        clock = StageClock()
        self._clocks.append(clock)
        return clock

    def stop(self) -> None:
        """No new try begins; a read that is under way ends by itself."""
        self._stopped.set()

    def restart(self) -> None:
        self._stopped.clear()

    def close_leases(self, lease_ids: set[str]) -> None:
        """These leases are void: whoever works on one hands it back before its next try."""
        self._closed |= lease_ids

    def fetch(self, lease: LeaseOrder, parts: Sequence[memoryview], clock: StageClock) -> FetchedChunk:
        """Fill `parts`, which together have the chunk's size. Never raises for what a store can do."""
        give_up_s = time.monotonic() + lease.deadline_s
        retries: dict[str, int] = {}
        tries = 0
        while True:
            tries += 1
            if self._stopped.is_set() or lease.lease_id in self._closed:
                return FetchedChunk(lease.lease_id, retries=retries)
            try:
                self._read(lease.chunk, parts, clock)
                return FetchedChunk(lease.lease_id, Commit(lease.lease_id, lease.chunk), None, retries)
            except LongshoreError as failed:
                error = failed
            cause = cause_of(error)
            retries[cause] = retries.get(cause, 0) + 1
            decision = decide(cause, retries[cause], random.random())
            # A deadline that passes after failures is a failure too: were the lease handed back, nobody would ever
            # count them, and a store that stalls would be asked for ever.
            if tries >= self._attempts or isinstance(decision, Fail) or time.monotonic() > give_up_s:
                failure = FetchFailure(lease.lease_id, lease.chunk, self._described(error, lease.chunk), tries)
                return FetchedChunk(lease.lease_id, None, failure, retries)
            self.pause(cause, decision.delay_s)

    def _read(self, chunk: int, parts: Sequence[memoryview], clock: StageClock) -> None:
        """Read the chunk into `parts` and check its digest, each piece while it is warm. Raises what a read raises."""
        chunks = self._tables.chunks
        shard, byte_range = self._tables.shards[chunks.shard[chunk]], chunks.byte_range(chunk)
        expected = chunks.digest(chunk) if chunks.hash_name is not None else None
        hasher = new_hasher(str(chunks.hash_name)) if expected is not None else None
        hashing_s = 0.0

        def seen(piece: memoryview) -> None:
            nonlocal hashing_s
            begun_s = time.monotonic()
            hasher.update(piece)  # type: ignore[union-attr]
            hashing_s += time.monotonic() - begun_s

        begun_s = time.monotonic()
        try:
            read_pieces(self._store, shard.key, byte_range, parts, seen if hasher else None, etag=shard.etag)
        finally:
            clock.busy_s += time.monotonic() - begun_s - hashing_s
            clock.verify_s += hashing_s
        clock.bytes += byte_range.size_bytes
        if hasher is None or expected is None:
            return
        clock.verify_bytes += byte_range.size_bytes
        if (found := hasher.digest()) != expected:
            raise IntegrityError(
                "bytes from the store are not the published ones",
                hint="the object is damaged, or was replaced after it was published: longshore verify shows all of it",
                expected=f"{chunks.hash_name}:{expected.hex()}",
                found=f"{chunks.hash_name}:{found.hex()}",
            )

    def _described(self, error: LongshoreError, chunk: int) -> LongshoreError:
        shard = self._tables.shards[self._tables.chunks.shard[chunk]]
        byte_range = self._tables.chunks.byte_range(chunk)
        return error.with_details(shard=shard.key, chunk=chunk, range=str(byte_range))

    def stage_times(self, place: StageClock) -> StageTimes:
        clocks = self._clocks
        return StageTimes(
            fetch_s=sum(clock.busy_s for clock in clocks),
            fetch_bytes=sum(clock.bytes for clock in clocks),
            verify_s=sum(clock.verify_s for clock in clocks),
            verify_bytes=sum(clock.verify_bytes for clock in clocks),
            place_s=place.busy_s,
            place_bytes=place.bytes,
            wait_chunk_s=place.wait_s,
        )
