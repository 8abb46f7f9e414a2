"""The chunks of one load on one node, between the cache and its ranks. Pure.

    pending --lease--> leased --commit--> committed (pinned for every rank that needs it)
       ^                |                     | readable: a rank is notified, its process holds the slot
       +-- failed, expired, returned          | placed: pin and hold are gone
       +-- evicted before a returning rank received it

The flow never leases a chunk that the cache already has, from another load or under another id. Pins and holds are
per chunk, not per slot. Two chunks of a model with the same bytes share a slot, so a rank that placed one may still
read the other.

A chunk whose fetch is far slower than its peers gets a second lease (a hedge), always in another slot.
`cluster.scheduling.concurrency` decides when one is due.

    second lease ----commit----> the first commit wins: `close_losers` revokes every other lease on the chunk
                                 loser: ordered to close; its slot stays fenced until it confirms, or is dead
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from actors.node.chunk_sources import ChunkSources, LoadMeter, source_of
from actors.node.disk_backlog import DiskBacklog, DiskWrite
from actors.node.lending import Lending, LendingFacts
from actors.node.peer_exchange import PeerExchange
from actors.node.peer_routes import PeerRoutes
from actors.node.reader_group import ReaderGroup
from cluster.errors import ChunkFailed
from cluster.messages import (
    DIRECT,
    DISK_UNUSABLE,
    NO_SLOT,
    Commit,
    FetchFailure,
    LeaseOrder,
    Members,
    NodeJob,
    PeerSource,
    RankHello,
    RankUpdate,
)
from cluster.planning.chunk_keys import chunk_key
from cluster.planning.packed_plan import SharedTables, unpack_shared
from cluster.scheduling.concurrency import Hedges
from cluster.scheduling.lease_queue import ChunkState, LeaseQueue
from cluster.scheduling.retry import Fail, cause_of
from cluster.telemetry.stats import LoadCounters, RankStats
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Answer, CachedChunk, Lease
from storage.errors import IntegrityError, LongshoreError, ObjectChanged, ObjectNotFound
from storage.host.processes import ProcessId


@dataclass(slots=True)
class RankPlace:
    """The process that has a rank, and the parts of the arena that it uses."""

    rank: int
    incarnation: int = 0
    process: ProcessId | None = None  # None until its worker sent a hello
    number: int = 0  # of the last message of that process
    grantable: deque[int] = field(default_factory=deque)  # committed chunks that it needs and was not yet granted
    granted: dict[int, CachedChunk] = field(default_factory=dict)  # it may be reading these
    leases: dict[str, int] = field(default_factory=dict)  # lease id -> chunk
    direct: frozenset[int] = frozenset()  # chunks that it can receive in its own memory
    taken_back: set[str] = field(default_factory=set)  # leases that the agent revoked before the rank returned them
    to_close: list[str] = field(default_factory=list)  # those of them that it was not yet ordered to close
    lost: bool = False  # no process works for it: the last one died or left
    left: bool = False  # its process reported that it no longer uses the arena
    placed_bytes: int = 0
    short_of: str = ""  # why its last answer had fewer leases than it wanted (see Orders)
    heard_s: float = 0.0  # time of its last message
    stats: RankStats | None = None  # the last that it reported

    @property
    def in_hand(self) -> int:
        """Number of slots that its process reads, writes, or was ordered to close."""
        return len(self.granted) + len(self.leases) + len(self.taken_back)

    def expects(self, hello: RankHello) -> bool:
        """Return whether the hello is new and its sender may have the rank.

        Two processes have one incarnation after a restart of the coordinator that did not see the first. The one that
        started later has the rank, or they would take it from each other and fetch everything again each time.
        """
        if hello.process == self.process and hello.number <= self.number:
            return False
        if hello.incarnation == self.incarnation and self.process is not None:
            return hello.process.start_time >= self.process.start_time
        return hello.incarnation >= self.incarnation

    def renew(self, update: RankUpdate, now_s: float) -> None:
        """Record a message of the rank that is not late."""
        self.number, self.heard_s, self.placed_bytes = update.number, now_s, update.placed_bytes
        self.stats = update.stats or self.stats

    def is_late(self, update: RankUpdate) -> bool:
        """Return whether the update is from an abandoned process, or older than one that was applied."""
        who = (self.incarnation, self.process)
        return self.left or who != (update.incarnation, update.process) or update.number <= self.number


class ChunkKeys:
    """Cache keys of a load's chunks (`cluster.planning.chunk_keys`), each computed once."""

    def __init__(self, tables: SharedTables, store_identity: str, load_id: str) -> None:
        self.tables = tables
        self._store_identity = store_identity
        self.load_id = load_id
        self._keys: dict[int, bytes] = {}

    def __getitem__(self, chunk: int) -> bytes:
        key = self._keys.get(chunk)
        if key is None:
            key = self._keys[chunk] = self._make(chunk)
        return key

    def published(self, chunk: int) -> tuple[str, bytes]:
        """Return hash name and digest of the chunk; both are empty when it was published without a digest."""
        digest, hash_name = self.tables.chunks.digest(chunk), self.tables.chunks.hash_name
        return ("", b"") if digest is None or hash_name is None else (hash_name, digest)

    def lasting(self, chunk: int) -> bool:
        """Return whether the key means the same bytes for every load: it has a digest or its object has a version."""
        return bool(self.published(chunk)[0] or self.tables.shards[self.tables.chunks.shard[chunk]].etag)

    def _make(self, chunk: int) -> bytes:
        return chunk_key(self.tables.shards, self.tables.chunks, self._store_identity, chunk, self.load_id)


class SecondLeases(Hedges):
    """Hedges of one load on one node.

    Fetches straight into a rank's memory are never hedged: they use no slot, so there is no other slot to use.
    """

    def __init__(
        self, job: NodeJob, cache: ChunkCache, keys: ChunkKeys, queue: LeaseQueue, keeps: Callable[[int], bool]
    ) -> None:
        """`keeps`: whether the arena keeps a chunk, whoever brings it."""
        super().__init__(job.hedge_factor, job.hedge_after_s)
        self._job, self._cache, self._keys, self._queue, self._keeps = job, cache, keys, queue, keeps

    def lease(self, place: RankPlace, now_s: float) -> tuple[int, Lease] | None:
        """Return (chunk, lease) for a rank that has nothing else to fetch.

        None when no hedge is due, or no slot is free.
        """
        chunk, owner = self.due(now_s), self._job.part
        if chunk is None or place.process is None or not self._cache.shares.may_claim(owner):
            return None
        deadline_s = now_s + self._job.lease_deadline_s
        key, may_kill = self._keys[chunk], not self._job.on_demand
        keep = self._keeps(chunk)
        lease = self._cache.lease(key, place.process, deadline_s, owner=owner, keep=keep, may_kill=may_kill)
        if lease is None:
            self._cache.shares.satisfied(owner)  # a hedge is optional: do not queue for a slot
            return None
        self.begun(lease.lease_id, chunk, now_s, second=True)
        return chunk, lease

    def close_losers(self, places: Iterable[RankPlace], chunk: int, now_s: float) -> None:
        """If the chunk is no longer leased, order every rank that still fetches it to stop.

        Slots count as taken back at the lease's own deadline, so a hedge never causes a process to be killed earlier.
        """
        if not self.hedged(chunk) or self._queue.state(chunk) is ChunkState.LEASED:
            return
        for place in places:
            for lease_id in [lease_id for lease_id, fetched in place.leases.items() if fetched == chunk]:
                self.close(place, lease_id, now_s)

    def close(self, place: RankPlace, lease_id: str, now_s: float) -> None:
        """Order the rank to end a lease whose chunk comes in another way."""
        in_flight = self._cache.in_flight(self._keys[place.leases.pop(lease_id)])
        deadline_s = next((lease.deadline_s for lease in in_flight if lease.lease_id == lease_id), now_s)
        self.ended(lease_id, now_s)
        self._cache.revoke(lease_id, deadline_s)
        place.taken_back.add(lease_id)
        place.to_close.append(lease_id)


def never_brought(reason: str, tables: SharedTables, chunk: int, rank: int, cause: str, load_id: str) -> LongshoreError:
    """Return the error for a chunk whose workers reported no cause: they died, or their leases ended."""
    return ChunkFailed(
        f"a chunk could not be fetched: {reason}",
        hint="its workers died, or took longer than LONGSHORE_LEASE_DEADLINE_S: see their logs and the store",
        shard=tables.shards[tables.chunks.shard[chunk]].key,
        chunk=chunk,
        range=str(tables.chunks.byte_range(chunk)),
        rank=rank,
        cause=cause,
        load=load_id,
    )


def given_up(failure: FetchFailure, place: RankPlace, load_id: str) -> LongshoreError:
    """Return the error for a chunk whose last worker reported a cause. It names shard, chunk, worker and cause."""
    where = {"rank": place.rank, "pid": place.process.pid if place.process else None, "tries": failure.tries}
    if isinstance(failure.error, IntegrityError):
        return failure.error.with_details(**where)
    cause = type(failure.error).__name__
    if deeper := failure.error.details.get("cause"):  # for a connection: the socket's error
        cause = f"{cause} ({deeper})"
    details = {**failure.error.details, **where, "cause": cause, "load": load_id}
    return ChunkFailed(f"a chunk could not be fetched: {failure.error.message}", hint=_hint(failure.error), **details)


def _hint(error: LongshoreError) -> str:
    """Return the error's own hint, or the one for its kind."""
    if not error.hint and isinstance(error, ObjectChanged):
        return "the object was replaced during the load: load again to read the new version"
    if not error.hint and isinstance(error, ObjectNotFound):
        return "the object was deleted, or never existed: `longshore verify` lists missing objects"
    return error.hint


NO_MEMBERS = Members()
GRANT_BATCH = 64  # most readable chunks in one answer

_DIRECT_NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class JobTables:
    """A job's tables, unpacked. Built once and without the agent's lock, because a large model takes a while."""

    shared: SharedTables
    needs: Mapping[int, NDArray[np.int64]]  # rank -> chunks that it touches
    largest_chunk_bytes: int
    routes: PeerRoutes | None = None  # between the nodes of the load; None: this node reads all from the store
    key: bytes = field(default=b"", repr=False)  # of `Members`, or of the load that lends
    lending: LendingFacts | None = None  # of a load of readers that shares chunks with other nodes

    @property
    def is_sure(self) -> bool:
        """True when all nodes see the same bytes: chunks have digests, or objects have versions."""
        return self.shared.chunks.hash_name is not None or all(shard.etag is not None for shard in self.shared.shards)

    def lends(self, facts: LendingFacts) -> JobTables:
        """Return the tables of a load that shares chunks with readers on other nodes."""
        return replace(self, lending=facts, key=facts.key)

    @classmethod
    def of(
        cls, job: NodeJob, shared: SharedTables | None = None, members: Members = NO_MEMBERS, node_id: str = ""
    ) -> JobTables:
        """Return the tables of a job, unpacked. `shared`: given for readers, whose job brings none.

        `node_id`: of this node, as in `members`.
        """
        shared = unpack_shared(job.shared) if shared is None else shared
        needs = {rank: shared.chunk_ids(rank) for rank in job.ranks}
        # Local files, what goes past the arena, and objects of which nodes may see different versions, are not sent.
        sure = shared.chunks.hash_name is not None or all(shard.etag is not None for shard in shared.shards)
        sends = members.nodes and sure and not job.is_local and job.placement != "direct"
        routes = PeerRoutes(members, job.load_id, node_id, shared, job.ranks) if sends else None
        return cls(shared, needs, shared.chunks.largest_bytes, routes, members.key)


class ChunkFlow:
    """The chunks of one load. `cache` is shared with the node's other loads; the owner of slots is `NodeJob.part`."""

    def __init__(self, job: NodeJob, cache: ChunkCache, now_s: float, disk: DiskBacklog, tables: JobTables) -> None:
        incarnations = job.incarnations or (0,) * len(job.ranks)
        self.ranks = {
            rank: RankPlace(rank, incarnation, heard_s=now_s)
            for rank, incarnation in zip(job.ranks, incarnations, strict=True)
        }
        self.keys = ChunkKeys(tables.shared, job.store_identity, job.load_id)
        self.queue = LeaseQueue(tables.needs, on_demand=job.on_demand)
        slots, others = cache.window_slots - 1, max(1, len(job.ranks) - 1)
        # All others together leave a slot to the last reader. Three are one that is read, one before and one after it.
        share = max(1, slots // len(job.ranks), min(3, slots // others))
        self._readers = ReaderGroup(tables.needs, share, job.group_patience_s, now_s) if job.on_demand else None
        self._all_kept = len(self.queue.chunks()) <= cache.kept_slots
        self.hedges = SecondLeases(job, cache, self.keys, self.queue, self._keeps)
        self.error: LongshoreError | None = None  # a chunk's budget is spent
        # Chunks bypass the arena when the job asks for it, when neither arena nor disk could keep them, and when the
        # kernel's page cache keeps them. Local files may be on a network, so a disk tier that keeps them comes first.
        fits = disk.on or len(self.queue.chunks()) <= max(cache.kept_slots, cache.window_slots)
        kept_anyway = job.is_local and not disk.on
        past = job.placement == "auto" and (kept_anyway or not fits) and (tables.routes is None or tables.routes.alone)
        self.direct = job.placement == "direct" or past
        self._chunks = self.keys.tables.chunks
        self.peers: PeerExchange | Lending | None = None
        if tables.routes is not None and not self.direct:
            shared = job.part, cache, self.keys, self.queue
            self.peers = PeerExchange(tables.routes, *shared, needs_digest=self._chunks.hash_name is None)
        elif tables.lending is not None and not self.direct:
            parts = job.part, cache, self.keys, self.queue
            digestless = self._chunks.hash_name is None
            self.peers = Lending(
                tables.lending,
                *parts,
                needs_digest=digestless,
                fetch=self._fetch_for_others,
                heard_s=lambda: max((place.heard_s for place in self.ranks.values() if not place.left), default=now_s),
            )
        self._job = job
        self._cache = cache
        self._disk = disk
        self._cached: dict[int, CachedChunk] = {}  # committed chunks of this load, while a rank needs them
        self._to_read: dict[int, CachedChunk] = {}  # kept chunks of this load that were not read yet, pinned
        if self.direct:  # no rank may fetch for another one, or the chunk would go through the arena
            for rank in job.ranks:
                self.queue.assign(rank, self._wanted_alone(rank))
        self.meter = LoadMeter(job)
        self.sources = ChunkSources(job, self._chunks, self.meter)
        self.retries: Counter[str] = Counter()
        self.ranks_done(job)

    def _keeps(self, chunk: int) -> bool:
        """Return whether the arena keeps the chunk: it has room for all, or the disk tier has yet to write this one."""
        to_disk = self._disk.on and self.keys.lasting(chunk) and not self._disk.has(self.keys[chunk])
        return self._all_kept or to_disk

    def take_cached(self) -> None:
        """Pin chunks that the arena already has, as far as this load's share allows, before they are evicted."""
        for chunk in self.queue.pending():
            if self._take_from_cache(chunk) or (kept := self._cache.kept(self.keys[chunk])) is None:
                continue
            self._to_read[chunk] = kept
            self._cache.pin(kept, self._reader(chunk), owner=self._job.part)

    def needed(self) -> list[int]:
        """Return the chunks that the load needs, ascending. For readers, those that any has asked for."""
        return self.queue.chunks() if self._readers is None else sorted(self._readers.asked_chunks)

    def counters(self) -> LoadCounters:
        """Return what this agent has counted for the load so far. The counters only grow."""
        digests = self.keys.tables.chunks.hash_name is not None
        counters = self.meter.counters(self.retries, self.hedges.count, self.hedges.won, digests=digests)
        return counters if self.peers is None else replace(counters, sent_bytes=self.peers.sent_bytes)

    def note_report(self, update: RankUpdate) -> None:
        """Count the retries and stats that a rank's update reports."""
        self.retries.update(update.retries)
        self.meter.reported(update)

    def wake(self, keys: set[bytes]) -> None:
        """Take chunks from the cache, or requeue them, once other fetches of the same bytes have ended."""
        for chunk in self.queue.waiting_for(keys):
            self._take_from_cache(chunk)

    # -- leases ------------------------------------------------------------------------------------------------

    def next_lease(self, place: RankPlace, now_s: float) -> LeaseOrder | None:
        """Return the next fetch for the rank, or None when there is no chunk for it or no free slot.

        A missing slot is the back-pressure on ranks. `place.short_of` names the reason.
        """
        order = self._next_lease(place, now_s)
        if order is None and place.short_of == "slots" and isinstance(self.peers, Lending):
            self.peers.short(self.running(), now_s)
        return order

    def _next_lease(self, place: RankPlace, now_s: float) -> LeaseOrder | None:
        place.short_of = "slots"
        if self._readers is not None and place.in_hand >= self._readers.most:
            return None
        if place.process is None or not self._cache.reserve(self._job.part, self._job.min_slots):
            return None  # a load that was complete has released its minimum, and queues for it again
        if self.peers is not None:
            self.peers.take_up()
        if isinstance(self.peers, Lending):
            self.peers.forget(self.running(), now_s)
        while (chunk := self.queue.next_for(place.rank, now_s)) is not None:
            key = self.keys[chunk]
            if self._take_from_cache(chunk):
                continue
            if self._cache.in_flight(key):
                self.queue.wait_for(chunk, key)  # the same bytes are on their way under another lease
                continue
            if self.peers is not None and not self.peers.has_room(chunk, self.running):
                if self.peers.looks_no_further:
                    return None
                continue
            deadline_s = now_s + self._job.lease_deadline_s
            if chunk in place.direct and not self.queue.failures(chunk) and self._cache.kept(key) is None:
                return self._order(place, chunk, now_s, f"direct-{next(_DIRECT_NUMBERS)}", DIRECT)
            owner, may_kill, keep = self._job.part, not self._job.on_demand, self._keeps(chunk)
            lease = self._cache.lease(key, place.process, deadline_s, owner=owner, keep=keep, may_kill=may_kill)
            if lease is None and self._drop_expected(place.rank, chunk, now_s):
                continue
            if lease is None and isinstance(self.peers, Lending) and self.peers.drop(now_s):
                continue
            if lease is None:
                return None
            return self._order(place, chunk, now_s, lease.lease_id, lease.slot, lease)
        place.short_of = "slots" if self._readers is not None and self._readers.waits(place.rank) else "chunks"
        return None

    def second_lease(self, place: RankPlace, now_s: float) -> LeaseOrder | None:
        """Return a second lease on a slow chunk. It reads from the store, because the disk may be the slow part."""
        found = self.hedges.lease(place, now_s)
        if found is None:
            return None
        chunk, lease = found
        return self._order(place, chunk, now_s, lease.lease_id, lease.slot, lease, may_use_disk=False)

    def _order(
        self,
        place: RankPlace,
        chunk: int,
        now_s: float,
        lease_id: str,
        slot: int,
        lease: Lease | None = None,
        *,
        may_use_disk: bool = True,
    ) -> LeaseOrder:
        self.queue.leased(chunk, place.rank)
        self.meter.leases_granted += 1
        place.leases[lease_id] = chunk
        place.short_of = ""
        on_disk = self.keys[chunk] if may_use_disk and self._disk.on_disk(self.keys[chunk]) else b""
        read = NO_SLOT if lease is None or lease.read is None else lease.read.slot
        keep = NO_SLOT if lease is None or lease.keep is None else lease.keep.slot
        peers: tuple[PeerSource, ...] = ()
        feeds = hands_over = False
        if self.peers is not None and slot != DIRECT:
            # A second lease on a slow chunk, and a chunk that failed before, are read from the store.
            from_peers = may_use_disk and not on_disk and read == NO_SLOT and not self.queue.failures(chunk)
            peers, feeds, hands_over = self.peers.leased(lease_id, chunk, from_peers=from_peers)
        if lease is not None and lease.read is None and may_use_disk and not peers:
            self.hedges.begun(lease_id, chunk, now_s)
        passes = self.peers is not None and not self.keys.published(chunk)[0]
        left = None if self.peers is None else self.peers.share_left
        deadline_s = self._job.lease_deadline_s
        about = on_disk, read, keep, peers, passes, feeds, left, hands_over
        return LeaseOrder(lease_id, chunk, slot, deadline_s, *about)

    def hand_over(self, now_s: float) -> set[bytes]:
        """Take back leases on chunks that other nodes read from the store now, in place of this one.

        Return the ended keys.
        """
        ended: set[bytes] = set()
        peers = self.peers
        if peers is None or not peers.slow_store.is_slow:
            return ended
        for place in self.ranks.values():
            for lease_id in [lease_id for lease_id in place.leases if peers.hands_over(lease_id)]:
                chunk = place.leases[lease_id]
                self.hedges.close(place, lease_id, now_s)
                self.queue.requeue(chunk, None, "", now_s=now_s)
                ended.add(self.keys[chunk])
        return ended

    def running(self) -> set[str]:
        """Return the ids of all leases."""
        return {lease_id for place in self.ranks.values() for lease_id in place.leases}

    def assign_direct(self, place: RankPlace, chunks: Iterable[int]) -> None:
        """Let the rank receive these chunks in its own memory, except those that other ranks of the node need too."""
        if self.direct:
            alone = self._wanted_alone(place.rank)
            place.direct = frozenset(alone).intersection(chunks)
            self.queue.assign(place.rank, alone)

    def _wanted_alone(self, rank: int) -> list[int]:
        return [chunk for chunk in self.queue.outstanding(rank) if self.queue.wanted_by(chunk) == (rank,)]

    def _take_from_cache(self, chunk: int) -> bool:
        cached = self._cache.lookup(self.keys[chunk]) if self._cache.in_window(self.keys[chunk]) else None
        if cached is None:
            return False
        pinners = [self._user(rank, chunk) for rank in self.queue.needing(chunk)]
        if not all(self._cache.pin(cached, pinner, owner=self._job.part) for pinner in pinners):
            for pinner in pinners:
                self._cache.unpin(cached, pinner)
            return False
        self._readable(chunk, cached)
        self.sources.in_arena(chunk)
        return True

    def commit(self, place: RankPlace, commit: Commit, chunk: int, now_s: float) -> None:
        """Commit a chunk that is verified in its slot: pin it, and queue a grant, for every rank that needs it."""
        lease_id, size_bytes = commit.lease_id, self._chunks.byte_range(chunk).size_bytes
        if commit.source == DISK_UNUSABLE:
            self._disk.unusable(self.keys[chunk])
        if lease_id.startswith("direct-"):
            self.sources.fetched(chunk, source_of(lease_id, commit.source))
            self.queue.committed(chunk)
            self.queue.placed(place.rank, chunk)
            return
        pinners = [self._user(rank, chunk) for rank in self.queue.needing(chunk)]
        answer = self._cache.commit(lease_id, size_bytes, pinners, kept=commit.kept)
        self.hedges.ended(lease_id, now_s, brought=answer is Answer.DONE)
        if answer not in (Answer.DONE, Answer.DUPLICATE):
            self.sources.late(chunk, source_of(lease_id, commit.source))
            self.queue.requeue(chunk, None, "", now_s=now_s)
            return
        self.sources.fetched(chunk, source_of(lease_id, commit.source))
        # Without a pinner the window's slot is free again already, if the chunk is kept.
        cached = self._cache.lookup(self.keys[chunk]) or self._cache.kept(self.keys[chunk])
        if answer is Answer.DONE and cached is not None:
            self._readable(chunk, cached)
            if self.peers is not None:
                self.peers.committed(commit, cached, now_s)
        elif not self._take_from_cache(chunk):  # a duplicate: ranks read the other copy
            self.queue.requeue(chunk, None, "", now_s=now_s)

    def failed(self, place: RankPlace, chunk: int, failure: FetchFailure, now_s: float, chance: float) -> None:
        """Record that a worker abandoned the chunk. Sets the load's error when the chunk's budget is spent."""
        cause = cause_of(failure.error)
        decision = self.queue.failed(chunk, place.rank, cause, self._job.chunk_attempts, now_s=now_s, fraction=chance)
        if isinstance(decision, Fail) and self.error is None:
            self.error = given_up(failure, place, self._job.load_id)

    def lease_lost(self, chunk: int, rank: int, cause: str, now_s: float) -> None:
        """Requeue a chunk whose lease ended by a death or a deadline, not by a report."""
        self.retries[cause] += 1
        self.meter.leases_taken_back += 1
        decision = self.queue.requeue(chunk, rank, cause, now_s=now_s)
        if isinstance(decision, Fail) and self.error is None:
            self.error = never_brought(decision.reason, self.keys.tables, chunk, rank, cause, self._job.load_id)

    # -- committed chunks ----------------------------------------------------------------------------------------

    def _readable(self, chunk: int, cached: CachedChunk) -> None:
        if (kept := self._to_read.pop(chunk, None)) is not None:
            self._cache.unpin(kept, self._reader(chunk))
        ranks = self.queue.committed(chunk)
        if self._disk.on and self.keys.lasting(chunk):
            kept = self._cache.kept(self.keys[chunk])
            self._disk.keep(DiskWrite(kept or cached, *self.keys.published(chunk)))
        if ranks:
            self._cached[chunk] = cached
        for rank in ranks:
            if self._readers is None or not self._readers.expects(rank, chunk):
                self.ranks[rank].grantable.append(chunk)

    def grant(self, place: RankPlace) -> list[tuple[int, int]]:
        """Return the (chunk, slot) pairs that a rank may now read. From here on its process holds the slots."""
        readable: list[tuple[int, int]] = []
        while place.grantable and len(readable) < GRANT_BATCH and place.process is not None:
            chunk = place.grantable.popleft()
            if chunk in place.granted or not self.queue.needs(place.rank, chunk):
                continue
            if self._readers is not None and self._readers.expects(place.rank, chunk):
                continue  # returned meanwhile
            if (cached := self._cached.get(chunk)) is None:
                continue  # not needed for a while, and needed again now: it is granted when it is there again
            # Never refused: the rank's pin keeps the chunk there, on this load's account.
            self._cache.hold(cached, place.process, self._holder(place, chunk), owner=self._job.part)
            place.granted[chunk] = cached
            readable.append((chunk, cached.slot))
        return readable

    def placed(self, place: RankPlace, chunk: int) -> None:
        """Release the hold and the pin of a rank that has copied what it needs of the chunk."""
        granted = place.granted.pop(chunk, None)
        if granted is not None and place.process is not None:
            self._cache.release(granted, place.process, self._holder(place, chunk))
        if self.queue.placed(place.rank, chunk):
            self._unpin(place.rank, chunk)
        if self._readers is not None:
            self._readers.read(place.rank, chunk, place.heard_s)

    def _unpin(self, rank: int, chunk: int) -> None:
        cached = self._cached.get(chunk)
        if cached is not None:
            self._cache.unpin(cached, self._user(rank, chunk))
            if not self.queue.needing(chunk):
                del self._cached[chunk]

    # -- readers on demand -------------------------------------------------------------------------------------

    def ask(self, place: RankPlace, chunks: Iterable[int], now_s: float) -> None:
        """Fetch these chunks for a reader, or grant them from the arena."""
        readers = self._readers
        if readers is None or place.lost:
            return
        for chunk in chunks:
            if readers.may_ask(place.rank, chunk):
                readers.ask(place.rank, chunk)
        for chunk in readers.admit(place.rank):
            was_expected = readers.expects(place.rank, chunk)
            others = readers.asked(place.rank, chunk, now_s)
            if chunk in self._cached if was_expected else self._need(place.rank, chunk):
                place.grantable.append(chunk)
            for rank in others:
                self._need(rank, chunk)

    def returned_unread(self, place: RankPlace, chunks: Iterable[int]) -> None:
        """Release a reader's holds on chunks that it does not read now. They stay while there are slots."""
        for chunk in chunks:
            granted = place.granted.pop(chunk, None)
            if granted is not None and place.process is not None:
                self._cache.release(granted, place.process, self._holder(place, chunk))
            if self._readers is None or not self._readers.may_ask(place.rank, chunk):
                continue
            self._readers.withdraw(place.rank, chunk)
            if self.queue.state(chunk) is ChunkState.PENDING:
                self._need_no_more(place.rank, chunk)
            elif self.queue.needs(place.rank, chunk):
                self._readers.returned(place.rank, chunk)

    def passed(self, place: RankPlace, chunk_ranges: Iterable[tuple[int, int]], now_s: float) -> None:
        """Stop expecting that a reader reads the chunks in these half-open ranges of ids."""
        for first, end in chunk_ranges:
            for chunk in self._readers.passed(place.rank, first, end, now_s) if self._readers is not None else ():
                self._need_no_more(place.rank, chunk)

    def _fetch_for_others(self, chunk: int) -> bool:
        """Fetch the chunk for other nodes, as if a reader here had asked for it. Return False if none will read it."""
        found = [] if self._readers is None else self._readers.asked_elsewhere(chunk)
        for rank in found:
            self._need(rank, chunk)
        return bool(found) and self.queue.state(chunk) is ChunkState.PENDING

    def _need(self, rank: int, chunk: int) -> bool:
        """Let the rank need one more chunk. Return True if it is in the arena, where it is pinned for the rank now."""
        if not self.queue.ask(rank, chunk) or (cached := self._cached.get(chunk)) is None:
            return False
        # Another rank's pin keeps the chunk there, on this load's account: one more is never refused.
        return self._cache.pin(cached, self._user(rank, chunk), owner=self._job.part)

    def _need_no_more(self, rank: int, chunk: int) -> None:
        if self.queue.placed(rank, chunk):
            self._unpin(rank, chunk)

    def _drop_expected(self, rank: int, chunk: int, now_s: float) -> bool:
        """Return True if slots are free now that were kept for readers which have not asked for their chunks.

        The rank gets no slot for this chunk.
        """
        if self._readers is None:
            return False
        kept = [chunk for chunk in self._readers.all_expected() if self._cache.kept(self.keys[chunk]) is not None]
        granted = {rank: place.granted for rank, place in self.ranks.items()}
        patience_s = self._job.group_patience_s
        waiting = [
            rank
            for rank, place in self.ranks.items()
            if not place.granted and not place.grantable and now_s - place.heard_s <= patience_s
        ]
        return self._let_go(self._readers.drop(rank, chunk, kept, granted, now_s, waiting))

    def drop_returned(self) -> bool:
        """Return True if slots may be free now that had chunks which readers gave back unread."""
        return self._readers is not None and self._let_go(self._readers.drop_returned())

    def _let_go(self, dropped: list[tuple[int, int]]) -> bool:
        """Let readers need these (rank, chunk) no more. Return whether there are any."""
        for rank, chunk in dropped:
            self._need_no_more(rank, chunk)
        return bool(dropped)

    # -- ranks come and go -------------------------------------------------------------------------------------

    def ranks_done(self, job: NodeJob) -> None:
        """Mark ranks as complete that the coordinator reports as done and that have no process here to report it."""
        for rank, incarnation in zip(job.ranks, job.incarnations or (0,) * len(job.ranks), strict=True):
            place = self.ranks[rank]
            if rank in job.done and place.process is None and not place.lost and place.incarnation == incarnation:
                for chunk in self.queue.outstanding(rank):
                    self.placed(place, chunk)

    def stop_reading(self, place: RankPlace) -> None:
        """Release all holds of a rank that reads nothing now, and queue these chunks to be granted again."""
        for chunk, cached in place.granted.items():
            if place.process is not None:
                self._cache.release(cached, place.process, self._holder(place, chunk))
            place.grantable.append(chunk)
        place.granted.clear()

    def forget_needs(self, place: RankPlace) -> None:
        """Drop the pins of a rank that has no process, so that other ranks can continue."""
        outstanding = self.queue.outstanding(place.rank)
        self.queue.rank_lost(place.rank)
        for chunk in outstanding:
            self._unpin(place.rank, chunk)
        if self._readers is not None:
            self._readers.forget(place.rank)
        place.grantable.clear()
        place.lost = True

    def refill(self, place: RankPlace) -> None:
        """Restart a rank whose new process has placed nothing: reuse what the arena still has, fetch the rest again."""
        for chunk in self.queue.restart_rank(place.rank):
            # Another rank's pin keeps the chunk there, on this load's account: one more is never refused.
            self._cache.pin(self._cached[chunk], self._user(place.rank, chunk), owner=self._job.part)
            place.grantable.append(chunk)

    def _user(self, rank: int, chunk: int) -> tuple[tuple[str, int], int, int]:
        """Return the key under which a rank pins a chunk's slot."""
        return self._job.part, rank, chunk

    def _holder(self, place: RankPlace, chunk: int) -> tuple[tuple[str, int], int, int, int]:
        """Return the key under which a rank's process reads a chunk's slot.

        A process may open a reader again that it has open. What the new one gives back, the old one may still read.
        """
        return self._job.part, place.rank, place.incarnation, chunk

    def _reader(self, chunk: int) -> tuple[tuple[str, int], str, int]:
        """Return the key under which the load pins a kept chunk until a rank has read it."""
        return self._job.part, "kept", chunk
