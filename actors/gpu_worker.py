"""The process of one rank: hosts a RankLoader, then keeps the tensors and answers calls beside them.

    coordinator -- start(job) --> RankLoader.run in a thread --> outcome() returns its report, or raises its error
    client ------- call(fn) ----> fn(shard, ...) in this process, one at a time

Three groups of calls never wait for each other (`CONCURRENCY_GROUPS`): control, wait (calls that block for as long
as the load or the model lives) and call (the user's own functions, however long they take).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.device import Device, open_device
from actors.executor import AgentLink, RankLoader
from actors.shard import RankShard
from cluster.errors import LoadCancelled, ModelNotFound, RemoteCallFailed
from cluster.load_plan import RankPlan
from cluster.messages import RankJob, StoreAccess
from cluster.report import RankReport
from longshore.install_check import check_packages
from storage.errors import LongshoreError
from storage.processes import ProcessId

CONCURRENCY_GROUPS = {"control": 4, "wait": 8, "call": 1}


class GpuWorker:
    """One rank. Plain class; `actors.launch` makes an actor of it."""

    def __init__(self, node_id: str, device: str, orphan_after_s: float, link: AgentLink | None = None) -> None:
        check_packages()
        self._node_id = node_id
        self._device_kind = device
        self._orphan_after_s = orphan_after_s
        self._link = link
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # of the load
        self._store: StoreAccess | None = None
        self._loader: RankLoader | None = None
        self._device: Device | None = None
        self._plan: RankPlan | None = None
        self._shard: RankShard | None = None
        self._report: RankReport | None = None
        self._error: LongshoreError | None = None
        self._over = threading.Event()  # the load ended, well or not
        self._stopped = threading.Event()  # the worker is being ended

    # -- control -----------------------------------------------------------------------------------------------

    def ping(self) -> ProcessId:
        """Who this is; answers also while a load or a call runs."""
        return ProcessId.current()

    def start(self, job: RankJob, shared: bytes = b"") -> ProcessId:
        """Begin the load and return at once. The same job again changes nothing.

        `shared`: the tables of a job that came without (Ray hands over what an argument refers to).
        """
        job = replace(job, shared=job.shared or shared)
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._store = job.store
                self._thread = threading.Thread(target=self._load, args=(job,), name="load", daemon=True)
                self._thread.start()
                threading.Thread(target=self._watch, args=(job,), name="watch", daemon=True).start()
        return ProcessId.current()

    def store_access(self) -> StoreAccess | None:
        """How its job reads the store: a restarted coordinator asks, as credentials are in no saved state."""
        return self._store

    def stop(self) -> None:
        """End the load and let go of the memory; returns when no thread uses it any more. Idempotent."""
        with self._lock:
            self._stopped.set()
            loader, thread = self._loader, self._thread
        if loader is not None:
            loader.cancel()
        if thread is not None:
            thread.join()
        self._over.set()
        with self._lock:
            self._shard = None
            if self._device is not None:
                self._device.free()

    # -- wait --------------------------------------------------------------------------------------------------

    def outcome(self) -> RankReport:
        """The report when every slice is placed. Blocks; raises the load's error."""
        self._over.wait()
        if self._report is None:
            raise self._error or LoadCancelled("the rank was stopped")
        return self._report

    def lifetime(self) -> None:
        """Returns when the worker is told to stop; its caller learns of a death at once, by the error."""
        self._stopped.wait()

    # -- call --------------------------------------------------------------------------------------------------

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`fn(shard, *args, **kwargs)` beside the tensors. Raises what it raises; RemoteCallFailed when it exits."""
        shard = self._ready_shard()
        try:
            return fn(shard, *args, **kwargs)
        except SystemExit as error:
            # Ray would end this actor, but only after `lifetime` has returned: nobody would hear of it, for ever.
            raise RemoteCallFailed(
                f"the function called exit({error.code!r}) on rank {shard.rank}",
                hint="return from it instead; the rank and its tensors are still there",
                rank=shard.rank,
            ) from None

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._ready_shard())

    def tensor_copy(self, name: str) -> tuple[str, tuple[int, ...], NDArray[np.uint8]]:
        """(torch dtype's name, shape, bytes) of one tensor, on the host.

        As bytes, because torch cannot pickle tensors of its unsigned types and newer float types.
        """
        import torch

        tensor = self._ready_shard()[name].detach().cpu().contiguous()
        return (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.reshape(-1).view(torch.uint8).numpy(),
        )

    # -- inside ------------------------------------------------------------------------------------------------

    def _load(self, job: RankJob) -> None:
        try:
            self._device = open_device(self._device_kind)
            if self._link is None:
                from actors.agent_link import RayAgentLink

                self._link = RayAgentLink(self._node_id)
            loader = RankLoader(self._link, job, self._device)
            with self._lock:
                self._plan, self._loader = loader.plan, loader
                if self._stopped.is_set():
                    loader.cancel()
            report = loader.run()
            self._report = replace(report, node=self._node_id)
        except LongshoreError as error:
            self._error = error
        except BaseException as error:  # what nobody foresaw must reach the caller too, as something that pickles
            self._error = LongshoreError(f"{type(error).__name__} while loading: {error}", rank=job.rank)
        finally:
            self._over.set()

    def _ready_shard(self) -> RankShard:
        with self._lock:
            if self._report is None or self._device is None or self._plan is None or self._stopped.is_set():
                raise ModelNotFound("this rank holds no loaded model")
            if self._shard is None:
                self._shard = RankShard(self._plan, self._device)
            return self._shard

    def _watch(self, job: RankJob) -> None:
        """A worker that nobody coordinates any more ends itself, or it would hold its GPU for ever."""
        heard_s = time.monotonic()
        while not self._stopped.wait(max(job.fetch.heartbeat_s, self._orphan_after_s / 20)):
            if self._link is None:
                continue
            try:
                age_s = self._link.coordinator_age_s()
                heard_s = max(heard_s, time.monotonic() - age_s)
            except LongshoreError:
                pass  # nobody there, or nobody well
            if time.monotonic() - heard_s > self._orphan_after_s:
                os._exit(1)  # threads of the user's code may never return
