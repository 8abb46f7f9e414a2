"""What a rank measures while it loads: its own memory and processor time; and its report."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import replace

from actors.devices.device import Device
from actors.devices.segment_memory import PROCESS_MEMORY
from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.chunk_placer import ChunkPlacer
from actors.rank.rank_work import RankWork
from cluster.messages import RankJob
from cluster.plans.load_plan import RankPlan
from cluster.telemetry.figures import RankFigures
from cluster.telemetry.report import RankReport, StageTimes
from storage.host.memory import PeakMemory, own_bytes
from storage.host.processes import CpuClock, ProcessId, usable_cpus


class RankMeter:
    """Made when everything is imported, and nothing of the load is there yet."""

    def __init__(self) -> None:
        self._told_s = -math.inf
        self.started_s = time.monotonic()
        self._memory = PeakMemory(kept_bytes=PROCESS_MEMORY.kept_bytes)
        self._cpu: CpuClock | None = None  # since there was something to do

    def import_torch(self) -> None:
        """For conversions, before the load begins: what it takes is no part of the load."""
        before = own_bytes()
        import actors.devices.convert  # noqa: F401

        self._memory.baseline_bytes += max(0, own_bytes() - before)

    def sample(self, *, at_work: bool) -> None:
        """Look now; called whenever the agent has answered. `at_work`: it has had something to do."""
        self._memory.sample()
        if at_work and self._cpu is None:
            self._cpu = CpuClock()

    def figures(
        self, every_s: float, work: RankWork, fetcher: ChunkFetcher, placer: ChunkPlacer, *, last: bool
    ) -> RankFigures | None:
        """For the agent; None when it was told less than `every_s` ago, and this is not the `last` time."""
        now_s = time.monotonic()
        if now_s - self._told_s < every_s and not last:
            return None
        self._told_s = now_s
        return RankFigures(_stages(work, fetcher, placer), 0 if last else work.working, work.requests)

    def report(
        self,
        job: RankJob,
        plan: RankPlan,
        device: Device,
        work: RankWork,
        fetcher: ChunkFetcher,
        placer: ChunkPlacer,
    ) -> RankReport:
        """The rank has placed everything just now."""
        now_s = time.monotonic()
        first_s = work.first_work_s or now_s
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
            stages=_stages(work, fetcher, placer),
            peak_host_bytes=self._memory.peak_bytes,
            start_s=first_s - self.started_s,
            load_s=now_s - first_s,
            baseline_host_bytes=self._memory.baseline_bytes,
            cpu_s=self._cpu.process_s() if self._cpu else 0.0,
            host_busy=self._cpu.host_busy() if self._cpu else 0.0,
            cpus=usable_cpus(),
            requests=work.requests,
            peak_requests=work.peak_requests,
            throttles=work.throttles,
            converted_tensors=placer.staging.converted,
            converted_bytes=sum(each.source.filled_bytes for each in plan.staged),
            peak_staging_bytes=placer.staging.peak_bytes,
            convert_s=placer.staging.convert_s,
        )


def _stages(work: RankWork, fetcher: ChunkFetcher, placer: ChunkPlacer) -> StageTimes:
    """Where the time went so far. Other threads go on counting meanwhile."""
    spent = work.fetch_time
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
