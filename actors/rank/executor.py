"""Loads one rank with threads, links and a device; `actors.rank.state` decides. Any process on the node can host it.

    run() ---------- exchange loop: reports results to the agent, receives leases and readable chunks
      |  leases                                   ^ results
      v                                           |
    fetch threads -- store --> slot, or the rank's own memory (direct) -- digest --> placed while it is warm
      |                as many as the agent allows, started when first needed
      |  readable chunks (of other ranks, of the cache)
      v
    place thread --- device.place(slot -> segments) -> placed

Nothing here knows Ray: `AgentLink` is a handle to an actor in a cluster and an object in a test. A slot is written
only under a lease and read only under it or between `readable` and `placed`; when `run` ends, no thread touches it.

`ArenaMaps` holds the arenas that the process has mapped. Its ranks share a mapping. Mapping the pages of an arena
again costs 0.1 CPU s per GB, so a process that is kept warm keeps its mapping too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from actors.devices.cpu_device import PROCESS_MEMORY
from actors.devices.device import Device
from actors.links import AgentLink
from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.chunk_placer import ChunkPlacer
from actors.rank.rank_work import RankWork
from actors.rank.state import Next, RankIdentity, RankState
from cluster.errors import ClusterLost, LoadCancelled, empty_frames
from cluster.messages import DIRECT, ArenaAccess, RankJob, RankUpdate
from cluster.planning.packed_plan import unpack_shared
from cluster.planning.plan import RankPlan
from cluster.telemetry.logs import LogFields
from cluster.telemetry.stats import RankReport, RankStats, StageTimes
from storage.arena.arena import Arena
from storage.errors import IntegrityError, LongshoreError
from storage.host.memory import PeakMemory, own_bytes
from storage.host.processes import CpuClock, ProcessId, usable_cpus
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store


@dataclass(slots=True)
class _Mapping:
    arena: Arena
    users: int = 0


class ArenaMaps:
    """Mapped arenas and their users. Thread-safe. A user is a rank's loader, by a number unique in the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeps = False
        self._mappings: dict[str, _Mapping] = {}  # by epoch
        self._claims: dict[int, tuple[str, str]] = {}  # user -> (arena path, agent that granted access)

    def keep(self, keeps: bool) -> None:
        """From now on leave unused arenas mapped, or do not."""
        with self._lock:
            self._keeps = keeps
            if not keeps:
                self._close_unused()

    def open(self, path: str, epoch: str) -> Arena:
        """Return the arena at `path`, which has this epoch. Raises ArenaError."""
        with self._lock:
            self._close_unused(but=epoch)  # one that was replaced gives its memory back only when nobody maps it
            mapping = self._mappings.get(epoch)
            if mapping is None:
                arena = Arena.open(path)
                mapping = self._mappings.setdefault(arena.epoch, _Mapping(arena))
                if mapping.arena is not arena:
                    arena.close()
            mapping.users += 1
            return mapping.arena

    def close(self, arena: Arena) -> None:
        """End one use. Call it as often as `open`."""
        with self._lock:
            self._mappings[arena.epoch].users -= 1
            if not self._keeps:
                self._close_unused()

    def _close_unused(self, but: str = "") -> None:
        for epoch, mapping in list(self._mappings.items()):
            if not mapping.users and epoch != but:
                del self._mappings[epoch]
                mapping.arena.close()

    # -- users -------------------------------------------------------------------------------------------------

    def claim(self, user: int, path: str, agent: str) -> None:
        """This agent lets the user read and write the arena."""
        self._claims[user] = (path, agent)

    def release(self, user: int) -> None:
        """The user accesses no arena any more."""
        self._claims.pop(user, None)

    def access(self, but: int | None = None) -> ArenaAccess:
        """Return (arena path, agent) of the users in this process, without `but`."""
        return tuple(claim for key, claim in list(self._claims.items()) if key != but)


PROCESS_ARENAS = ArenaMaps()


class LoaderThreads:
    """Threads of a loader. The first error of each goes to `failed`."""

    def __init__(self, rank: int, failed: Callable[[LongshoreError], None]) -> None:
        self._rank = rank
        self._failed = failed
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, loop: Callable[[], None], name: str) -> None:
        """Start one more thread, which runs until `loop` returns."""
        thread = threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all. The caller has stopped them before."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except LongshoreError as error:
            empty_frames(error)
            self._failed(error)
        except BaseException as error:  # a bug or out of memory: the load must end, not hang
            self._failed(LongshoreError(f"{type(error).__name__} in a loader thread: {error}", rank=self._rank))


class RankMeter:
    """Time, memory and CPU of a rank. Create it after the imports and before any memory of the load."""

    def __init__(self) -> None:
        self._reported_s = -math.inf
        self.started_s = time.monotonic()
        self._memory = PeakMemory(kept_bytes=PROCESS_MEMORY.kept_bytes)
        self._cpu: CpuClock | None = None  # since there was something to do

    def import_torch(self) -> None:
        """Import torch for conversions before the load begins, so that its memory is not counted as the load's."""
        before = own_bytes()
        import actors.devices.convert  # noqa: F401

        self._memory.baseline_bytes += max(0, own_bytes() - before)

    def sample(self, *, at_work: bool) -> None:
        """Measure memory now. Call it after each answer of the agent. `at_work`: the rank has had something to do."""
        self._memory.sample()
        if at_work and self._cpu is None:
            self._cpu = CpuClock()

    def stats(
        self, every_s: float, state: RankState, fetcher: ChunkFetcher, placer: ChunkPlacer, *, last: bool
    ) -> RankStats | None:
        """Return the stats for the agent; None within `every_s` of the ones before, unless they are the `last`."""
        now_s = time.monotonic()
        if now_s - self._reported_s < every_s and not last:
            return None
        self._reported_s = now_s
        return RankStats(_stages(state, fetcher, placer), 0 if last else state.working, state.requests)

    def report(
        self,
        job: RankJob,
        plan: RankPlan,
        device: Device,
        state: RankState,
        fetcher: ChunkFetcher,
        placer: ChunkPlacer,
    ) -> RankReport:
        """Return the report of a rank that has placed everything just now."""
        now_s = time.monotonic()
        first_s = state.first_work_s or now_s
        self._memory.sample()
        return RankReport(
            rank=job.rank,
            node="",
            host=socket.gethostname(),
            pid=ProcessId.current().pid,
            device=device.name,
            incarnation=job.incarnation,
            size_bytes=plan.size_bytes,
            device_bytes=device.held_bytes,
            bytes_by_device=plan.bytes_by_device,
            stages=_stages(state, fetcher, placer),
            peak_host_bytes=self._memory.peak_bytes,
            start_s=first_s - self.started_s,
            load_s=now_s - first_s,
            baseline_host_bytes=self._memory.baseline_bytes,
            cpu_s=self._cpu.process_s() if self._cpu else 0.0,
            host_busy=self._cpu.host_busy() if self._cpu else 0.0,
            cpus=usable_cpus(),
            requests=state.requests,
            peak_requests=state.peak_requests,
            throttles=state.throttles,
            converted_tensors=placer.staging.converted,
            converted_bytes=sum(each.source.filled_bytes for each in plan.staged),
            peak_staging_bytes=placer.staging.peak_bytes,
            convert_s=placer.staging.convert_s,
        )


def _stages(state: RankState, fetcher: ChunkFetcher, placer: ChunkPlacer) -> StageTimes:
    """Return the time per stage so far. Other threads go on counting meanwhile."""
    spent = state.fetch_time
    return replace(
        fetcher.stage_times(placer.total),
        place_fetching_s=placer.fetching_s,
        device_s=placer.device_s,
        fresh_s=placer.fresh_s,
        working_s=spent.working_s,
        wait_slot_s=spent.wait_slot_s,
        wait_lease_s=spent.wait_lease_s,
        wait_retry_s=spent.wait_retry_s,
    )


AGENT_GONE_S = 60.0  # an agent that does not answer for this long is gone for good
AGENT_BACK_S = 15.0  # Ray restarts an agent, and the coordinator sends it its loads, well within this
PLACE_BATCH = 8  # chunks copied between two waits for the device

_MESSAGE_NUMBERS = itertools.count(1)  # of this process: an agent orders messages by them


class RankLoader:
    """Loader of one rank's slices. `run` blocks until they are all placed, or raises one typed error."""

    def __init__(
        self,
        link: AgentLink,
        job: RankJob,
        device: Device | Callable[[RankPlan], Device],
        *,
        store: ObjectStore | None = None,
    ) -> None:
        """`device`: the rank's device, or a function that creates it from the rank's plan."""
        self._link = link
        self._job = job
        self._store = store or open_store(job.store.ref, job.store.credentials, read_timeout_s=job.fetch.read_timeout_s)
        self._meter = RankMeter()
        self._tables = unpack_shared(job.shared)
        self.plan = self._tables.rank_plan(job.rank)
        self._device = device(self.plan) if callable(device) else device
        self._placer = ChunkPlacer(self._device, self.plan, self._tables)
        if self.plan.staged and self._device.receives:  # (a GPU's thread imports it anyway)
            self._meter.import_torch()
        direct = () if job.placement == "via_arena" else self._placer.direct_chunks()
        about = LogFields(job.load_id, job.attempt, job.rank)
        self._fetcher = ChunkFetcher(self._store, self._tables, job.fetch.attempts, about)
        choose = self._placer.staging.choose if self.plan.staged else None
        self.state = RankState(
            RankIdentity(job.load_id, job.attempt, job.rank, job.incarnation, ProcessId.current()),
            len(self.plan.chunk_ids),
            job.fetch.threads,
            _MESSAGE_NUMBERS,
            heartbeat_s=job.fetch.heartbeat_s,
            direct=direct,
            choose=choose,
        )
        self._work = RankWork(self.state, self._fetcher)
        self._threads = LoaderThreads(job.rank, self.cancel)  # the place thread and the fetch threads
        self._arena: Arena | None = None

    @property
    def started_s(self) -> float:
        """Creation time of this loader, by the monotonic clock."""
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
            report = self._meter.report(self._job, self.plan, self._device, self.state, self._fetcher, self._placer)
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
        """Introduce this rank to the agent. Raises ClusterLost, or the error that ends the load."""
        self._work.drain()
        PROCESS_ARENAS.release(id(self))  # no agent grants it access now
        give_up_s = time.monotonic() + patience_s
        while True:
            hello = self._work.hello(PROCESS_ARENAS.access(but=id(self)))
            try:
                reply = self._link.join(hello)
                self._work.welcomed(hello, reply)
                if reply.known:
                    break
                lost = ClusterLost("the node's agent does not know this load", load=self._job.load_id)
            except ClusterLost as error:
                lost = error
            if time.monotonic() > give_up_s:
                raise lost
            self._work.sleep(0.1)
        self._fetcher.use_disk(reply.disk_path)
        PROCESS_ARENAS.claim(id(self), reply.arena_path, reply.agent)
        if self._arena is None or self._arena.epoch != reply.arena_epoch:
            self._close_arena()
            self._arena = PROCESS_ARENAS.open(reply.arena_path, reply.arena_epoch)
            self._fetcher.use_arena(self._arena)
            self._device.attach_arena(self._arena.data())

    def _exchange_loop(self) -> None:
        """Return when every chunk is placed and the agent knows it, or will not come back."""
        while True:
            update = self._update(leaving=self._work.wait_for_update())
            try:
                orders = self._link.exchange(update)
            except ClusterLost:
                orders = None
            after = self._work.answered(update, orders)
            if after is Next.LEFT:
                return
            if after is Next.REJOIN and self.state.finished:
                # The agent must learn that this rank needs nothing, or it keeps chunks for it. But the bytes are
                # placed, so a load does not fail for it.
                try:
                    self._join(patience_s=AGENT_BACK_S)
                except IntegrityError:
                    raise
                except LongshoreError:
                    return
            elif after is Next.REJOIN:
                self._join()
            elif orders is not None:
                while len(self._threads) - 1 < self._work.fetch_threads():
                    self._threads.start(self._fetch_loop, f"fetch-{len(self._threads) - 1}")
                self._meter.sample(at_work=self.state.first_work_s is not None)

    def _update(self, *, leaving: bool) -> RankUpdate:
        others = PROCESS_ARENAS.access(but=id(self)) if leaving else ()
        stats = self._meter.stats(self._job.fetch.heartbeat_s, self.state, self._fetcher, self._placer, last=leaving)
        return self._work.update(leaving=leaving, others=others, stats=stats)

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
            placed_bytes = 0
            if result.commit is not None and direct:
                placed_bytes = self._placer.wanted_bytes(chunk)
            elif result.commit is not None and self._placer.at_once(chunk):
                # The chunk is warm now, and the lease still holds the slot.
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
        """Leave no thread, no mapping and no connection; return the slots to the agent."""
        self._work.stop(LoadCancelled("the load is over"))
        self._threads.join()
        self._fetcher.close()
        try:
            if failed:
                self._device.free()
            self._close_arena()
            if self.state.may_hold_slots:
                # Without this message the slots stay fenced for as long as this process lives.
                with contextlib.suppress(Exception):
                    self._link.exchange(self._update(leaving=True))
        finally:
            PROCESS_ARENAS.release(id(self))
            self._store.close()

    def _close_arena(self) -> None:
        arena, self._arena = self._arena, None
        self._fetcher.use_arena(None)
        if arena is not None:
            self._device.detach_arena()
            PROCESS_ARENAS.close(arena)
