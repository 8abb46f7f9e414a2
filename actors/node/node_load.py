"""One load on one node: applies its ranks' messages and answers them with orders. Pure; the ledger passes the time in.

    hello ----> join: which process has the rank   place: none -> a process -> left (done or not), or dead -> none
    update ---> apply, then orders                 chunks: `actors.node.chunk_flow`

Two rules keep slots safe from late writers and readers, and free them from processes that are gone:

- A message older than the last applied one only frees the leases that it returns. It changes nothing else.
- A slot is freed when its process reports that it is done or is dead, never by time alone. A process reports it in an
  update, or by a hello, which means that it uses no slot.
"""

from __future__ import annotations

from dataclasses import replace

from actors.node.chunk_flow import ChunkFlow, JobTables, RankPlace
from actors.node.chunk_sources import source_of
from actors.node.disk_backlog import DiskBacklog
from actors.node.lending import Lending
from actors.node.object_checks import KeptSpans, ObjectChecks
from actors.node.peer_exchange import PeerExchange
from cluster.errors import LoadCancelled
from cluster.messages import LeaseOrder, NodeJob, Orders, RankHello, RankUpdate
from cluster.planning.packed_plan import SharedTables
from cluster.scheduling.concurrency import RequestLimit
from cluster.telemetry.chunk_map import PartView, letters_of, shards_of
from cluster.telemetry.report import NodeReport
from cluster.telemetry.stats import NodeTraffic
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Lease
from storage.errors import LongshoreError
from storage.host.processes import ProcessId

MAX_BATCH = 16


class NodeLoad:
    """One load on one node. `cache` and `disk` are shared with the node's other loads.

    Some methods return cache keys. The fetches of these bytes have ended, successfully or not, and other loads may
    wait for them.
    """

    def __init__(
        self, job: NodeJob, cache: ChunkCache, now_s: float, kept: KeptSpans, disk: DiskBacklog, tables: JobTables
    ) -> None:
        self.job = replace(job, shared=b"")
        self.load_id = job.load_id
        self.record = job.record  # the coordinator's notes, which it may replace
        self.peer_key = tables.key
        self._cache = cache
        self._disk = disk
        self._flow = ChunkFlow(self.job, cache, now_s, disk, tables)
        self.counters = self._flow.counters
        self._checks = ObjectChecks(self._flow.keys, self._flow.queue.chunks(), kept, (cache.forget, disk.forget))
        self._ended: LongshoreError | None = None
        self._former: list[RankPlace] = []  # abandoned while using the arena; their processes may be alive
        self._requests = RequestLimit(job.most_requests)
        self._flow.take_cached()
        self._rest_if_complete()

    # -- the life of the load ----------------------------------------------------------------------------------

    def apply_again(self, job: NodeJob) -> None:
        """Apply the job again: more ranks may be done. A rank that ended before this agent began reports nothing."""
        self._flow.ranks_done(job)
        self._rest_if_complete()

    def fail(self, error: LongshoreError) -> None:
        """End the load with this error, unless it already has one."""
        if self.error is None:
            self._ended = error

    def end(self, now_s: float) -> set[bytes]:
        """End the load and return the ended keys. Slots that ranks still use stay fenced until they release them."""
        self.fail(LoadCancelled("the load was ended", load=self.load_id))
        for place in self.ranks.values():
            place.taken_back |= place.leases.keys()
            place.leases.clear()
            place.grantable.clear()
        ended = {lease.key for lease in self._cache.end_owner(self.job.part, now_s)}
        if self.peers is not None:
            self.peers.end(now_s)
        self._checks.forget_damaged(last=True)
        return ended

    @property
    def places(self) -> list[RankPlace]:
        """Its ranks' places whose processes may still use slots, former ones included."""
        return [*self._former, *(place for place in self.ranks.values() if place.taken_back or place.granted)]

    def follow(self, former: list[RankPlace]) -> None:
        """Take over the places of the load that this one replaces. Their processes go on, and let go of their slots."""
        self._former += former

    @property
    def error(self) -> LongshoreError | None:
        """The reason why the load cannot continue, or None."""
        return self._flow.error or self._checks.error or self._ended

    @property
    def ranks(self) -> dict[int, RankPlace]:
        """The load's ranks on this node, by number."""
        return self._flow.ranks

    @property
    def store_bytes(self) -> int:
        """Bytes fetched from the store for this load."""
        return self._flow.sources.store_bytes

    @property
    def promised_bytes(self) -> int:
        """Host memory that the ranks have still to take for tensors, as far as they have not placed their chunks."""
        return 0 if self.error else int(self.job.host_bytes * self._flow.queue.share_left)

    @property
    def complete(self) -> bool:
        """True when every rank is present and has everything."""
        return self._flow.queue.complete

    @property
    def is_deserted(self) -> bool:
        """True for a group of readers when those that came have left or died. Others may still begin it anew."""
        places = self.ranks.values()
        came = any(place.process is not None or place.lost for place in places)
        return self.job.on_demand and came and all(place.process is None or place.left for place in places)

    @property
    def batch(self) -> int:
        """Number of chunks that a rank should collect before it sends a message.

        A message costs both sides a millisecond, and a chunk holds its slot until it is reported.
        """
        if self._flow.direct:
            return MAX_BATCH
        return min(MAX_BATCH, max(1, self._cache.window_slots // (2 * len(self.ranks))))

    def done(self, rank: int) -> bool:
        """Return whether the rank has placed all that it needs."""
        return not self._flow.queue.left(rank)

    def awaited(self, place: RankPlace) -> bool:
        """Return whether the load needs messages from the rank's process, or from the next one."""
        return place.lost or not (place.left or self.done(place.rank))

    def wake(self, keys: set[bytes]) -> None:
        """Take chunks from the cache, or requeue them, once other fetches of the same bytes have ended."""
        self._flow.wake(keys)

    def expired(self, lease: Lease, now_s: float) -> None:
        """Revoke a lease whose deadline has passed: any rank may fetch the chunk, the holder is ordered to close."""
        for place in self.ranks.values():
            chunk = place.leases.pop(lease.lease_id, None)
            if chunk is not None:
                self._flow.hedges.ended(lease.lease_id, now_s)
                place.taken_back.add(lease.lease_id)
                place.to_close.append(lease.lease_id)
                self._flow.lease_lost(chunk, place.rank, "lease_expired", now_s)

    def end_silent(self, now_s: float) -> set[bytes]:
        """Take back the leases of readers that have said nothing for the patience. Return the ended keys.

        A reader whose process was stopped must not delay others until its leases expire. Ranks are killed instead.
        """
        ended: set[bytes] = set()
        for place in self.ranks.values() if self.job.on_demand else ():
            if now_s - place.heard_s > self.job.group_patience_s:
                place.to_close += place.leases
                ended |= self._take_leases(place, "lease_expired", now_s)
        return ended

    def look_at_peers(self, now_s: float) -> tuple[set[bytes], bool]:
        """Stop waiting for other nodes that do not come for chunks, and hand over chunks from a slow store.

        Return the ended keys, and whether slots may be free now.
        """
        if self.peers is None:
            return set(), False
        if isinstance(self.peers, PeerExchange):
            self.peers.forget(self._flow.running())
        return self._flow.hand_over(now_s), self.peers.look(now_s)

    @property
    def peers(self) -> PeerExchange | Lending | None:
        """The load's exchange with other nodes. None: it reads everything from the store."""
        return self._flow.peers

    def chunk_on_disk(self, chunk: int) -> tuple[bytes, int]:
        """Return key and size of a chunk that the node's disk has and whose digest is published; else no key."""
        keys = self._flow.keys
        if not 0 <= chunk < len(keys.tables.chunks) or not keys.published(chunk)[0]:
            return b"", 0
        return keys[chunk] if self._disk.on_disk(keys[chunk]) else b"", self.chunk_bytes(chunk)

    @property
    def tables(self) -> SharedTables:
        """The load's tables."""
        return self._flow.keys.tables

    def chunk_bytes(self, chunk: int) -> int:
        """Return the size of a chunk."""
        return self._flow.keys.tables.chunks.byte_range(chunk).size_bytes

    def chunks_now(self) -> PartView:
        """Return (the model's shards, each chunk's state on this node, bytes by source and sender)."""
        tables, counters = self._flow.keys.tables, self.counters()
        received = {} if self.peers is None else dict(self.peers.received_bytes)
        traffic = NodeTraffic(counters.bytes_by_source, received, counters.sent_bytes)
        return (
            shards_of(tables.shards, tables.chunks),
            letters_of(len(tables.chunks), self._flow.queue.states()),
            traffic,
        )

    def report(self, node_id: str, host: str) -> NodeReport:
        """Return this node's stats of the load."""
        flow = self._flow
        needed = flow.needed()
        needed_bytes = int(flow.keys.tables.chunks.sizes_bytes()[needed].sum())
        wanted_bytes = needed_bytes if self.job.on_demand else flow.keys.tables.wanted_bytes(self.job.ranks)
        return NodeReport(
            node=node_id,
            host=host,
            needed_chunks=len(needed),
            needed_bytes=needed_bytes,
            overfetch_bytes=needed_bytes - wanted_bytes,
            **flow.sources.stats(needed),
            direct=flow.direct,
            disk_unkept_chunks=self._disk.unkept_chunks,
            corrupt_chunks=flow.meter.corrupt_chunks,
            retries=dict(flow.retries),
            peer_bytes_from={} if flow.peers is None else dict(flow.peers.received_bytes),
            sent_bytes=0 if flow.peers is None else flow.peers.sent_bytes,
            hedges=flow.hedges.count,
            hedges_won=flow.hedges.won,
            objects=self._checks.report(),
        )

    # -- ranks come and go -------------------------------------------------------------------------------------

    def check_chunks(self, message: RankHello | RankUpdate) -> None:
        """Raise ValueError if a message names chunks that the model has not. Nothing of it is applied then."""
        if not all(0 <= chunk < len(self._flow.keys.tables.chunks) for chunk in message.chunk_ids()):
            raise ValueError(f"a message of rank {message.rank} names chunks that the model has not")

    def join(self, hello: RankHello, now_s: float) -> set[bytes]:
        """Give the rank to a process that `RankPlace.expects`. It uses no slot yet. Return the ended keys."""
        place = self.ranks[hello.rank]
        ended: set[bytes] = set()
        if (place.process, place.incarnation) == (hello.process, hello.incarnation):
            ended = self._release_slots(place, now_s)
        elif place.process is not None:
            ended = self._vacate(place, hello.incarnation, now_s)
            place = self.ranks[hello.rank]
        begins_anew = place.lost or (self.job.on_demand and place.process is not None)  # what is kept for it is useless
        if begins_anew or len(hello.placed) < self._flow.queue.placed_chunks(hello.rank):
            self._flow.forget_needs(place)
            if self.error is None:  # else it is ordered to stop, and its pins would stay for ever
                self._flow.refill(place)
        place.incarnation, place.process, place.number = hello.incarnation, hello.process, hello.number
        place.lost, place.left, place.heard_s = False, False, now_s
        self._flow.sources.hello(hello)
        for chunk in hello.placed:
            self._flow.placed(place, chunk)
        self._flow.assign_direct(place, hello.direct)
        self._rest_if_complete()
        return ended

    def drop_returned(self) -> bool:
        """Return True if slots may be free now that had chunks which readers gave back unread."""
        return self._flow.drop_returned()

    def rank_lost(self, rank: int, incarnation: int, now_s: float) -> set[bytes]:
        """Drop the pins of a rank whose process is dead, or about to be. Return the ended keys.

        `incarnation` may send the next hello.
        """
        place = self.ranks.get(rank)
        if place is None or (incarnation <= place.incarnation and not place.lost):
            return set()  # that incarnation already has the rank
        return self._vacate(place, max(incarnation, place.incarnation), now_s)

    def former_lets_go(self, message: RankHello | RankUpdate) -> None:
        """Free the slots of a former loader of the rank, which reports that it no longer uses the arena.

        The report covers its own incarnation only. Another one of the same process may still be writing.
        """
        who = (message.rank, message.process, message.incarnation)
        for place in list(self._former):
            if (place.rank, place.process, place.incarnation) == who and place.number < message.number:
                self._former.remove(place)
                for lease_id in place.taken_back:
                    self._cache.abandon(lease_id)
                self._flow.stop_reading(place)

    def process_dead(self, process: ProcessId, now_s: float) -> set[bytes]:
        """Vacate the ranks of a process that is certainly dead. Return the ended keys.

        The coordinator reports the next incarnation.
        """
        ended: set[bytes] = set()
        for place in [place for place in self.ranks.values() if place.process == process]:
            ended |= self._vacate(place, place.incarnation, now_s)
        self._former = [place for place in self._former if place.process != process]
        return ended

    # -- a rank's update ---------------------------------------------------------------------------------------

    def apply(self, update: RankUpdate, now_s: float, chance: float) -> set[bytes]:
        """Apply a rank's update. Return the ended keys."""
        place = self.ranks[update.rank]
        place.renew(update, now_s)
        failures = {failure.lease_id: failure for failure in update.failed}
        commits = {commit.lease_id: commit for commit in update.committed}
        ended: set[bytes] = set()
        self._checks.fetched(update.committed)
        for lease_id in update.lease_ids():
            chunk = place.leases.pop(lease_id, None)
            if chunk is None:  # revoked meanwhile; now the rank reports that it no longer writes there
                place.taken_back.discard(lease_id)
                self._cache.abandon(lease_id)
                if lease_id in commits:
                    late = commits[lease_id]
                    self._flow.sources.late(late.chunk, source_of(lease_id, late.source))
                continue
            ended.add(self._flow.keys[chunk])
            if lease_id in failures:
                self._cache.abandon(lease_id)
                self._flow.failed(place, chunk, failures[lease_id], now_s, chance)
            elif lease_id in update.returned:
                self._cache.abandon(lease_id)
                self._flow.queue.requeue(chunk, None, "", now_s=now_s)
            else:
                self._flow.commit(place, commits[lease_id], chunk, now_s)
            self._flow.hedges.ended(lease_id, now_s)
            self._flow.hedges.close_losers(self.ranks.values(), chunk, now_s)
        for chunk in update.placed:
            self._flow.placed(place, chunk)
        self._flow.returned_unread(place, update.returned_unread)
        self._flow.passed(place, update.passed, now_s)
        self._flow.ask(place, update.asks, now_s)
        self._requests.ranks = sum(bool(other.process) and self.awaited(other) for other in self.ranks.values())
        self._requests.note(update.requests, update.throttled, now_s)
        if self.peers is not None:
            self.peers.store_ahead.note(update.requests)
            self.peers.slow_store.reported(update.rank, update.store_s)
        self._flow.note_report(update)
        if update.leaving:
            ended |= self._release_slots(place, now_s)
            place.left = True
            if not self.done(place.rank):
                self._flow.forget_needs(place)
        self._rest_if_complete()
        return ended

    def orders(self, update: RankUpdate, now_s: float) -> Orders | None:
        """Return work for the rank, or None when there is none now."""
        place = self.ranks[update.rank]
        if place.left:
            return Orders(stop=self._checks.error)  # it may hold bytes of a damaged object
        if self.error is not None:
            return Orders(stop=self.error)
        closed, place.to_close = tuple(place.to_close), []
        leases: list[LeaseOrder] = []
        place.short_of = ""
        while len(leases) < update.want_leases and (order := self._flow.next_lease(place, now_s)) is not None:
            leases.append(order)
        if place.short_of == "chunks" and len(leases) < update.want_leases and len(place.leases) < self._requests.limit:
            second = self._flow.second_lease(place, now_s)
            leases += [] if second is None else [second]
        readable = self._flow.grant(place)
        if not (closed or leases or readable):
            return None
        return Orders(tuple(leases), tuple(readable), closed, place.short_of, self._requests.limit)

    # -- inside ------------------------------------------------------------------------------------------------

    def _release_slots(self, place: RankPlace, now_s: float) -> set[bytes]:
        """Free all slots of a process that reports that it does not use the arena. Return the ended keys."""
        ended = {self._flow.keys[chunk] for chunk in place.leases.values()}
        for lease_id in (*place.leases, *place.taken_back):
            self._cache.abandon(lease_id)
        for lease_id, chunk in place.leases.items():
            self._flow.hedges.ended(lease_id, now_s)
            self._flow.queue.requeue(chunk, None, "", now_s=now_s)
        self._flow.stop_reading(place)
        place.leases.clear()
        place.taken_back.clear()
        place.to_close.clear()
        return ended

    def _vacate(self, place: RankPlace, next_incarnation: int, now_s: float) -> set[bytes]:
        """Take the rank from its process. Return the ended keys.

        Slots that the process uses stay fenced until the cache learns that it is dead.
        """
        ended = self._take_leases(place, "worker_died", now_s)
        self._flow.forget_needs(place)
        if place.process is not None and (place.taken_back or place.granted):
            self._former.append(place)
        self.ranks[place.rank] = RankPlace(place.rank, next_incarnation, lost=True, heard_s=now_s)
        return ended

    def _take_leases(self, place: RankPlace, cause: str, now_s: float) -> set[bytes]:
        """Revoke the leases of a rank. Return the ended keys. Its process may still write to their slots."""
        leases = dict(place.leases)
        place.leases.clear()
        place.taken_back |= leases.keys()
        for lease_id, chunk in leases.items():
            self._cache.revoke(lease_id, now_s)
            self._flow.hedges.ended(lease_id, now_s)
            self._flow.lease_lost(chunk, place.rank, cause, now_s)
        return {self._flow.keys[chunk] for chunk in leases.values()}

    def _rest_if_complete(self) -> None:
        """Release the arena share of a complete load: a load that is only resident must not block others."""
        if self.complete:
            self._checks.settle()
            self._cache.shares.end(self.job.part)
        self._checks.forget_damaged()
