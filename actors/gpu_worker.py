"""The process of one rank: hosts a load, then keeps its tensors and answers calls beside them.

    coordinator -- start(job) --> HostedLoad in a thread --> outcome(load) returns its report, or raises its error
    client ------- call(load, packed function) --> fn(shard, ...) in this process, one at a time
    coordinator -- recycle(load) --> the process is as new, and another load may start

Three groups of calls never wait for each other (`CONCURRENCY_GROUPS`): control, wait (calls that block for as long
as the load or the model lives) and call (the user's own functions, however long they take). What belongs to a load
names it: an answer for the load before is never taken for one about this load.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from typing import Any

from actors.devices.cpu_device import PROCESS_MEMORY
from actors.rank.arena_maps import PROCESS_ARENAS
from actors.rank.hosted_load import HostedLoad, run_function
from actors.rank_link import AgentLink
from cluster.errors import LoadCancelled, ModelNotFound
from cluster.messages import RankJob, Version
from cluster.request import StoreAccess
from cluster.telemetry.logs import RepeatedWork, configure_logs
from cluster.telemetry.report import RankReport
from cluster.user_values import Cursor, Entry, Packed, Raised, TensorBatch, cut_batch
from longshore.install_check import check_packages
from longshore.version import VERSION
from storage.errors import LongshoreError
from storage.host.processes import ProcessId

_LOG = logging.getLogger("longshore.worker")
CONCURRENCY_GROUPS = {"control": 4, "wait": 8, "call": 1}
WATCHES_PER_ORPHANHOOD = 20
LEFT_ON_GPU_BYTES = 256 << 20  # workspaces of libraries, which stay: half of what a plan leaves free on a GPU


class GpuWorker:
    """One rank. Plain class; `actors.coordination.spawn` makes an actor of it."""

    def __init__(self, node_id: str, device: str, orphan_after_s: float, link: AgentLink | None = None) -> None:
        check_packages()
        self._node_id = node_id
        self._device_kind = device
        self._orphan_after_s = orphan_after_s
        self._link = link
        self._lock = threading.Condition()
        self._load: HostedLoad | None = None
        self._stopped = threading.Event()  # the worker is being ended
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # -- control -----------------------------------------------------------------------------------------------

    def hello(self) -> Version:
        """Return which Longshore this process runs: the first question to it, answered as soon as it is up."""
        return VERSION

    def start(self, job: RankJob, shared: bytes = b"") -> ProcessId:
        """Begin the load and return at once. A job while this worker has one changes nothing.

        `shared`: the tables of a job that came without (Ray hands over what an argument refers to).
        """
        job = replace(job, shared=job.shared or shared)
        configure_logs(job.logs)
        with self._lock:
            if self._load is None and not self._stopped.is_set():
                self._load = HostedLoad(job, self._node_id)
                self._load.begin(self._agent(), self._device_kind)
                self._lock.notify_all()
        return ProcessId.current()

    def assignment(self) -> tuple[str, StoreAccess] | None:
        """(load id, how its job reads the store): a restarted coordinator asks, as credentials are in no saved state.

        None when this worker waits for a job.
        """
        load = self._load
        return None if load is None else (load.job.load_id, load.job.store)

    def recycle(self, load_id: str) -> int | None:
        """Let go of this load's memory and be ready for another load; the bytes kept for that one. Idempotent.

        None: the process is not as new, because a call of the user's still works on the tensors, or what it made
        still takes GPU memory. Then the worker can only be ended.
        """
        with self._lock:
            load = self._load
        if load is not None:
            PROCESS_MEMORY.keep(self._device_kind == "cpu")  # on a GPU only a device map has some there
            PROCESS_ARENAS.keep(True)
            if load.job.load_id != load_id or not load.let_go() or self._gpu_memory_in_use():
                return None
            with self._lock:
                self._load = None
        return None if self._stopped.is_set() else PROCESS_MEMORY.kept_bytes

    def stop(self) -> None:
        """End the load and let go of the memory; returns when no thread uses it any more. Idempotent."""
        with self._lock:
            self._stopped.set()
            load = self._load
            self._lock.notify_all()
        if load is not None:
            load.let_go()

    # -- wait --------------------------------------------------------------------------------------------------

    def outcome(self, load_id: str) -> RankReport:
        """The report when every slice is placed. Blocks; raises the load's error."""
        load = self._load
        if load is None or load.job.load_id != load_id:
            raise LoadCancelled("this worker does not work on the load (any more)", model=load_id)
        return load.outcome()

    def lifetime(self, load_id: str) -> None:
        """Returns when the worker lets go of the load; its caller learns of a death at once, by the error."""
        load = self._load
        if load is not None and load.job.load_id == load_id:
            load.let_go_of.wait()

    def idleness(self) -> None:
        """Returns when the worker has a job or is told to stop; its caller learns of a death at once, by the error."""
        with self._lock:
            self._lock.wait_for(lambda: self._load is not None or self._stopped.is_set())

    # -- call --------------------------------------------------------------------------------------------------

    def call(self, load_id: str, call: Packed) -> Packed | Raised:
        """Run a user's function beside the tensors: see `run_function`."""
        with self._loaded(load_id).shard() as shard:
            return run_function(shard, call)

    def tensor_batch(self, load_id: str, start: Cursor, most_bytes: int) -> TensorBatch:
        """Copy the bytes of tensors to the host, from `start` on, at most so many (`cut_batch`).

        As bytes, because torch cannot pickle tensors of its unsigned types and newer float types.
        """
        import torch

        from actors.handover.tensor_views import as_bytes

        with self._loaded(load_id).shard() as shard:
            sizes = (tensor.nbytes for tensor in islice(shard.values(), start.tensor, None))
            parts, after = cut_batch(sizes, start, most_bytes)
            data = torch.empty(sum(part.size_bytes for part in parts), dtype=torch.uint8)
            entries, begin = [], 0
            for (_, offset, size_bytes), (name, tensor) in zip(
                parts, islice(shard.items(), start.tensor, None), strict=False
            ):
                data[begin : begin + size_bytes] = as_bytes(tensor)[offset : offset + size_bytes]
                begin += size_bytes
                dtype = str(tensor.dtype).removeprefix("torch.")
                entries.append(Entry(name, dtype, tuple(tensor.shape), tensor.nbytes, offset, size_bytes))
            return TensorBatch(tuple(entries), data.numpy(), after)

    # -- inside ------------------------------------------------------------------------------------------------

    def _loaded(self, load_id: str) -> HostedLoad:
        load = self._load
        if load is None or load.job.load_id != load_id:
            raise ModelNotFound("this rank holds no loaded model", model=load_id)
        return load

    def _agent(self) -> AgentLink:
        if self._link is None:
            from actors.agent_link import RayAgentLink

            self._link = RayAgentLink(self._node_id)
        return self._link

    def _gpu_memory_in_use(self) -> bool:
        """Whether tensors are left on the GPU; imports nothing, for a worker in CPU memory has no torch."""
        torch: Any = sys.modules.get("torch") if self._device_kind == "cuda" else None
        if torch is None or torch.cuda.memory_allocated() <= LEFT_ON_GPU_BYTES:
            return False
        gc.collect()  # tensors in circles of the user's objects
        torch.cuda.empty_cache()
        return bool(torch.cuda.memory_allocated() > LEFT_ON_GPU_BYTES)

    def _watch(self) -> None:
        """A worker that nobody coordinates any more ends itself, or it would hold its GPU for ever; an idle one too."""
        heard_s, work = time.monotonic(), RepeatedWork(_LOG)
        while not self._stopped.wait(self._orphan_after_s / WATCHES_PER_ORPHANHOOD):
            with work.turn("asking the agent for the coordinator"), contextlib.suppress(LongshoreError):
                age_s = self._agent().check_in(ProcessId.current(), PROCESS_ARENAS.words())
                heard_s = max(heard_s, time.monotonic() - age_s)
            if time.monotonic() - heard_s > self._orphan_after_s:
                os._exit(1)  # threads of the user's code may never return
