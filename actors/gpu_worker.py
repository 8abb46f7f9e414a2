"""The process of one rank: hosts a load, then keeps its tensors and runs users' functions on them.

    coordinator -- start(job) --> HostedLoad in a thread --> outcome(load) returns its report, or raises its error
    client ------- call(load, packed function) --> fn(shard, ...) in this process, one at a time
    coordinator -- stage_update(job) .. exchange_update(load) --> the tensors have another revision's contents
    coordinator -- recycle(load) --> the process is as new, and another load may start

Three groups of calls never wait for each other (`CONCURRENCY_GROUPS`): control, wait and call. Wait calls block as long
as the load or the model lives. The group "call" runs the user's own functions, however long they take. Calls name
their load, so an answer about the previous load is never taken for one about this load.

`HostedLoad` is one load in a worker's process, from its job until its release. A worker hosts one after another.

    HostedLoad(job) -> begin() runs it in a thread -> outcome() -> shard() for calls -> let_go()

All state of one load is in that object, so nothing of it can leak into the next load.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from actors.devices.cpu_device import PROCESS_MEMORY
from actors.devices.device import Device, OpeningDevice, open_device
from actors.links import AgentLink
from actors.rank.executor import RankLoader
from actors.rank.loader import PROCESS_ARENAS
from actors.shard import RankShard
from cluster.errors import LoadCancelled, ModelBroken, ModelNotFound, RemoteCallFailed, UpdateFailed
from cluster.messages import Assignment, RankJob, UpdateJob, Version
from cluster.planning.plan import RankPlan
from cluster.telemetry.logs import RepeatedWork, configure_logs
from cluster.telemetry.stats import RankReport
from cluster.user_values import Cursor, Entry, Packed, Raised, TensorBatch, cut_batch, pack, show_cause, unpack
from longshore.installation import VERSION, check_packages
from storage.errors import LongshoreError
from storage.host.memory import without_collector
from storage.host.processes import ProcessId

if TYPE_CHECKING:
    from actors.rank.update import RankUpdate


class Gate:
    """Lets many calls use the tensors, or one writer change them.

    An exchange waits until no call uses the tensors, and calls that come meanwhile wait for its end. So a call never
    sees contents of two revisions on its rank.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writers = 0  # that write or wait to
        self._writing = False
        self.calls = 0  # that use the tensors

    @contextmanager
    def call(self) -> Iterator[None]:
        """Keep writers out for the length of the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writers)
            self.calls += 1
        try:
            yield
        finally:
            with self._changed:
                self.calls -= 1
                self._changed.notify_all()

    @contextmanager
    def write(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Keep calls and other writers out for the length of the block. Raises LoadCancelled when cancelled before."""
        with self._changed:
            self._writers += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: cancelled() or not (self._writing or self.calls))
                if cancelled():
                    raise LoadCancelled("the update was cancelled on this rank")
                self._writing = True
            try:
                yield
            finally:
                with self._changed:
                    self._writing = False
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()

    def settle(self) -> None:
        """Return when nobody writes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)

    def wake(self) -> None:
        """Let writers look again whether they were cancelled."""
        with self._changed:
            self._changed.notify_all()


class HostedLoad:
    """One load in a worker's process. Thread-safe."""

    def __init__(self, job: RankJob, node_id: str) -> None:
        self.job = job
        self.released = threading.Event()
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
        self._over = threading.Event()  # the load ended, successfully or not
        self._gate = Gate()
        self._update: RankUpdate | None = None
        self._updated = ""  # id of the last update whose contents the tensors have
        self._broken: LongshoreError | None = None  # error of a streaming update that left contents of two revisions

    def begin(self, link: AgentLink, device: str) -> None:
        """Run the load in a thread."""
        self._thread = threading.Thread(target=self._run, args=(link, device), name="load", daemon=True)
        self._thread.start()

    def outcome(self) -> RankReport:
        """Return the report once every slice is placed. Blocks. Raises the load's error."""
        self._over.wait()
        if self._report is None:
            raise self._error or LoadCancelled("the rank was stopped")
        return self._report

    @contextmanager
    def shard(self) -> Iterator[RankShard]:
        """Yield the tensors, which stay and are not updated for the length of the block.

        Raises ModelNotFound when there are none, ModelBroken after a streaming update that failed.
        """
        with self._gate.call():
            with self._lock:
                plan, device = self._loaded()
                if self._broken is not None:
                    raise ModelBroken(
                        "a streaming update failed, and this rank has contents of two revisions",
                        hint="update the model again, or release it",
                        model=self.job.load_id,
                        cause=str(self._broken)[:300],
                    )
                if self._shard is None:
                    self._shard = RankShard(plan, device)
                shard = self._shard
                shard.revision = self.job.revision
            yield shard

    def _loaded(self) -> tuple[RankPlan, Device]:
        if self._report is None or self._device is None or self._plan is None or self.released.is_set():
            raise ModelNotFound("this rank holds no loaded model", model=self.job.load_id)
        return self._plan, self._device

    @property
    def assignment(self) -> Assignment:
        """What this load is, with the update that it stages or has staged."""
        update = self._update
        if update is None or update.error is not None:
            return Assignment(self.job.load_id, self.job.store, self.job.revision)
        pending = update.job.update_id, update.job.job.store
        return Assignment(self.job.load_id, self.job.store, self.job.revision, *pending)

    # -- updates -------------------------------------------------------------------------------------------------------

    def stage(self, job: UpdateJob, link: AgentLink) -> None:
        """Begin an update, unless it was begun. One that was begun before and not exchanged is dropped.

        Raises ModelNotFound, and UpdateFailed when the rank does not have the revision that the update begins with.
        """
        with self._lock:
            before = self._update
            if job.update_id in (self._updated, before.job.update_id if before is not None else ""):
                return
            plan, device = self._loaded()
            if job.base and job.base != self.job.revision:
                raise UpdateFailed("the rank has another revision", expected=job.base, found=self.job.revision)
            from actors.rank.update import RankUpdate  # not at the top: most workers never need it

            update = self._update = RankUpdate(job, plan, device, self._gate)
        if before is not None:
            before.drop()
        update.begin(link, lambda: self._streamed(update))

    def staged(self, update_id: str) -> RankReport | None:
        """Return the report once the update is staged, or streamed; None where nothing changed.

        Blocks. Raises the update's error.
        """
        update = self._update
        if update is None or update.job.update_id != update_id:
            raise UpdateFailed("this rank does not work on the update", update=update_id)
        return update.outcome()

    def exchange(self, update_id: str, revision: str) -> float:
        """Give the tensors the staged contents. Return the seconds of the copy. Idempotent.

        A stream is waited for. A rank that was loaded from that revision has it. Raises UpdateFailed when the rank has
        not staged the update.
        """
        update = self._update
        if update is not None and update.job.update_id == update_id and update.job.streaming:
            update.outcome()
        if update_id == self._updated:
            return 0.0
        if update is None or update.job.update_id != update_id or not update.done:
            if revision == self.job.revision and update is None and self._broken is None:
                return 0.0
            raise UpdateFailed("the rank has not staged the update", update=update_id, rank=self.job.rank)
        seconds = update.exchange(lambda: self._take_over(update))
        update.free()
        return seconds

    def drop_update(self, update_id: str) -> None:
        """End an update that was not exchanged, and free what it staged. Idempotent."""
        with self._lock:
            update = self._update
            if update is None or (update_id and update.job.update_id != update_id):
                return
            self._update = None
        update.drop()

    def _take_over(self, update: RankUpdate) -> None:
        """Note that the tensors have the update's contents, while calls still wait."""
        job = update.job.job
        with self._lock:
            self._updated, self._broken = update.job.update_id, None
            self.job = replace(self.job, store=job.store, revision=job.revision)
            if self._update is update:
                self._update = None

    def _streamed(self, update: RankUpdate) -> None:
        """Note how an update ended, while calls still wait."""
        if update.job.streaming and update.done:
            with self._lock:
                self._updated, self._broken = update.job.update_id, None
                self.job = replace(self.job, store=update.job.job.store, revision=update.job.job.revision)
        elif update.wrote:
            with self._lock:
                self._broken = update.error

    def release(self) -> bool:
        """End the load and release its memory. Return when no thread of the load uses it any more. Idempotent.

        Returns False when a call still uses the tensors.
        """
        with self._lock:
            self.released.set()
            loader, thread = self._loader, self._thread
        self.drop_update("")
        self._gate.settle()
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
            free = not self._gate.calls
        if kept:  # modules usually have reference cycles, which keep the memory
            gc.collect()
        return free

    def _open_mapped(self, plan: RankPlan) -> Device:
        """Open the devices of a device map, which only the plan names."""
        from actors.devices.mapped_device import open_mapped_rank

        self._device = open_mapped_rank(plan, self.job)
        return self._device

    def _run(self, link: AgentLink, device: str) -> None:
        try:
            if not self.job.mapped:
                self._device = _device(device)
            loader = RankLoader(link, self.job, self._device or self._open_mapped)
            with self._lock:
                self._plan, self._loader = loader.plan, loader
                if self.released.is_set():
                    loader.cancel()
            report = loader.run()
            made_s = loader.started_s - self._given_s
            self._report = replace(report, node=self._node_id, start_s=report.start_s + made_s)
        except LongshoreError as error:
            self._error = error
        except BaseException as error:  # unexpected errors must reach the caller too, as a type that pickles
            self._error = LongshoreError(f"{type(error).__name__} while loading: {error}", rank=self.job.rank)
        finally:
            with self._lock:
                self._loader = None  # frees its tables and plan
            self._over.set()


def _device(kind: str) -> Device:
    """Open host memory at once. Start a GPU in a thread while the first chunks are fetched."""
    return open_device(kind) if kind == "cpu" else OpeningDevice(lambda: open_device(kind))


MOST_TEXT_CHARS = 20_000  # limit for a traceback, because its message may contain a whole array


def run_function(shard: RankShard, call: Packed) -> Packed | Raised:
    """Run `fn(shard, *args, **kwargs)`. A coroutine is awaited, and an iterator becomes a list of all its items.

    Returns the function's exception instead of raising it. Raises RemoteCallFailed when the call cannot be unpickled
    here, when the function exits, and when its result cannot be pickled.
    """
    try:
        fn, args, kwargs = unpack(call)
    except Exception as error:
        raise RemoteCallFailed(
            f"the function cannot be read on rank {shard.rank}",
            hint="its modules must be installed on every node, or sent by Ray's runtime_env",
            rank=shard.rank,
            cause=show_cause(error),
        ) from None
    try:
        result = _whole(fn(shard, *args, **kwargs))
    except SystemExit as error:
        # Ray would end this actor only after `lifetime` has returned, so no caller would ever be notified.
        raise RemoteCallFailed(
            f"the function called exit({error.code!r}) on rank {shard.rank}",
            hint="return from the function instead; the rank still has its tensors",
            rank=shard.rank,
        ) from None
    except BaseException as error:
        return _raised(error)
    try:
        return pack(result)
    except BaseException as error:
        raise RemoteCallFailed(
            f"the result of rank {shard.rank} cannot be sent: it is a {type(result).__name__}",
            hint="return numbers, strings, numpy arrays or tensors on the CPU; shard.kept keeps what later calls need",
            rank=shard.rank,
            type=type(result).__name__,
            cause=show_cause(error),
        ) from None


def _whole(result: Any) -> Any:
    """Wait for a coroutine, and take all items of an iterator, because neither can leave this process."""
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if isinstance(result, AsyncIterator):
        return asyncio.run(_all_items(result))
    return list(result) if isinstance(result, Iterator) else result


async def _all_items(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def _raised(error: BaseException) -> Raised:
    trace = error.__traceback__
    shown = error.with_traceback(trace.tb_next if trace else None)  # from the user's function on
    text = "".join(traceback.format_exception(shown))
    if len(text) > MOST_TEXT_CHARS:
        half = MOST_TEXT_CHARS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"
    try:
        exception = pack(error)
        unpack(exception)  # some exceptions can be pickled but not unpickled
    except BaseException:
        exception = None
    return Raised(text, type(error).__name__, exception)


_LOG = logging.getLogger("longshore.worker")
CONCURRENCY_GROUPS = {"control": 4, "wait": 8, "call": 1}
WITHDRAWN_KEPT = 1000  # ids of withdrawn calls
WATCHES_PER_ORPHANHOOD = 20
LEFT_ON_GPU_BYTES = 256 << 20  # allowed for workspaces of libraries: half of what a plan leaves free on a GPU


class GpuWorker:
    """The process of one rank, as a plain class. `actors.coordination.spawn` makes the actor."""

    def __init__(self, node_id: str, device: str, orphan_after_s: float, link: AgentLink | None = None) -> None:
        check_packages()
        self._node_id = node_id
        self._device_kind = device
        self._orphan_after_s = orphan_after_s
        self._link = link
        self._lock = threading.Condition()
        self._load: HostedLoad | None = None
        self._stopped = threading.Event()  # the worker is ending
        self._withdrawn: OrderedDict[str, None] = OrderedDict()  # ids of calls that must not begin
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # -- control -----------------------------------------------------------------------------------------------

    def hello(self) -> Version:
        """Return the Longshore version of this process. It is the first call, answered once the process has started."""
        return VERSION

    def start(self, job: RankJob, shared: bytes = b"") -> ProcessId:
        """Begin the load and return at once. Does nothing when this worker already has a job.

        `shared`: the tables of a job that came without them, from Ray's object store.
        """
        job = replace(job, shared=job.shared or shared)
        configure_logs(job.logs)
        with self._lock:
            if self._load is None and not self._stopped.is_set():
                self._load = HostedLoad(job, self._node_id)
                self._load.begin(self._agent(), self._device_kind)
                self._lock.notify_all()
        return ProcessId.current()

    def assignment(self) -> Assignment | None:
        """Return what this worker works on, or None when it waits for a job. A restarted coordinator asks for it."""
        load = self._load
        return None if load is None else load.assignment

    def stage_update(self, job: UpdateJob, shared: bytes = b"") -> None:
        """Begin an update of this rank and return at once. Does nothing when it was begun.

        `shared`: the tables of a job that came without them, from Ray's object store.
        """
        job = replace(job, job=replace(job.job, shared=job.job.shared or shared))
        self._loaded(job.model_id).stage(job, self._agent())

    def drop_update(self, load_id: str, update_id: str) -> None:
        """End an update that is not to be exchanged, and free what it staged. Idempotent."""
        load = self._load
        if load is not None and load.job.load_id == load_id:
            load.drop_update(update_id)

    def recycle(self, load_id: str) -> int | None:
        """Release this load's memory and be ready for another load. Idempotent.

        Returns the bytes of memory kept for the next load. Returns None when the worker can only be ended, because a
        user's call still uses the tensors, or its objects still take GPU memory.
        """
        with self._lock:
            load = self._load
        if load is not None:
            PROCESS_MEMORY.keep(self._device_kind == "cpu")  # a GPU's rank uses host memory only with a device map
            PROCESS_ARENAS.keep(True)
            if load.job.load_id != load_id or not load.release() or self._gpu_memory_in_use():
                return None
            with self._lock:
                self._load = None
        return None if self._stopped.is_set() else PROCESS_MEMORY.kept_bytes

    def stop(self) -> None:
        """End the load and release its memory. Return when no thread uses it any more. Idempotent."""
        with self._lock:
            self._stopped.set()
            load = self._load
            self._lock.notify_all()
        if load is not None:
            load.release()

    def withdraw(self, call_id: str) -> None:
        """Never begin that call, which may not have come yet. One that runs goes on."""
        with self._lock:
            self._withdrawn[call_id] = None
            if len(self._withdrawn) > WITHDRAWN_KEPT:
                self._withdrawn.popitem(last=False)

    # -- wait --------------------------------------------------------------------------------------------------

    def outcome(self, load_id: str) -> RankReport:
        """Return the report once every slice is placed. Blocks. Raises the load's error."""
        load = self._load
        if load is None or load.job.load_id != load_id:
            raise LoadCancelled("this worker does not work on the load (any more)", model=load_id)
        return load.outcome()

    def update_outcome(self, load_id: str, update_id: str) -> RankReport | None:
        """Return the report once the update is staged, or streamed. Blocks. Raises the update's error.

        None: nothing of this rank changed.
        """
        return self._loaded(load_id).staged(update_id)

    def exchange_update(self, load_id: str, update_id: str, revision: str) -> float:
        """Give the tensors the staged contents; calls wait meanwhile. Return the seconds of the copy. Idempotent."""
        return self._loaded(load_id).exchange(update_id, revision)

    def lifetime(self, load_id: str) -> None:
        """Wait until the worker releases the load. If the worker dies, Ray's error notifies the caller at once."""
        load = self._load
        if load is not None and load.job.load_id == load_id:
            load.released.wait()

    def idleness(self) -> None:
        """Wait until the worker has a job or must stop. If the worker dies, Ray's error notifies the caller at once."""
        with self._lock:
            self._lock.wait_for(lambda: self._load is not None or self._stopped.is_set())

    # -- call --------------------------------------------------------------------------------------------------

    def call(self, load_id: str, call: Packed, call_id: str) -> Packed | Raised:
        """Run a user's function on the tensors. See `run_function`. Raises LoadCancelled for a withdrawn call."""
        if call_id in self._withdrawn:
            raise LoadCancelled("nobody waits for this call any more", model=load_id)
        with self._loaded(load_id).shard() as shard:
            return run_function(shard, call)

    def tensor_batch(self, load_id: str, start: Cursor, most_bytes: int) -> TensorBatch:
        """Copy at most `most_bytes` of the tensors' bytes to the host, from `start` on (`cut_batch`).

        The result is bytes, because torch cannot pickle tensors of its unsigned types and newer float types.
        """
        import torch

        from actors.devices.convert import as_bytes

        with self._loaded(load_id).shard() as shard, without_collector():
            sizes = (tensor.nbytes for tensor in islice(shard.values(), start.tensor, None))
            parts, after = cut_batch(sizes, start, most_bytes)
            data = torch.empty(sum(part.size_bytes for part in parts), dtype=torch.uint8).numpy()
            entries, begin = [], 0
            names: dict[torch.dtype, str] = {}
            for (_, offset, size_bytes), (name, tensor) in zip(
                parts, islice(shard.items(), start.tensor, None), strict=False
            ):
                stored = as_bytes(tensor)
                whole_bytes = len(stored)
                if size_bytes < whole_bytes:
                    stored = stored[offset : offset + size_bytes]
                data[begin : begin + size_bytes] = stored.cpu().numpy()
                begin += size_bytes
                dtype = names.get(tensor.dtype) or names.setdefault(
                    tensor.dtype, str(tensor.dtype).removeprefix("torch.")
                )
                entries.append(Entry(name, dtype, tuple(tensor.shape), whole_bytes, offset, size_bytes))
            return TensorBatch(tuple(entries), data, after)

    # -- inside ------------------------------------------------------------------------------------------------

    def _loaded(self, load_id: str) -> HostedLoad:
        load = self._load
        if load is None or load.job.load_id != load_id:
            raise ModelNotFound("this rank holds no loaded model", model=load_id)
        return load

    def _agent(self) -> AgentLink:
        if self._link is None:
            from actors.links import RayAgentLink

            self._link = RayAgentLink(self._node_id)
        return self._link

    def _gpu_memory_in_use(self) -> bool:
        """Return whether tensors are left on the GPU. Imports nothing, because a worker in CPU memory has no torch."""
        torch: Any = sys.modules.get("torch") if self._device_kind == "cuda" else None
        if torch is None or torch.cuda.memory_allocated() <= LEFT_ON_GPU_BYTES:
            return False
        gc.collect()  # frees tensors in reference cycles of the user's objects
        torch.cuda.empty_cache()
        return bool(torch.cuda.memory_allocated() > LEFT_ON_GPU_BYTES)

    def _watch(self) -> None:
        """End this worker when no coordinator is left, also an idle one, or it would hold its GPU for ever."""
        heard_s, work = time.monotonic(), RepeatedWork(_LOG)
        while not self._stopped.wait(self._orphan_after_s / WATCHES_PER_ORPHANHOOD):
            with work.turn("asking the agent for the coordinator"), contextlib.suppress(LongshoreError):
                age_s = self._agent().check_in(ProcessId.current(), PROCESS_ARENAS.access())
                heard_s = max(heard_s, time.monotonic() - age_s)
            if time.monotonic() - heard_s > self._orphan_after_s:
                os._exit(1)  # threads of the user's code may never return
