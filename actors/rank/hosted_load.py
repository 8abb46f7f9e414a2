"""One load inside a worker's process: from its job until it is let go of. A worker hosts one after another.

    HostedLoad(job) -> run() in a thread -> outcome() -> shard() for calls -> let_go()

Whatever belongs to one load only is in here, so that nothing of it can be taken for the next one's.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from actors.devices.device import Device, open_device
from actors.devices.mapped_device import open_mapped_rank
from actors.devices.opening_device import OpeningDevice
from actors.rank.executor import RankLoader
from actors.rank_link import AgentLink
from actors.shard import RankShard
from cluster.errors import LoadCancelled, ModelNotFound
from cluster.messages import RankJob
from cluster.plans.load_plan import RankPlan
from cluster.telemetry.report import RankReport
from storage.errors import LongshoreError


class HostedLoad:
    """See above. Thread-safe."""

    def __init__(self, job: RankJob, node_id: str) -> None:
        self.job = job
        self.let_go_of = threading.Event()
        self._given_s = time.monotonic()
        self._node_id = node_id
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loader: RankLoader | None = None
        self._device: Device | None = None
        self._plan: RankPlan | None = None
        self._shard: RankShard | None = None
        self._report: RankReport | None = None
        self._error: LongshoreError | None = None
        self._over = threading.Event()  # the load ended, well or not
        self._in_use = 0  # calls that work on the shard

    def begin(self, link: AgentLink, device: str) -> None:
        """Run the load in a thread."""
        self._thread = threading.Thread(target=self._run, args=(link, device), name="load", daemon=True)
        self._thread.start()

    def outcome(self) -> RankReport:
        """The report when every slice is placed. Blocks; raises the load's error."""
        self._over.wait()
        if self._report is None:
            raise self._error or LoadCancelled("the rank was stopped")
        return self._report

    @contextmanager
    def shard(self) -> Iterator[RankShard]:
        """The tensors, which stay for the length of the block. Raises ModelNotFound when there are none (any more)."""
        with self._lock:
            if self._report is None or self._device is None or self._plan is None or self.let_go_of.is_set():
                raise ModelNotFound("this rank holds no loaded model", model=self.job.load_id)
            if self._shard is None:
                self._shard = RankShard(self._plan, self._device)
            self._in_use += 1
            shard = self._shard
        try:
            yield shard
        finally:
            with self._lock:
                self._in_use -= 1

    def let_go(self) -> bool:
        """End the load and let go of its memory; returns when no thread of it uses that any more. Idempotent.

        False: a call still works on the tensors.
        """
        with self._lock:
            self.let_go_of.set()
            loader, thread = self._loader, self._thread
        if loader is not None:
            loader.cancel()
        if thread is not None:
            thread.join()
        self._over.set()
        with self._lock:
            kept = self._shard is not None and bool(self._shard.kept)
            self._shard = None
            if self._device is not None:
                self._device.free()
            free = not self._in_use
        if kept:  # modules hold themselves, as a rule, and with themselves the memory
            gc.collect()
        return free

    def _open_mapped(self, plan: RankPlan) -> Device:
        """Devices of a device map, which only the plan names."""
        self._device = open_mapped_rank(plan, self.job)
        return self._device

    def _run(self, link: AgentLink, device: str) -> None:
        try:
            if not self.job.mapped:
                self._device = _device(device)
            loader = RankLoader(link, self.job, self._device or self._open_mapped)
            with self._lock:
                self._plan, self._loader = loader.plan, loader
                if self.let_go_of.is_set():
                    loader.cancel()
            report = loader.run()
            made_s = loader.started_s - self._given_s
            self._report = replace(report, node=self._node_id, start_s=report.start_s + made_s)
        except LongshoreError as error:
            self._error = error
        except BaseException as error:  # what nobody foresaw must reach the caller too, as something that pickles
            self._error = LongshoreError(f"{type(error).__name__} while loading: {error}", rank=self.job.rank)
        finally:
            with self._lock:
                self._loader = None  # its tables and plan are needed no more
            self._over.set()


def _device(kind: str) -> Device:
    """Host memory at once; a GPU comes up while the first chunks are fetched."""
    return open_device(kind) if kind == "cpu" else OpeningDevice(lambda: open_device(kind))
