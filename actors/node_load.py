"""One load on one node: which chunk goes to whom, on top of the cache. Pure; the ledger passes the time in.

    chunk:  pending --lease--> leased --commit--> committed (pinned for every rank that needs it)
                ^                |                     | readable: a rank is told, its process holds the slot
                +-- failed, expired, returned          | placed: pin and hold are gone
                +-- evicted before a rank that came back had it

A chunk that the cache has already, from another load or under another id, is never leased.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from cluster.errors import ChunkFailed
from cluster.lease_queue import LeaseQueue
from cluster.messages import FetchFailure, LeaseOrder, NodeJob, Orders, RankHello, RankUpdate, unpack_shared
from cluster.report import NodeReport
from cluster.retry import Fail, cause_of
from storage.chunk_cache import ChunkCache
from storage.errors import IntegrityError, LongshoreError
from storage.leases import Answer, CachedChunk, Lease
from storage.processes import ProcessId
from storage.slot_records import digest_key, location_key

GRANT_BATCH = 64  # readable chunks told in one answer


@dataclass(slots=True)
class RankPlace:
    """One rank of the load, as its node sees it."""

    rank: int
    incarnation: int = 0
    process: ProcessId | None = None  # None until its worker said hello
    grantable: deque[int] = field(default_factory=deque)  # committed chunks it needs and was not told of
    granted: dict[int, CachedChunk] = field(default_factory=dict)  # it may be reading these
    leases: dict[str, int] = field(default_factory=dict)  # lease id -> chunk
    closed: list[str] = field(default_factory=list)  # leases to be told of as void
    lost: bool = False  # its process died; nobody is there for it
    placed_bytes: int = 0
    heard_s: float = 0.0  # when it last spoke


class NodeLoad:
    """See above. `cache` is shared with the node's other loads; the owner of slots is the load's id."""

    def __init__(self, job: NodeJob, cache: ChunkCache, now_s: float) -> None:
        self.job = job
        self.load_id = job.load_id
        self.error: LongshoreError | None = None
        self._cache = cache
        self._tables = unpack_shared(job.shared)
        self._queue = LeaseQueue(job.needs)
        self.ranks = {rank: RankPlace(rank, heard_s=now_s) for rank in job.needs}
        for rank in job.done:
            for chunk in job.needs[rank].tolist():
                self._queue.placed(rank, chunk)
        self._cached: dict[int, CachedChunk] = {}  # committed chunks of this load, while it needs them
        self._keys: dict[int, bytes] = {}
        # What the report counts.
        self.store_chunks: set[int] = set()
        self.cached_chunks: set[int] = set()
        self.store_bytes = 0
        self.refetched_chunks = 0
        self.corrupt_chunks = 0
        self.retries: Counter[str] = Counter()

    # -- the life of the load ----------------------------------------------------------------------------------

    def take_cached(self) -> None:
        """Pin what the arena has already, as far as this load's share allows, before anything evicts it."""
        for chunk in self._queue.pending():
            self._take_from_cache(chunk)

    def join(self, hello: RankHello, now_s: float) -> bool:
        """A process says that it has the rank. False when a later incarnation is expected."""
        place = self.ranks.get(hello.rank)
        if place is None or hello.incarnation < place.incarnation:
            return False
        if place.process not in (None, hello.process):
            self.rank_lost(hello.rank, hello.incarnation, now_s)
            place = self.ranks[hello.rank]
        if place.lost:
            self._refill(place)
        place.incarnation, place.process, place.heard_s = hello.incarnation, hello.process, now_s
        for chunk in hello.placed:
            self._placed(place, chunk)
        return True

    def rank_lost(self, rank: int, incarnation: int, now_s: float) -> set[bytes]:
        """The rank's process is dead, or about to be: its pins go at once, `incarnation` may say hello next.

        Returns the keys whose fetches ended with it.
        """
        place = self.ranks.get(rank)
        if place is None or incarnation < place.incarnation:
            return set()
        ended = {self._key(chunk) for chunk in place.leases.values()}
        for chunk in place.leases.values():
            self._lease_lost(chunk, rank, "worker_died", now_s)
        self._cache.drop_pins(self._pinner(rank))
        self._queue.rank_lost(rank)
        self.ranks[rank] = RankPlace(rank, incarnation, heard_s=now_s, lost=True)
        return ended

    def _refill(self, place: RankPlace) -> None:
        """A new process has the rank and nothing placed: from the arena what is still there, the rest anew."""
        for chunk in self._queue.restart_rank(place.rank):
            cached = self._cached[chunk]
            if self._cache.pin(cached, self._pinner(place.rank), owner=self.load_id):
                place.grantable.append(chunk)
            else:
                self._queue.evicted(chunk)
        self.refetched_chunks += sum(chunk in self.store_chunks for chunk in self._queue.pending())
        place.lost = False

    def end(self, now_s: float) -> set[bytes]:
        """Nothing more is needed; what ranks still read or write stays fenced until they let go.

        Returns the keys whose fetches ended with it.
        """
        return {lease.key for lease in self._cache.end_owner(self.load_id, now_s)}

    @property
    def complete(self) -> bool:
        return self._queue.complete

    def done(self, rank: int) -> bool:
        """The rank has placed all it needs."""
        return not self._queue.left(rank)

    def knows(self, update: RankUpdate) -> bool:
        """The update is from the process that has the rank now, and not from one that was given up."""
        place = self.ranks.get(update.rank)
        return place is not None and (place.incarnation, place.process) == (update.incarnation, update.process)

    def report(self, node_id: str, host: str, arena_bytes: int, peak_host_bytes: int) -> NodeReport:
        """What this node did for the load."""
        sizes = self._tables.chunks.sizes_bytes()
        needed = self._queue.chunks()
        return NodeReport(
            node=node_id,
            host=host,
            needed_chunks=len(needed),
            needed_bytes=int(sizes[needed].sum()),
            store_chunks=len(self.store_chunks),
            store_bytes=self.store_bytes,
            cached_chunks=len(self.cached_chunks),
            cached_bytes=int(sizes[sorted(self.cached_chunks)].sum()),
            refetched_chunks=self.refetched_chunks,
            corrupt_chunks=self.corrupt_chunks,
            retries=dict(self.retries),
            arena_bytes=arena_bytes,
            peak_host_bytes=peak_host_bytes,
        )

    # -- a rank's update ---------------------------------------------------------------------------------------

    def apply(self, update: RankUpdate, now_s: float, chance: float) -> set[bytes]:
        """Take in what a rank did. Returns the keys whose fetches ended, well or not: others may wait for them."""
        place = self.ranks[update.rank]
        ended: set[bytes] = set()
        for commit in update.committed:
            chunk = place.leases.pop(commit.lease_id, None)
            if chunk is not None:  # else it expired meanwhile, or was reported before
                ended.add(self._key(chunk))
                self._commit(commit.lease_id, chunk, now_s)
        for failure in update.failed:
            self._cache.abandon(failure.lease_id)
            chunk = place.leases.pop(failure.lease_id, None)
            if chunk is not None:
                ended.add(self._key(chunk))
                self._failed(place, failure, now_s, chance)
        for lease_id in update.returned:
            self._cache.abandon(lease_id)
            chunk = place.leases.pop(lease_id, None)
            if chunk is not None:
                ended.add(self._key(chunk))
                self._queue.requeue(chunk, None, "", now_s=now_s)
        for chunk in update.placed:
            self._placed(place, chunk)
        self.retries.update(update.retries)
        self.corrupt_chunks += update.retries.get("digest_mismatch", 0)
        place.heard_s = now_s
        place.placed_bytes = update.placed_bytes
        return ended

    def orders(self, update: RankUpdate, now_s: float) -> Orders | None:
        """Work for the rank, or None when there is none now."""
        place = self.ranks[update.rank]
        if self.error is not None:
            return Orders(stop=self.error)
        closed, place.closed = tuple(place.closed), []
        leases: list[LeaseOrder] = []
        while len(leases) < update.want_leases and (order := self._next_lease(place, now_s)) is not None:
            leases.append(order)
        readable = self._grant(place)
        if not (closed or leases or readable):
            return None
        return Orders(leases=tuple(leases), readable=tuple(readable), closed_leases=closed)

    # -- what happens to leases --------------------------------------------------------------------------------

    def expired(self, lease: Lease, now_s: float) -> None:
        """A lease's deadline has passed: the chunk is anybody's again, the holder is told to close."""
        for place in self.ranks.values():
            chunk = place.leases.pop(lease.lease_id, None)
            if chunk is not None:
                place.closed.append(lease.lease_id)
                self._lease_lost(chunk, place.rank, "lease_expired", now_s)

    def wake(self, keys: set[bytes]) -> None:
        """Fetches of these bytes by others have ended: take them from the cache, or fetch them after all."""
        for chunk in self._queue.waiting_for(keys):
            self._take_from_cache(chunk)

    def _next_lease(self, place: RankPlace, now_s: float) -> LeaseOrder | None:
        while (chunk := self._queue.next_for(place.rank, now_s)) is not None:
            key = self._key(chunk)
            if self._take_from_cache(chunk):
                continue
            if self._cache.in_flight(key):
                self._queue.wait_for(chunk, key)  # the same bytes are on their way under another lease
                continue
            if place.process is None:
                return None
            deadline_s = now_s + self.job.lease_deadline_s
            lease = self._cache.lease(key, place.process, deadline_s, owner=self.load_id)
            if lease is None:
                return None  # no slot: back-pressure
            self._queue.leased(chunk, place.rank)
            place.leases[lease.lease_id] = chunk
            return LeaseOrder(lease.lease_id, chunk, lease.slot, self.job.lease_deadline_s)
        return None

    def _take_from_cache(self, chunk: int) -> bool:
        cached = self._cache.lookup(self._key(chunk)) if self._key(chunk) in self._cache else None
        if cached is None:
            return False
        needing = self._queue.needing(chunk)
        if not all(self._cache.pin(cached, self._pinner(rank), owner=self.load_id) for rank in needing):
            for rank in needing:
                self._cache.unpin(cached, self._pinner(rank))
            return False
        self._readable(chunk, cached)
        if chunk not in self.store_chunks:
            self.cached_chunks.add(chunk)
        return True

    def _commit(self, lease_id: str, chunk: int, now_s: float) -> None:
        size_bytes = self._tables.chunks.byte_range(chunk).size_bytes
        needing = self._queue.needing(chunk)
        answer = self._cache.commit(lease_id, size_bytes, [self._pinner(rank) for rank in needing])
        if answer not in (Answer.DONE, Answer.DUPLICATE):
            self._queue.requeue(chunk, None, "", now_s=now_s)
            return
        self.store_chunks.add(chunk)
        self.store_bytes += size_bytes
        cached = self._cache.lookup(self._key(chunk)) if answer is Answer.DONE else None
        if cached is not None:
            self._readable(chunk, cached)
        elif not self._take_from_cache(chunk):  # a duplicate: the other copy is the one to read
            self._queue.requeue(chunk, None, "", now_s=now_s)

    def _readable(self, chunk: int, cached: CachedChunk) -> None:
        self._cached[chunk] = cached
        for rank in self._queue.committed(chunk):
            self.ranks[rank].grantable.append(chunk)

    def _grant(self, place: RankPlace) -> list[tuple[int, int]]:
        """Tell a rank what it may read. From here on its process holds the slots."""
        told: list[tuple[int, int]] = []
        while place.grantable and len(told) < GRANT_BATCH and place.process is not None:
            chunk = place.grantable.popleft()
            cached = self._cached[chunk]
            if self._cache.hold(cached, place.process, self._pinner(place.rank), owner=self.load_id):
                place.granted[chunk] = cached
                told.append((chunk, cached.slot))
        return told

    def _placed(self, place: RankPlace, chunk: int) -> None:
        cached = place.granted.pop(chunk, None)
        if cached is not None and place.process is not None:
            self._cache.release(cached, place.process, self._pinner(place.rank))
            self._cache.unpin(cached, self._pinner(place.rank))
        self._queue.placed(place.rank, chunk)

    def _failed(self, place: RankPlace, failure: FetchFailure, now_s: float, chance: float) -> None:
        decision = self._queue.failed(
            failure.chunk,
            place.rank,
            cause_of(failure.error),
            self.job.chunk_attempts,
            now_s=now_s,
            fraction=chance,
        )
        if isinstance(decision, Fail) and self.error is None:
            self.error = _given_up(failure, place, self.load_id)

    def _lease_lost(self, chunk: int, rank: int, cause: str, now_s: float) -> None:
        """A lease ended by death or by time, not by a report."""
        self.retries[cause] += 1
        decision = self._queue.requeue(chunk, rank, cause, now_s=now_s)
        if isinstance(decision, Fail) and self.error is None:
            shard = self._tables.shards[self._tables.chunks.shard[chunk]]
            self.error = ChunkFailed(
                f"a chunk could not be had: {decision.reason}",
                shard=shard.key,
                chunk=chunk,
                range=str(self._tables.chunks.byte_range(chunk)),
                rank=rank,
                cause=cause,
                load=self.load_id,
            )

    def _pinner(self, rank: int) -> tuple[str, int]:
        return self.load_id, rank

    def _key(self, chunk: int) -> bytes:
        key = self._keys.get(chunk)
        if key is None:
            chunks = self._tables.chunks
            digest, byte_range = chunks.digest(chunk), chunks.byte_range(chunk)
            if digest is not None and chunks.hash_name is not None:
                key = digest_key(chunks.hash_name, digest, byte_range.size_bytes)
            else:
                shard = self._tables.shards[chunks.shard[chunk]]
                # Without an ETag nobody can tell versions apart: such chunks are shared inside this load only.
                version = shard.etag or f"load {self.load_id}"
                key = location_key(self.job.store_identity, shard.key, version, byte_range)
            self._keys[chunk] = key
        return key


def _given_up(failure: FetchFailure, place: RankPlace, load_id: str) -> LongshoreError:
    """The load's error: names shard, chunk, worker and cause."""
    where = {"rank": place.rank, "pid": place.process.pid if place.process else None, "tries": failure.tries}
    if isinstance(failure.error, IntegrityError):
        return failure.error.with_details(**where)
    details = {**failure.error.details, **where}
    return ChunkFailed(
        f"a chunk could not be had: {failure.error.message}",
        hint=failure.error.hint,
        cause=type(failure.error).__name__,
        load=load_id,
        **details,
    )
