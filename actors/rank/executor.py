"""One rank's side of a load: lease, stream, verify, place. A plain class that any process on the node can host.

    run() ---------- exchange loop: tells the agent what was committed and placed, gets leases and readable chunks
      |  leases                                   ^ results
      v                                           |
    fetch threads -- store --> slot, or the rank's own memory (direct) -- digest --> placed while it is warm
      |                as many as the agent finds best, started when first needed
      |  readable chunks (of other ranks, of the cache)
      v
    place thread --- device.place(slot -> segments) -> placed

Nothing here knows Ray: `AgentLink` is a handle to an actor in a cluster and an object in a test. A slot is written
only under a lease and read only under it or between `readable` and `placed`; when `run` ends, no thread touches it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable

from actors.devices.device import Device
from actors.node.chunk_sources import by_source, source_of
from actors.rank.arena_maps import PROCESS_ARENAS
from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.chunk_placer import ChunkPlacer
from actors.rank.error_frames import empty_frames
from actors.rank.loader_threads import LoaderThreads
from actors.rank.rank_meter import RankMeter
from actors.rank.rank_results import Results
from actors.rank.rank_work import RankWork
from actors.rank_link import AgentLink
from cluster.errors import ClusterLost, LoadCancelled
from cluster.messages import DIRECT, Orders, RankHello, RankJob, RankUpdate
from cluster.plans.load_plan import RankPlan
from cluster.plans.packed_plan import unpack_shared
from cluster.telemetry.logs import LogFields
from cluster.telemetry.report import RankReport
from storage.arena.arena import Arena
from storage.errors import IntegrityError, LongshoreError
from storage.host.processes import ProcessId
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store

AGENT_GONE_S = 60.0  # an agent that does not answer for this long is not coming back
AGENT_BACK_S = 15.0  # Ray restarts an agent, and the coordinator tells it its loads, well within this
PLACE_BATCH = 8  # chunks copied between two waits for the device

_MESSAGE_NUMBERS = itertools.count(1)  # of this process: an agent tells by them which message is the older one


class RankLoader:
    """Loads one rank's slices. `run` blocks until they are all placed, or raises one typed error."""

    def __init__(
        self,
        link: AgentLink,
        job: RankJob,
        device: Device | Callable[[RankPlan], Device],
        *,
        store: ObjectStore | None = None,
    ) -> None:
        """`device`: the rank's, or what makes it when the plan is there."""
        self._link = link
        self._job = job
        self._process = ProcessId.current()
        self._store = store or open_store(job.store.ref, job.store.credentials, read_timeout_s=job.fetch.read_timeout_s)
        self._meter = RankMeter()
        self._tables = unpack_shared(job.shared)
        self.plan = self._tables.rank_plan(job.rank)
        self._device = device(self.plan) if callable(device) else device
        self._placer = ChunkPlacer(self._device, self.plan, self._tables)
        if self.plan.staged and self._device.receives:  # (a GPU's thread imports it anyway)
            self._meter.import_torch()
        self._direct = () if job.placement == "via_arena" else self._placer.direct_chunks()
        about = LogFields(job.load_id, job.attempt, job.rank)
        self._fetcher = ChunkFetcher(self._store, self._tables, job.fetch.attempts, about)
        choose = self._placer.staging.choose if self.plan.staged else None
        self._work = RankWork(self._fetcher, len(self.plan.chunk_ids), job.fetch.threads, choose)
        self._sources: dict[int, str] = {}  # of each chunk that was fetched here
        self._threads = LoaderThreads(job.rank, self.cancel)  # the place thread and the fetch threads
        self._arena: Arena | None = None
        self._joined = False  # the agent may hold slots for this rank

    @property
    def started_s(self) -> float:
        """When this loader was made, by the monotonic clock."""
        return self._meter.started_s

    # -- called by the host ------------------------------------------------------------------------------------

    def run(self) -> RankReport:
        """Load, and return when every slice is on the device. Raises LongshoreError; the device is freed then."""
        try:
            self._work.sleep(0)  # cancelled before it began?
            self._device.allocate(self.plan.segment_bytes)
            self._join()
            self._threads.start(self._place_loop, "place")
            self._exchange_loop()
            self._placer.finish()
            report = self._meter.report(self._job, self.plan, self._device, self._work, self._fetcher, self._placer)
        except BaseException as error:
            empty_frames(error)
            self._end(failed=True)
            raise
        self._end(failed=False)
        return report

    def cancel(self, error: LongshoreError | None = None) -> None:
        """Make `run` raise `error` soon (LoadCancelled when there is none). Too late, it changes nothing."""
        self._work.stop(error or LoadCancelled("the load was cancelled on this rank"))

    # -- the conversation with the agent -----------------------------------------------------------------------

    def _join(self, patience_s: float = AGENT_GONE_S) -> None:
        """Introduce this rank, which uses nothing of the arena now. Raises ClusterLost, or why the load is over."""
        PROCESS_ARENAS.let_go(id(self))  # by no agent's word any more
        give_up_s = time.monotonic() + patience_s
        while True:
            try:
                self._joined = True
                reply = self._link.join(self._hello())
                if reply.stop is not None:
                    raise reply.stop
                if reply.known:
                    break
                lost = ClusterLost("the node's agent does not know this load", load=self._job.load_id)
            except ClusterLost as error:
                lost = error
            if time.monotonic() > give_up_s:
                raise lost
            self._work.sleep(0.1)
        self._work.batch = reply.batch
        self._fetcher.use_disk(reply.disk_path)
        PROCESS_ARENAS.claim(id(self), reply.arena_path, reply.agent)
        if self._arena is None or self._arena.epoch != reply.arena_epoch:
            self._close_arena()
            self._arena = PROCESS_ARENAS.open(reply.arena_path, reply.arena_epoch)
            self._device.attach_arena(self._arena.data())

    def _exchange_loop(self) -> None:
        while True:
            if not self._work.idle:
                self._work.wait(self._job.fetch.heartbeat_s)
            finished = self._work.finished
            # What it fetches for others is told, not left to a deadline; the agent may say that it is not wanted.
            leaving = finished and self._work.drain(self._job.fetch.heartbeat_s, finish=True)
            try:
                orders = self._link.exchange(self._update(self._work.take_results(), leaving=leaving))
                agent_knows = not orders.rejoin
            except ClusterLost:
                orders, agent_knows = Orders(), False
            if leaving:
                if agent_knows or orders.stop is not None:
                    self._joined = False
                    if isinstance(orders.stop, IntegrityError):
                        raise orders.stop  # the last chunk of an object told that it is damaged
                    return
                # A restarted agent must learn that this rank needs nothing, or it keeps chunks for it. But the bytes
                # are placed, so a load does not fail for it.
                try:
                    self._join(patience_s=AGENT_BACK_S)
                except IntegrityError:
                    raise
                except LongshoreError:
                    return
                continue
            if finished:  # it only waits for what it fetches for others
                if orders.stop is not None:
                    self._work.abandon()  # nobody wants that; the last message will be told so again
                elif agent_knows:
                    self._take(orders)
                continue
            if orders.stop is not None:
                raise orders.stop
            if agent_knows:
                self._take(orders)
            else:
                self._work.drain()
                self._work.forget_leases()
                self._join()

    def _take(self, orders: Orders) -> None:
        self._work.take(orders)
        while len(self._threads) - 1 < self._work.fetch_threads():
            self._threads.start(self._fetch_loop, f"fetch-{len(self._threads) - 1}")
        self._meter.sample(at_work=self._work.first_work_s is not None)

    def _hello(self) -> RankHello:
        job = self._job
        return RankHello(
            job.load_id,
            job.attempt,
            job.rank,
            job.incarnation,
            self._process,
            placed=self._work.placed_chunks(),
            direct=self._direct,
            fetched=by_source(self._sources),
            number=next(_MESSAGE_NUMBERS),
            others=PROCESS_ARENAS.words(but=id(self)),
        )

    def _update(self, results: Results, *, leaving: bool) -> RankUpdate:
        job, fetched, now_s = self._job, results.fetched, time.monotonic()
        idle = self._work.idle and not (fetched or results.placed)
        return RankUpdate(
            job.load_id,
            job.attempt,
            job.rank,
            job.incarnation,
            self._process,
            number=next(_MESSAGE_NUMBERS),
            committed=tuple(result.commit for result in fetched if result.commit is not None),
            failed=tuple(result.failure for result in fetched if result.failure is not None),
            placed=tuple(results.placed),
            returned=tuple(r.lease_id for r in fetched if r.commit is None and r.failure is None),
            want_leases=0 if leaving else self._work.want_leases(),
            wait_s=job.fetch.heartbeat_s if idle and not leaving else 0.0,
            placed_bytes=self._work.placed_bytes,
            retries=dict(results.retries),
            requests=tuple((size_bytes, took_s, now_s - ended_s) for size_bytes, took_s, ended_s in results.requests),
            throttled=results.throttled,
            leaving=leaving,
            others=PROCESS_ARENAS.words(but=id(self)) if leaving else (),
            figures=self._meter.figures(job.fetch.heartbeat_s, self._work, self._fetcher, self._placer, last=leaving),
        )

    # -- threads -----------------------------------------------------------------------------------------------

    def _fetch_loop(self) -> None:
        clock, placing = self._fetcher.clock(), self._placer.clock(fetching=True)
        while (lease := self._work.next_lease()) is not None and self._arena is not None:
            chunk, begun_s = lease.chunk, time.monotonic()
            size_bytes = self._placer.chunk_bytes(chunk)
            direct = lease.slot == DIRECT
            parts = self._placer.direct_parts(chunk, placing) if direct else [self._arena.slot(lease.slot)[:size_bytes]]
            result = self._fetcher.fetch(lease, parts, clock)
            for part in parts:
                part.release()
            if result.commit is not None:
                self._sources[chunk] = source_of(lease.lease_id, result.commit.disk)
            placed_bytes = 0
            if result.commit is not None and direct:
                placed_bytes = self._placer.wanted_bytes(chunk)
            elif result.commit is not None and self._placer.at_once(chunk):
                # While it is warm, and without waiting to be told that it is there. The lease still holds the slot.
                placed_bytes = self._placer.place(self._arena, [(chunk, lease.slot)], placing)
            self._work.fetched(result, size_bytes, time.monotonic() - begun_s, placed_bytes)

    def _place_loop(self) -> None:
        clock = self._placer.clock()
        while True:
            waited_s = time.monotonic()
            chunks = self._work.next_chunks(PLACE_BATCH)
            if not chunks or self._arena is None:
                return
            clock.wait_s += time.monotonic() - waited_s
            self._placer.place(self._arena, chunks, clock)
            self._work.placed({chunk: self._placer.wanted_bytes(chunk) for chunk, _ in chunks})

    # -- the end -----------------------------------------------------------------------------------------------

    def _end(self, *, failed: bool) -> None:
        """No thread, no mapping and no connection is left; the agent gets its slots back."""
        self._work.stop(LoadCancelled("the load is over"))
        self._threads.join()
        self._fetcher.close()
        try:
            if failed:
                self._device.free()
            self._close_arena()
            if self._joined:
                # Unsaid, the slots would stay fenced for as long as this process lives. Said in vain, they do.
                with contextlib.suppress(Exception):
                    self._link.exchange(self._update(self._work.take_results(), leaving=True))
        finally:
            PROCESS_ARENAS.let_go(id(self))
            self._store.close()

    def _close_arena(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            self._device.detach_arena()
            PROCESS_ARENAS.close(arena)
