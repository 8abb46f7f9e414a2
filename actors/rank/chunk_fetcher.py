"""Fetches leased chunks: reads, checks the digest, tries again, and at last reports a failure.

Tries are counted per lease. After the last one the chunk goes back to the agent, which leases it to another worker or
ends the load (`cluster.scheduling.retry` has both budgets). Bytes that have arrived stay between tries, together with
their running digest:

    try 1   |#########------------------|   the connection was reset: 9 bytes are there, hashed
    try 2            |##################|   requests the rest only, of the same version
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actors.rank.state import FetchedChunk
from cluster.errors import empty_frames
from cluster.messages import (
    ARENA_READ,
    DISK_READ,
    DISK_UNUSABLE,
    NO_SLOT,
    PEER_READ,
    Commit,
    FetchFailure,
    LeaseOrder,
)
from cluster.planning.packed_plan import SharedTables
from cluster.scheduling.concurrency import PeerPatience
from cluster.scheduling.retry import Fail, cause_of, decide
from cluster.telemetry.logs import LogFields
from cluster.telemetry.stats import StageTimes
from storage.arena.arena import Arena
from storage.checksum import Hasher, Span, SpanHasher, new_hasher
from storage.disk.files import DiskReader
from storage.errors import DiskChunkUnusable, DiskTierError, IntegrityError, LongshoreError, ReadEnded
from storage.peers import PASSED_HASH, READ_TIMEOUT_S, Asker, Peer, PeerCarrier
from storage.stores.object_store import ByteRange, ObjectStore, cut, read_pieces
from storage.stores.requests import ReadLimit, ReadLimits

if TYPE_CHECKING:
    from storage.peers.peer_client import PeerChunk, PeerClient


@dataclass(slots=True)
class StageClock:
    """Time and bytes of one thread. Written by that thread only."""

    busy_s: float = 0.0  # reading (fetch thread) or copying (place thread)
    bytes: int = 0
    verify_s: float = 0.0
    verify_bytes: int = 0
    wait_s: float = 0.0
    disk_s: float = 0.0  # reading and checking chunks on the node's disk
    disk_bytes: int = 0
    cache_s: float = 0.0  # copying chunks to kept slots of the arena, and from there
    cache_bytes: int = 0


class ChunkRead:
    """One chunk on its way into `parts`, which together have its size. For one thread."""

    def __init__(
        self,
        store: ObjectStore,
        tables: SharedTables,
        chunk: int,
        parts: Sequence[memoryview],
        limit: ReadLimit,
        clock: StageClock,
        *,
        pass_digest: bool = False,
    ) -> None:
        """`pass_digest`: other nodes get the chunk, or its bytes, with a digest that no publisher made."""
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
        self._passes = pass_digest
        self._passed = b""  # the digest that came with the first bytes, if they came from a node
        self._passing = new_hasher(PASSED_HASH) if pass_digest else None
        # With neither a version nor a digest nobody would notice that the two halves are of different objects.
        self._resumes = self._shard.etag is not None or self._expected is not None

    def read(self, peer: PeerChunk | None = None) -> None:
        """One try: read what is missing and check the digest, each piece while it is warm.

        `peer`: read it from there. The next try, from the store, goes on where this one ended.

        Raises the error of the read; bytes that had arrived stay. Raises IntegrityError, and nothing stays.
        """
        rest = ByteRange(self._byte_range.start + self.arrived_bytes, self._byte_range.end)
        before_bytes = self.arrived_bytes
        begun_s, hashed_s = time.monotonic(), self._clock.verify_s
        try:
            if rest.size_bytes:  # else the last try failed after its last byte
                read_pieces(
                    self._store if peer is None else peer,
                    self._shard.key,
                    rest,
                    _after(self._parts, self.arrived_bytes),
                    self._hash,
                    etag=self._shard.etag if peer is None else None,
                    limit=self._limit,
                )
        except LongshoreError as error:
            self._keep(before_bytes + int(error.details.get("received_bytes", 0)))
            raise
        finally:
            if peer is not None and not before_bytes:
                self._passed = peer.digest
            self._clock.busy_s += time.monotonic() - begun_s - (self._clock.verify_s - hashed_s)
            self._clock.bytes += self.arrived_bytes - before_bytes
            if not self._resumes and self.arrived_bytes < self._byte_range.size_bytes:
                self._restart()
        self._check()

    def _hash(self, piece: memoryview) -> None:
        self.arrived_bytes += len(piece)
        begun_s = time.monotonic()
        for hasher in (self._hasher, self._passing):
            if hasher is not None:
                hasher.update(piece)
        self._clock.verify_s += time.monotonic() - begun_s

    def _keep(self, arrived_bytes: int) -> None:
        """So many bytes of the chunk are in the parts: hash those that came last."""
        missing_bytes = min(arrived_bytes, self._byte_range.size_bytes) - self.arrived_bytes
        for part in _after(self._parts, self.arrived_bytes):
            for piece in cut(part[: max(0, missing_bytes)]):
                missing_bytes -= len(piece)
                self._hash(piece)

    def spans(self) -> tuple[Span, ...]:
        """Return the checksums of a complete chunk without a digest. The object's checksum is combined from them."""
        return self._hasher.spans() if isinstance(self._hasher, SpanHasher) else ()

    @property
    def digest(self) -> bytes:
        """The digest of a complete chunk that other nodes get with it; empty: they know the published one."""
        return b"" if self._passing is None else self._passing.digest()

    def _check(self) -> None:
        if self._passed and self.digest != self._passed:
            passed = {"expected": self._passed.hex(), "found": self.digest.hex()}
            self._restart()
            raise IntegrityError("bytes from a node are not those that its home read", **passed)
        if self._hasher is None or isinstance(self._hasher, SpanHasher) or self._expected is None:
            return
        self._clock.verify_bytes += self._byte_range.size_bytes
        found = self._hasher.digest()
        if found != self._expected:
            self._restart()
            raise IntegrityError(
                "bytes from the store are not the published ones",
                hint="the object is damaged, or was replaced after it was published: longshore verify shows all of it",
                expected=f"{self._hash_name}:{self._expected.hex()}",
                found=f"{self._hash_name}:{found.hex()}",
            )

    def _restart(self) -> None:
        self.arrived_bytes = 0
        self._hasher = self._new_hasher()
        self._passed = b""
        self._passing = new_hasher(PASSED_HASH) if self._passes else None

    def _new_hasher(self) -> Hasher | SpanHasher | None:
        if self._expected is not None:
            return new_hasher(str(self._hash_name))
        return SpanHasher(self._shard.checksum, self._byte_range) if self._shard.checksum is not None else None


def spans_of(tables: SharedTables, chunk: int, parts: Sequence[memoryview]) -> tuple[Span, ...]:
    """Return the same as `ChunkRead.spans`, for a chunk that came into `parts` in another way."""
    checksum = tables.shards[tables.chunks.shard[chunk]].checksum
    if tables.chunks.hash_name is not None or checksum is None:
        return ()
    hasher = SpanHasher(checksum, tables.chunks.byte_range(chunk))
    for part in parts:
        hasher.update(part)
    return hasher.spans()


def _passed_digest(lease: LeaseOrder, parts: Sequence[memoryview]) -> bytes:
    """Return the digest that other nodes get with a chunk that was here already."""
    if not lease.pass_digest:
        return b""
    hasher = new_hasher(PASSED_HASH)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


# Status of another node's answer -> why it sent no chunk, as it is counted among the retries.
REFUSALS = {404: "peer_without_chunk", 425: "peer_waits", 503: "peer_slow", 504: "peer_late"}
BLAMELESS = ("peer_without_chunk", "peer_waits")  # these nodes are asked for other chunks


def _why_not(error: LongshoreError) -> str:
    """Return why another node did not send a chunk, as it is counted among the retries."""
    if isinstance(error, IntegrityError):
        return "peer_damaged"
    return REFUSALS.get(error.details.get("status", 0), "peer_unavailable")


def next_source(lease: LeaseOrder, at: int, cause: str) -> int:
    """Return which of the lease's nodes to ask after the one at `at`. As many as it has: it is the store's turn."""
    is_home_here = cause == "peer_without_chunk"  # it had the chunk, or does not need it: nobody reads it in its place
    after = range(at + 1, len(lease.peers))
    return next((each for each in after if not (is_home_here and lease.peers[each].in_place)), len(lease.peers))


def _after(parts: Sequence[memoryview], skipped_bytes: int) -> list[memoryview]:
    """Return the parts without their first `skipped_bytes`."""
    rest = []
    for part in parts:
        if skipped_bytes < len(part):
            rest.append(part[skipped_bytes:])
        skipped_bytes = max(0, skipped_bytes - len(part))
    return rest


_LOG = logging.getLogger("longshore.rank")
_NOTABLE = ("digest_mismatch", "object_changed", "credentials_expired")  # logged even when a later try succeeds


class ChunkFetcher:
    """Fetches leases; thread-safe, one `StageClock` per thread."""

    def __init__(self, store: ObjectStore, tables: SharedTables, attempts: int, about: LogFields | None = None) -> None:
        """`about`: the load and the rank, for the log."""
        self._store = store
        self._tables = tables
        self._attempts = attempts
        self._overtaken: set[str] = set()  # leases whose chunk another lease has brought
        self._limits = ReadLimits()
        self._running: dict[str, tuple[int, ReadLimit]] = {}  # lease id -> chunk, limit of its read
        self._about = about or LogFields()
        self._clocks: list[StageClock] = []
        self._disk: DiskReader | None = None
        self._arena: Arena | None = None
        self._peers: PeerClient | None = None
        self._peers_lock = threading.Lock()
        self._patience = PeerPatience()  # with `_peers_lock`
        self._node_id = ""
        self._carrier: PeerCarrier = "http"
        # Waits for another try: (cause, seconds, a part has arrived). May return early.
        self.pause: Callable[[str, float, bool], object] = lambda _, delay_s, arrived: time.sleep(delay_s)
        # The lease's chunk comes from the store, as no other node sent it.
        self.turned_to_store: Callable[[str], object] = lambda _: None
        # Whether no further try may start: (lease id, a part has arrived).
        self.is_void: Callable[[str, bool], bool] = lambda _, arrived: False

    def clock(self) -> StageClock:
        """Return a clock for the calling thread."""
        clock = StageClock()
        self._clocks.append(clock)
        return clock

    def end_reads(self, lease_ids: Iterable[str] | None = None) -> None:
        """End the reads of these leases, or all, at once. Those that `is_void` are returned unused."""
        if lease_ids is None:
            self._limits.end_all()
            return
        for lease_id in lease_ids:
            _, limit = self._running.get(lease_id, (0, None))
            if limit is not None:
                limit.end()

    def close(self) -> None:
        """Stop watching deadlines. Call it when nothing is fetched any more. Idempotent."""
        self._limits.close()
        self.use_disk("")
        if self._peers is not None:
            self._peers.close()

    def use_disk(self, path: str) -> None:
        """Read chunks that leases call `on_disk` from that folder; empty: none. Call it while nothing is fetched."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()
        if path:
            with contextlib.suppress(DiskTierError):  # then they come from the store
                self._disk = DiskReader(path)

    def use_peers(self, node_id: str, carrier: PeerCarrier) -> None:
        """Read chunks from the nodes that leases name, in the name of this node, in that way."""
        self._node_id, self._carrier = node_id, carrier

    def use_arena(self, arena: Arena | None) -> None:
        """Copy chunks to and from the kept slots of this arena. Call it while nothing is fetched."""
        self._arena = arena

    def fetch(self, lease: LeaseOrder, parts: Sequence[memoryview], clock: StageClock) -> FetchedChunk:
        """Fill `parts`, which together have the chunk's size. Errors of a store or a disk are in the result."""
        if lease.read_slot != NO_SLOT and self._arena is not None:
            begun_s = time.monotonic()
            self._arena.read(lease.read_slot, parts)
            self._copied(parts, begun_s, clock)
            commit = Commit(lease.lease_id, lease.chunk, source=ARENA_READ, digest=_passed_digest(lease, parts))
            return FetchedChunk(lease.lease_id, commit)
        fetched = self._fetch_anew(lease, parts, clock)
        if fetched.commit is None or lease.keep_slot == NO_SLOT or self._arena is None:
            return fetched
        begun_s = time.monotonic()
        kept = all([self._arena.keep(lease.keep_slot, part) for part in parts])  # it is one part, a slot
        self._copied(parts, begun_s, clock)
        return replace(fetched, commit=replace(fetched.commit, kept=kept))

    def _copied(self, parts: Sequence[memoryview], begun_s: float, clock: StageClock) -> None:
        clock.cache_s += time.monotonic() - begun_s
        clock.cache_bytes += sum(len(part) for part in parts)

    def _fetch_anew(self, lease: LeaseOrder, parts: Sequence[memoryview], clock: StageClock) -> FetchedChunk:
        give_up_s = time.monotonic() + lease.deadline_s
        disk = self._from_disk(lease, parts, clock)
        if disk == DISK_READ:
            spans = spans_of(self._tables, lease.chunk, parts)
            commit = Commit(lease.lease_id, lease.chunk, spans, disk, digest=_passed_digest(lease, parts))
            return FetchedChunk(lease.lease_id, commit)
        with self._limits.begin(give_up_s) as limit:
            self._running[lease.lease_id] = lease.chunk, limit
            try:
                about = self._store, self._tables, lease.chunk, parts, limit, clock
                read = ChunkRead(*about, pass_digest=lease.pass_digest)
                fetched = self._fetch(lease, read, limit, disk)
            finally:
                del self._running[lease.lease_id]
            with self._peers_lock:
                done = fetched.commit
                peer = None if done is None or done.peer < 0 else lease.peers[done.peer].peer
                came = done is not None
                self._patience.ended(lease.lease_id, lease.chunk, time.monotonic(), came=came, peer=peer)
        if fetched.failure is not None:
            empty_frames(fetched.failure.error)  # a failure that no message takes along would keep the arena mapped
        return fetched

    def _from_disk(self, lease: LeaseOrder, parts: Sequence[memoryview], clock: StageClock) -> str:
        """Return DISK_READ when `parts` have the verified chunk, DISK_UNUSABLE when the disk failed, else ""."""
        if not lease.on_disk or self._ends(lease, False):
            return ""
        chunks, begun_s = self._tables.chunks, time.monotonic()
        digest = chunks.digest(lease.chunk)
        published = None if digest is None or chunks.hash_name is None else (chunks.hash_name, digest)
        try:
            if self._disk is None:
                return DISK_UNUSABLE
            self._disk.read(lease.on_disk, parts, published)
        except DiskChunkUnusable:
            return DISK_UNUSABLE
        finally:
            clock.disk_s += time.monotonic() - begun_s
        clock.disk_bytes += sum(len(part) for part in parts)
        return DISK_READ

    def _fetch(self, lease: LeaseOrder, read: ChunkRead, limit: ReadLimit, disk: str) -> FetchedChunk:
        retries = {"disk_unusable": 1} if disk == DISK_UNUSABLE else {}
        tries = in_vain = 0  # in vain: no further byte arrived
        sources, give_up_s = self._peers_of(lease), time.monotonic() + lease.deadline_s / 3
        at = 0
        failed_peers: tuple[int, ...] = ()
        came: dict[int, int] = {}  # bytes of the chunk by the peer that sent them
        while not self._ends(lease, read.arrived_bytes > 0):
            peer = sources[at] if at < len(sources) else None
            tries += peer is None
            before_bytes = read.arrived_bytes
            with self._peers_lock:
                if peer is None:
                    self._patience.reads_store(lease.lease_id, time.monotonic())
                else:
                    self._patience.asked(lease.chunk, peer.peer, time.monotonic())
            try:
                read.read(peer)
                self._overtake(lease)
                commit = Commit(
                    lease.lease_id,
                    lease.chunk,
                    read.spans(),
                    disk if peer is None else PEER_READ,
                    digest=read.digest,
                    peer=-1 if peer is None else at,
                    failed_peers=failed_peers,
                    came=tuple(came.items()),
                )
                return FetchedChunk(lease.lease_id, commit, None, retries)
            except LongshoreError as failed:
                error = failed
            if isinstance(error, ReadEnded) and self._ends(lease, read.arrived_bytes > 0):
                break
            if peer is not None:  # the rest comes from the next one, or from the store
                cause = _why_not(error)
                if self._waits_on(lease.chunk, peer.peer, cause):
                    if time.monotonic() < give_up_s:
                        continue
                    break  # it is to be leased again: the store must have its time in any lease
                retries[cause] = retries.get(cause, 0) + 1
                if read.arrived_bytes < before_bytes:
                    came.clear()  # the bytes were damaged, and all come again
                elif read.arrived_bytes > before_bytes:
                    came[at] = read.arrived_bytes - before_bytes
                failed_peers += (at,) if cause not in BLAMELESS else ()
                # Nodes that hang, one after the other, must leave the store its time.
                at = next_source(lease, at, cause) if time.monotonic() < give_up_s else len(sources)
                about = replace(self._about, chunk=lease.chunk, cause=cause).extra
                _LOG.log(
                    logging.DEBUG if cause in BLAMELESS else logging.INFO,
                    "a chunk does not come from a node: %s",
                    str(error),
                    extra=about,
                )
                if at == len(sources):
                    self.turned_to_store(lease.lease_id)
                    self.pause(cause, 0.0, read.arrived_bytes > 0)  # until a request to the store may begin
                continue
            in_vain += read.arrived_bytes <= before_bytes
            cause = cause_of(error)
            retries[cause] = retries.get(cause, 0) + 1
            decision = decide(cause, retries[cause], random.random())
            text = str(error)  # (a record that held the error would hold its frames, and with them the arena)
            about = replace(self._about, chunk=lease.chunk, cause=cause).extra
            _LOG.log(logging.WARNING if cause in _NOTABLE else logging.DEBUG, "a try failed: %s", text, extra=about)
            # A deadline that passes after failures is a failure too. Returned leases are not counted, so a store that
            # stalls would be asked for ever.
            if in_vain >= self._attempts or isinstance(decision, Fail) or time.monotonic() >= limit.deadline_s:
                _LOG.warning("the chunk failed after %d tries: %s", tries, text, extra=about)
                failure = FetchFailure(lease.lease_id, lease.chunk, self._described(error, lease.chunk), tries)
                return FetchedChunk(lease.lease_id, None, failure, retries)
            self.pause(cause, decision.delay_s, read.arrived_bytes > 0)
        return FetchedChunk(lease.lease_id, retries=retries)

    def _waits_on(self, chunk: int, peer: Peer, cause: str) -> bool:
        with self._peers_lock:
            return self._patience.waits_on(chunk, peer, cause, time.monotonic())

    def store_s(self) -> float | None:
        """Return the time that a chunk from the store takes now. None: it is not known."""
        with self._peers_lock:
            return self._patience.store_s(time.monotonic())

    def _peers_of(self, lease: LeaseOrder) -> list[PeerChunk]:
        if not lease.peers:
            return []
        with self._peers_lock:
            if self._peers is None:
                # Not at the top: most loads do without them.
                from storage.peers.nixl_carrier import PROCESS_NIXL
                from storage.peers.peer_client import PeerClient

                nixl = PROCESS_NIXL if self._carrier == "nixl" else None
                self._peers = PeerClient(self._node_id, read_timeout_s=READ_TIMEOUT_S, nixl=nixl)
            slow_store_s = self._patience.slow_store_s(time.monotonic())
        asker = Asker(self._node_id, lease.share_left, slow_store_s, lease.hands_over)
        start = self._tables.chunks.byte_range(lease.chunk).start
        named = ((source.peer, source.load_id, source.key) for source in lease.peers)
        return [self._peers.chunk(*name, lease.chunk, start, asker) for name in named]

    def _overtake(self, lease: LeaseOrder) -> None:
        """The chunk is there by this lease: end the reads of slower ones, without waiting for the agent to say so."""
        running = self._running.copy()  # in one step
        others = {other for other, (chunk, _) in running.items() if chunk == lease.chunk} - {lease.lease_id}
        self._overtaken |= others
        self.end_reads(others)

    def _ends(self, lease: LeaseOrder, arrived: bool) -> bool:
        """Return True when the lease is to be returned unused, without another try."""
        return lease.lease_id in self._overtaken or self.is_void(lease.lease_id, arrived)

    def _described(self, error: LongshoreError, chunk: int) -> LongshoreError:
        shard = self._tables.shards[self._tables.chunks.shard[chunk]]
        byte_range = self._tables.chunks.byte_range(chunk)
        return error.with_details(shard=shard.key, chunk=chunk, range=str(byte_range))

    def stage_times(self, place: StageClock) -> StageTimes:
        """Return the times and bytes of all fetch threads, with those of placing in `place`."""
        clocks = self._clocks
        return StageTimes(
            fetch_s=sum(clock.busy_s for clock in clocks),
            fetch_bytes=sum(clock.bytes for clock in clocks),
            verify_s=sum(clock.verify_s for clock in clocks),
            verify_bytes=sum(clock.verify_bytes for clock in clocks),
            place_s=place.busy_s,
            place_bytes=place.bytes,
            wait_chunk_s=place.wait_s,
            disk_s=sum(clock.disk_s for clock in clocks),
            disk_bytes=sum(clock.disk_bytes for clock in clocks),
            cache_s=sum(clock.cache_s for clock in clocks),
            cache_bytes=sum(clock.cache_bytes for clock in clocks),
        )
