"""Loads one rank with threads and a device; `actors.rank.state` decides. Any process on the node can host it.

run() ---------- exchange loop: reports results to the agent, receives leases and readable chunks
  |  leases                                   ^ results
  v                                           |
fetch threads -- store --> slot, or the rank's own memory (direct) -- digest --> placed while it is warm
  |                as many as the agent allows, started when first needed
  |  readable chunks (of other ranks, of the cache)
  v
place thread --- device.place(slot -> segments) -> placed
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from actors.devices.cpu_device import PROCESS_MEMORY
from actors.devices.device import Device
from actors.links import AgentLink
from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.chunk_placer import ChunkPlacer
from actors.rank.loader import MESSAGE_NUMBERS, ChunkLoader, RankWork
from actors.rank.state import RankIdentity, RankState
from cluster.errors import empty_frames
from cluster.messages import DIRECT, RankJob
from cluster.planning.packed_plan import SharedTables, unpack_shared
from cluster.planning.plan import RankPlan
from cluster.telemetry.logs import LogFields
from cluster.telemetry.stats import RankReport, RankStats, StageTimes
from storage.arena.arena import Arena
from storage.host.memory import PeakMemory, own_bytes
from storage.host.processes import CpuClock, ProcessId, usable_cpus
from storage.stores.object_store import ObjectStore
from storage.stores.open_store import open_store


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


PLACE_BATCH = 8  # chunks copied between two waits for the device


class RankLoader(ChunkLoader):
    """Loader of one rank's slices. `run` blocks until they are all placed, or raises one typed error."""

    def __init__(
        self,
        link: AgentLink,
        job: RankJob,
        device: Device | Callable[[RankPlan], Device],
        *,
        store: ObjectStore | None = None,
        plan_of: Callable[[SharedTables], RankPlan] | None = None,
    ) -> None:
        """`device`: the rank's device, or a function that creates it from the rank's plan.

        `plan_of`: makes that plan. None: the tables' own, in fresh memory.
        """
        self._job = job
        store = store or open_store(job.store.ref, job.store.credentials, read_timeout_s=job.fetch.read_timeout_s)
        self._meter = RankMeter()
        tables = unpack_shared(job.shared)
        self.plan = tables.rank_plan(job.rank) if plan_of is None else plan_of(tables)
        self._device = device(self.plan) if callable(device) else device
        self._placer = ChunkPlacer(self._device, self.plan, tables)
        if self.plan.staged and self._device.receives:  # (a GPU's thread imports it anyway)
            self._meter.import_torch()
        direct = () if job.placement == "via_arena" else self._placer.direct_chunks()
        about = LogFields(job.load_id, job.attempt, job.rank)
        fetcher = ChunkFetcher(store, tables, job.fetch.attempts, about)
        choose = self._placer.staging.choose if self.plan.staged else None
        state = RankState(
            RankIdentity(job.load_id, job.attempt, job.rank, job.incarnation, ProcessId.current()),
            len(self.plan.chunk_ids),
            job.fetch.threads,
            MESSAGE_NUMBERS,
            heartbeat_s=job.fetch.heartbeat_s,
            direct=direct,
            choose=choose,
            revision=job.revision,
        )
        super().__init__(link, job.load_id, state, fetcher, store, RankWork(state, fetcher))

    @property
    def started_s(self) -> float:
        """Creation time of this loader, by the monotonic clock."""
        return self._meter.started_s

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
            self._end(self._device.free)
            raise
        self._end()
        return report

    # -- what `ChunkLoader` calls ------------------------------------------------------------------------------

    def _attach(self, arena: Arena) -> None:
        self._device.attach_arena(arena.data(), arena.slot_bytes)

    def _detach(self) -> None:
        self._device.detach_arena()

    def _answered(self) -> None:
        self._meter.sample(at_work=self.state.first_work_s is not None)

    def _stats(self, *, last: bool) -> RankStats | None:
        return self._meter.stats(self._job.fetch.heartbeat_s, self.state, self._fetcher, self._placer, last=last)

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
