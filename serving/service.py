"""The work of the routes, done with the Python client: loads and changes that outlast their request, and views.

LongshoreError
+- Busy                         as much is under way as the settings allow; ask again later
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from cluster import client
from cluster.client import Released
from cluster.config import Config
from cluster.errors import ClusterLost, ConfigError, ModelNotFound
from cluster.options import collect
from cluster.planning import preview
from cluster.planning.plan_summary import PlanSummary
from cluster.request import StoreOptions
from cluster.telemetry.chunk_map import ChunkMap, LoadEvent
from cluster.telemetry.report import ClusterStatus, LoadProgress, ModelStatus
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.update_report import UpdateReport
from serving.schemas import LoadBody, ModelBody, PlanBody, UpdateBody
from serving.settings import ServingSettings
from storage.errors import LongshoreError, SourceRefused
from storage.store_ref import StoreRef

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Combines callers that wait for the same answer. An answer is never older than its call.

    A caller that comes while a request is under way shares the next one.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._one_at_a_time = asyncio.Lock()
        self._coming: asyncio.Task[T] | None = None  # a request that has not begun

    async def __call__(self) -> T:
        """Return the answer, or raise the request's error. A caller that is cancelled does not cancel the others."""
        if self._coming is None:
            self._coming = asyncio.get_running_loop().create_task(self._next())
            self._coming.add_done_callback(_looked_at)
        return await asyncio.shield(self._coming)

    async def _next(self) -> T:
        async with self._one_at_a_time:
            self._coming = None  # later callers need a newer answer
            return await self._ask()


def _looked_at(task: asyncio.Task[T]) -> None:
    """Retrieve the error of a task whose callers were all cancelled, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


BEGIN_S = 30.0  # a coordinator that has not accepted a load by then is unhealthy
CALLS = 64  # of the client at once, beside loads
_LOG = logging.getLogger("longshore.http")


class Busy(LongshoreError):
    """The service does as much as the settings allow."""


class Service:
    """One replica's work. `address`: of the Ray cluster; None: the one of this process."""

    def __init__(self, settings: ServingSettings, config: Config | None = None, address: str | None = None) -> None:
        self.settings = settings
        self._config = config or Config.from_env()
        self._address = address
        self._rules = settings.source_rules()
        self._loads: dict[asyncio.Task[Any], str] = {}  # not ready yet -> model id, as soon as it is known
        self._changes: set[asyncio.Task[Any]] = set()  # updates and changes of replicas that are not done
        self._plans = asyncio.Semaphore(settings.plans)
        self._status = SharedAnswer(lambda: self._call(lambda: client.status(self._address)))
        self._threads = ThreadPoolExecutor(CALLS + settings.streams, thread_name_prefix="longshore-http")

    def close(self) -> None:
        """End the threads when their requests are answered. Loads continue in the cluster."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- loads -------------------------------------------------------------------------------------------------

    async def begin(self, body: LoadBody) -> LoadProgress:
        """Begin a load, or find the model resident, and return its first progress. The load continues on its own.

        Raises the errors of `cluster.load` that come before a first progress; Busy.
        """
        self._check(body)
        self._check_busy()
        loop = asyncio.get_running_loop()
        first: asyncio.Future[LoadProgress] = loop.create_future()

        def tell(progress: LoadProgress) -> None:
            def note() -> None:
                self._loads[task] = progress.model_id
                if not first.done():
                    first.set_result(progress)

            if not first.done():
                loop.call_soon_threadsafe(note)

        task = loop.create_task(self._load(body, tell))
        self._loads[task] = ""
        task.add_done_callback(self._ended)
        await asyncio.wait([task, first], timeout=BEGIN_S, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            return first.result()
        if task.done():
            return task.result()
        task.cancel()
        raise ClusterLost("the coordinator did not take the load on in time", hint="longshore doctor shows why")

    async def _load(self, body: LoadBody, tell: Callable[[LoadProgress], None]) -> LoadProgress:
        model = await client.aload_model(
            replace(body.options(), keep=True),
            address=self._address,
            progress=tell,
            timeout_s=body.timeout_s,
            config=self._config,
        )
        await model.arelease()  # this process's hold on it; `keep` is what makes it stay
        (now,) = [m for m in (await self.status()).listed if m.progress.model_id == model.model_id]
        return now.progress

    def _ended(self, task: asyncio.Task[Any]) -> None:
        model_id = self._loads.pop(task, "")
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.info("load %s ended: %s", model_id or "(not begun)", error)

    def _check_busy(self) -> None:
        if len(self._loads) + len(self._changes) >= self.settings.loads:
            hint = "wait for one to end, or ask another replica"
            raise Busy("too many loads, updates and changes of replicas are under way", hint=hint)

    async def update(self, model_id: str, body: UpdateBody, wait_s: float) -> UpdateReport | str:
        """Begin an update of a model in place. Return its report, or after `wait_s` what it does; it goes on then.

        Raises the errors of `cluster.update` that come before that; SourceRefused, Busy.
        """
        options = body.options()
        if body.uri is not None:
            self._check_uri(body.uri)
        if options.names_place:
            now = await self._call(lambda: client.request_of(model_id, address=self._address))
            asked = options.at(now).request("", now.store)  # beside the model's own place where it names no server
            if asked.store is not None:
                self._check_ref(asked.store.ref)
        update = functools.partial(client.aupdate, model_id, address=self._address, **body.model_dump())
        return await self._changed(model_id, update, wait_s)

    async def scale(self, model_id: str, data_parallel_size: int, wait_s: float) -> ScaleReport | str:
        """Begin to give a model that many replicas. Return the report, or after `wait_s` what it does; it goes on then.

        Raises the errors of `cluster.scale` that come before that; Busy.
        """
        scale = functools.partial(client.ascale, model_id, data_parallel_size, address=self._address)
        return await self._changed(model_id, scale, wait_s)

    async def _changed(self, model_id: str, begin: Callable[[], Coroutine[Any, Any, T]], wait_s: float) -> T | str:
        """Begin a change. Return what it returns, or after `wait_s` what the model's status says of it."""
        self._check_busy()
        task = asyncio.get_running_loop().create_task(begin())
        self._changes.add(task)
        task.add_done_callback(functools.partial(self._change_ended, model_id))
        await asyncio.wait([task], timeout=wait_s)
        return task.result() if task.done() else (await self.model(model_id)).update

    def _change_ended(self, model_id: str, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.info("a change of %s ended: %s", model_id, error)

    async def release(self, model_id: str, *, force: bool) -> Released:
        """Free a model, or end its load. Raises ModelNotFound, ClusterLost."""
        ours = [task for task, of in self._loads.items() if of == model_id]
        for task in ours:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LongshoreError):
                await task
        with contextlib.suppress(*([ModelNotFound] if ours else [])):
            return await self._call(lambda: client.release(model_id, force=force, address=self._address))
        return Released(model_id, freed=True, holders=0)

    # -- views -------------------------------------------------------------------------------------------------

    async def status(self) -> ClusterStatus:
        """Raises ClusterLost when no coordinator runs."""
        return await self._status()

    async def model(self, model_id: str) -> ModelStatus:
        """Raises ModelNotFound, ClusterLost."""
        for found in (await self.status()).listed:
            if found.progress.model_id == model_id:
                return found
        raise ModelNotFound("no such model", hint="GET /v1/models lists those of this cluster", model=model_id[:200])

    async def events(self, model_id: str, after: int, wait_s: float) -> tuple[LoadEvent, ...]:
        """Raises ModelNotFound, ClusterLost."""
        return await self._call(lambda: client.events(model_id, after=after, wait_s=wait_s, address=self._address))

    async def chunks(self, model_id: str) -> ChunkMap:
        """Raises ModelNotFound, ClusterLost."""
        return await self._call(lambda: client.chunk_map(model_id, address=self._address))

    async def picture(self, body: PlanBody) -> bytes:
        """An SVG of ranks against layers. Raises as `plan` does."""
        with tempfile.TemporaryDirectory(prefix="longshore-http-") as folder:
            path = Path(folder, "plan.svg")
            await self.plan(body, path)
            return await asyncio.to_thread(path.read_bytes)

    async def plan(self, body: PlanBody, picture: Path | None = None) -> PlanSummary:
        """Return the plan; `picture`: a file to draw it to. Raises as `cluster.plan` does; Busy."""
        self._check(body)
        ahead = replace(collect(preview.PlanOptions, body.model_dump()), picture=picture)
        return await self._planned(lambda: preview.plan_load(body.options(), ahead, self._config))

    async def picture_of(self, model_id: str) -> bytes:
        """An SVG of ranks against layers, of a model of the cluster. Raises ModelNotFound, ClusterLost, as `plan` does.

        The model's index is read again, with what this process may read: credentials that a client passed are not
        kept. Where the model was loaded from is not for the caller to say, so the rules for requests do not apply;
        those of the cluster do.
        """
        request = await self._call(lambda: client.request_of(model_id, address=self._address))
        return (await self._planned(lambda: preview.draw(request, self._config))).encode()

    # -- inside ------------------------------------------------------------------------------------------------

    def _check(self, body: ModelBody) -> None:
        """Raises SourceRefused, ConfigError, InvalidUri."""
        self._check_uri(body.uri)
        ref, _ = collect(StoreOptions, body.model_dump()).resolve(body.uri)
        self._check_ref(ref)

    def _check_uri(self, uri: str) -> None:
        if "://" not in uri:
            raise ConfigError("a URI with a scheme is wanted, not a path", hint="s3://bucket/prefix")

    def _check_ref(self, ref: StoreRef) -> None:
        """Raise SourceRefused for a place that requests may not name."""
        try:
            self._rules.check(ref)
        except SourceRefused as error:
            hint = error.hint.replace("LONGSHORE_ALLOWED_", "LONGSHORE_HTTP_")
            raise SourceRefused(error.message, hint=hint, **error.details) from error

    async def _planned(self, work: Callable[[], T]) -> T:
        """At most `settings.plans` at once. Raises Busy."""
        if self._plans.locked():
            raise Busy("other plans are being worked out", hint="ask again in a few seconds")
        async with self._plans:
            return await self._call(work)

    async def _call(self, verb: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, verb)
