"""One load inside a worker's process: from its job until it is let go of. A worker hosts one after another.

    HostedLoad(job) -> run() in a thread -> outcome() -> shard() for calls -> let_go()

Whatever belongs to one load only is in here, so that nothing of it can be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from actors.devices.device import Device, OpeningDevice, open_device
from actors.devices.mapped_device import open_mapped_rank
from actors.rank.executor import RankLoader
from actors.rank_link import AgentLink
from actors.shard import RankShard
from cluster.errors import LoadCancelled, ModelNotFound, RemoteCallFailed
from cluster.messages import RankJob
from cluster.plans.load_plan import RankPlan
from cluster.telemetry.report import RankReport
from cluster.user_values import Packed, Raised, pack, show_cause, unpack
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


MOST_TEXT_CHARS = 20_000  # of a traceback: a message may hold a whole array


def run_function(shard: RankShard, call: Packed) -> Packed | Raised:
    """Run `fn(shard, *args, **kwargs)`. A coroutine is awaited; any iterator is a list of all its items.

    What the function raises is returned. Raises RemoteCallFailed when the call cannot be unpickled here, when the
    function exits, and when its result cannot be pickled.
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
        # Ray would end this actor, but only after `lifetime` has returned: nobody would hear of it, for ever.
        raise RemoteCallFailed(
            f"the function called exit({error.code!r}) on rank {shard.rank}",
            hint="return from it instead; the rank and its tensors are still there",
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
    """Wait for a coroutine, and take all items of an iterator: neither could leave this process."""
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
        unpack(exception)  # some can be pickled and not be made again
    except BaseException:
        exception = None
    return Raised(text, type(error).__name__, exception)
