"""The coordinator's planning processes, the plan of one record, and the search for a record that is there already.

Planning reads a manifest of up to hundreds of megabytes and builds tables of all tensors: seconds of pure Python that
would freeze the coordinator's event loop and make every worker look dead. So it runs in child processes, kept warm
between requests, a few of them so that a store that does not answer holds up nobody else. A child ends by itself when
its pipe closes, also when the coordinator was killed.

`Attaching` finds the model that answers a load without another plan: resident or on its way, and only after the
client's own access is checked.

    attach(request) -- no record of the same identity ----------> None: the caller loads it
                    -- not planned yet, read with another access or for another revision: waits until it is planned,
                                                                    looks again
                    -- of another revision than is asked for ---> next record, or None
                    -- the store is asked with the client's access: refused ---------> raises; nobody else notices
                                                                    other revision --> next record, or None
                                                                    same revision ---> the record; the access is kept
                    -- the store is away and this access worked lately --------------> the record; it is logged

Everything is looked at again after each wait, because records end and others begin meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import struct
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from actors.coordination.model_record import ModelRecord
from cluster.config import TrustPolicy
from cluster.errors import ClusterError, LoadError
from cluster.fit.search import Limits, PlannedChange
from cluster.layouts.mesh import Layout
from cluster.planning.packed_plan import PackedPlan, RankFacts
from cluster.planning.update_plan import PackedUpdate
from cluster.request import LoadRequest, StoreAccess
from storage.errors import AccessDenied, LongshoreError, StoreUnavailable
from storage.host.processes import own_module

_LENGTH = struct.Struct("<Q")
PLANNING_TIMEOUT_S = 300.0
MOST_PLANS = 4  # at once
CHECK_TIMEOUT_S = 60.0
MOST_CHECKS = 8  # at once; they are small, and wait for no plan


class Planner:
    """Runs `cluster.planning.process` requests: MOST_PLANS plans and MOST_CHECKS checks at once."""

    def __init__(self, chunk_bytes: int, read_timeout_s: float, trust: TrustPolicy | None = None) -> None:
        self._settings = (chunk_bytes, read_timeout_s)
        self._trust = trust or TrustPolicy()
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._plans = asyncio.Semaphore(MOST_PLANS)
        self._checks = asyncio.Semaphore(MOST_CHECKS)

    async def prepare(self, request: LoadRequest) -> PackedPlan:
        """Read the model's index and plan. Raises what that raises: StoreError, ManifestError, PlanError..."""
        plan: PackedPlan = await self._ask("prepare", request, self._trust)
        return plan

    async def changes(self, request: LoadRequest, purpose: str, limits: Limits = ()) -> tuple[str, list[PlannedChange]]:
        """(revision, changes planned): the steps of fit "auto", or ("strict") what a refused load is offered."""
        found: tuple[str, list[PlannedChange]] = await self._ask("changes", request, self._trust, purpose, limits)
        return found

    async def update(self, request: LoadRequest, old: bytes, *, all_changed: bool) -> PackedUpdate:
        """Return what of the stored model differs from one with these packed tables. Raises UpdateRefused too."""
        update: PackedUpdate = await self._ask("update", request, self._trust, old, all_changed)
        return update

    async def scaled(self, shared: bytes, layout: Layout) -> tuple[tuple[RankFacts, ...], bytes]:
        """Return the facts of all ranks and the tables of a model with another number of replicas. Reads nothing."""
        found: tuple[tuple[RankFacts, ...], bytes] = await self._ask("scaled", shared, layout)
        return found

    async def is_current(self, request: LoadRequest, known: str, limit_s: float = CHECK_TIMEOUT_S) -> bool:
        """Return True while the stored model is still the revision `known`; one small request to the store.

        Raises StoreUnavailable when the store does not answer within `limit_s`, from when it is asked.
        """
        async with self._checks:
            try:
                asked = self._run("is_current", request, known, self._trust)
                same: bool = await asyncio.wait_for(asked, limit_s)
            except TimeoutError as error:
                raise StoreUnavailable("the store does not answer", uri=request.uri, waited_s=limit_s) from error
        return same

    async def close(self) -> None:
        """End every child."""
        self._idle.clear()
        for process in list(self._all):
            await self._end(process)

    async def _ask(self, verb: str, *args: Any) -> Any:
        async with self._plans:
            return await self._run(verb, *args)

    async def _run(self, verb: str, *args: Any) -> Any:
        process = None
        try:
            process = self._take_idle() or await self._start()
            answer = await asyncio.wait_for(_exchange(process, verb, args), PLANNING_TIMEOUT_S)
        except (TimeoutError, OSError, EOFError) as error:
            await self._end(process)
            raise ClusterError(
                "planning did not end", hint="the coordinator's node may be out of memory", cause=repr(error)
            ) from error
        except BaseException:
            await self._end(process)  # its answer would be taken for the next request's
            raise
        self._idle.append(process)
        if isinstance(answer, LongshoreError):
            raise answer
        return answer

    def _take_idle(self) -> Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._all.discard(process)  # somebody ended it while it had nothing to do: the kernel, short of memory
        return None

    async def _start(self) -> Process:
        command, environ = own_module("cluster.planning.process", *map(str, self._settings))
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environ
        )
        self._all.add(process)
        return process

    async def _end(self, process: Process | None) -> None:
        if process is None:
            return
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _exchange(process: Process, verb: str, args: tuple[Any, ...]) -> Any:
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise EOFError("the planning process has no pipes")
    data = pickle.dumps((verb, args), protocol=5)
    stdin.write(_LENGTH.pack(len(data)) + data)
    await stdin.drain()
    (size,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
    return pickle.loads(await stdout.readexactly(size))


async def use_working_access(record: ModelRecord, planner: Planner) -> None:
    """Take the first of the known accesses that still works, before a process reads for the model again.

    One that works and finds another revision in the store is only the second choice. The only one is not asked for.
    """
    candidates = record.access.candidates(record.holders.ids)
    working = candidates if len(candidates) == 1 else []
    for access in candidates if len(candidates) > 1 else ():
        with contextlib.suppress(LongshoreError):  # refused, or the store is away: the next one may do better
            if await planner.is_current(replace(record.request, store=access), record.revision):
                working.insert(0, access)
                break
            working.append(access)
    if working:
        record.read_with(working[0])


IN_MESSAGE_BYTES = 64 << 10  # what goes with the message is there sooner


async def in_message(data: bytes, *, apart: bool = False) -> Any:
    """Return the bytes as an argument of a remote call: themselves while they are few, and not to be `apart`.

    Many are put into Ray's object store, where nodes get them from each other. Such arguments are the last of a call.
    """
    return data if len(data) <= IN_MESSAGE_BYTES and not apart else await asyncio.to_thread(ray.put, data)


class PlanSource:
    """The plan of one record. `holder_ttl_s`: how long to wait for clients to supply credentials after a restart."""

    def __init__(self, record: ModelRecord, planner: Planner, holder_ttl_s: float) -> None:
        self._record = record
        self._planner = planner
        self._holder_ttl_s = holder_ttl_s

    async def plan(self) -> PackedPlan:
        """Return the plan. Raises what planning raises; LoadError when the stored model is another one by now."""
        record = self._record
        if record.plan is None:
            plan = await self._prepare()
            if plan.revision != record.revision:
                raise LoadError("the stored model has changed since the load began", model=record.model_id)
            record.use_plan(plan)
            return plan
        return record.plan

    async def _prepare(self) -> PackedPlan:
        record = self._record
        give_up_s = asyncio.get_running_loop().time() + self._holder_ttl_s
        await self._until(lambda: not record.credentials_missing, give_up_s)
        while True:
            await use_working_access(record, self._planner)
            tried = len(record.access.proofs)
            try:
                return await self._planner.prepare(record.request)
            except AccessDenied:  # another holder may still supply an access that works
                if not record.restored or not await self._more_access(tried, give_up_s):
                    raise

    async def _more_access(self, than: int, give_up_s: float) -> bool:
        return await self._until(lambda: len(self._record.access.proofs) > than, give_up_s)

    async def _until(self, holds: Callable[[], bool], give_up_s: float) -> bool:
        """Wait until `holds` is true of the record. Return False when that does not come in time."""
        async with self._record.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await self._record.changed.wait_for(holds)
        return holds()

    async def shared(self, *, apart: bool = False) -> Any:
        """Return the plan's tables as an argument of a remote call (`in_message`), which is made once."""
        plan = await self.plan()
        if self._record.shared is None or (apart and isinstance(self._record.shared, bytes)):
            self._record.share(await in_message(plan.shared, apart=apart))
        return self._record.shared


_LOG = logging.getLogger(__name__)

CHECK_WITH_GRACE_S = 20.0  # how long the check of an access that worked lately may take


class Attaching:
    """Finds records for new loads and keeps the access of their clients. `models` is the coordinator's table."""

    def __init__(self, models: dict[str, ModelRecord], planner: Planner, grace_s: float) -> None:
        """`grace_s`: an access that worked this recently attaches to a model while its store is away."""
        self._models = models
        self._planner = planner
        self._grace_s = grace_s
        self._supplied: dict[tuple[str, str], asyncio.Task[None]] = {}  # (model id, client id) -> its access is checked

    async def attach(self, request: LoadRequest) -> ModelRecord | None:
        """Return the record that answers the request, or None when it must be loaded.

        The answer holds until the caller awaits something. Raises what the check with the client's own access raises:
        AccessDenied, StoreUnavailable, ...
        """
        replaced: set[str] = set()
        while True:
            record = next((r for r in self._models.values() if r.serves(request) and r.model_id not in replaced), None)
            if record is None or (not record.is_planned and _asks_alike(record.request, request)):
                return record  # not planned yet: both clients wait for the same answer of the store
            if not record.is_planned:
                await record.planned_or_over()
            elif request.revision not in ("", record.revision):
                replaced.add(record.model_id)  # whether the store has the one asked for, planning finds out
            elif not await self._is_current(record, request):
                replaced.add(record.model_id)  # whoever holds the old revision keeps it
            elif self._models.get(record.model_id) is record and record.serves(request):
                return record

    def supply(self, record: ModelRecord, client_id: str, access: StoreAccess) -> None:
        """Keep a holder's access if it works. Returns at once: its caller renews other holds too."""
        key = record.model_id, client_id
        if key not in self._supplied:
            self._supplied[key] = asyncio.get_running_loop().create_task(self._supply(record, client_id, access))
            self._supplied[key].add_done_callback(lambda _: self._supplied.pop(key, None))

    async def _supply(self, record: ModelRecord, client_id: str, access: StoreAccess) -> None:
        try:
            if await self._planner.is_current(replace(record.request, store=access), record.revision):
                record.proven(client_id, access)
                await record.touch()
        except LongshoreError as error:
            _LOG.info("the access of a client of %s was not kept: %s", record.model_id, error)

    async def _is_current(self, record: ModelRecord, request: LoadRequest) -> bool:
        """Return True while the store still has the record's revision, as far as this client can tell."""
        now_s = time.monotonic()
        worked_s = record.access.worked_at_s(request.store, now_s - self._grace_s)
        limit_s = CHECK_TIMEOUT_S if worked_s is None else CHECK_WITH_GRACE_S
        asked = replace(record.request, store=request.store)
        try:
            current = await self._planner.is_current(asked, record.revision, limit_s)
        except StoreUnavailable as error:
            if worked_s is None:
                raise
            _LOG.warning(
                "a client is given revision %s of %s, which may be an old one: %s",
                record.revision,
                record.model_id,
                error.message,
            )
            record.proven(request.client_id, request.store, worked_s)
            return True
        if current:
            record.proven(request.client_id, request.store)
        return current


def _asks_alike(one: LoadRequest, other: LoadRequest) -> bool:
    """Return whether the store's answer to one of two requests for the same model is its answer to the other."""
    return (one.store, one.revision) == (other.store, other.revision)
