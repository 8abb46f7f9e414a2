"""Which model answers a load: one that is resident or on its way, once the asking client's own access is checked.

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
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from actors.coordination.model_record import ModelRecord
from actors.coordination.planner import CHECK_TIMEOUT_S, Planner
from cluster.errors import LoadError
from cluster.planning.packed_plan import PackedPlan
from cluster.request import LoadRequest, StoreAccess
from storage.errors import AccessDenied, LongshoreError, StoreUnavailable

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


async def use_working_access(record: ModelRecord, planner: Planner) -> None:
    """Before a process reads for the model again: of the known accesses, take the first that still works.

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


class PlanSource:
    """The plan of one record. `holder_ttl_s`: how long to wait for clients to supply credentials after a restart."""

    def __init__(self, record: ModelRecord, planner: Planner, holder_ttl_s: float) -> None:
        self._record = record
        self._planner = planner
        self._holder_ttl_s = holder_ttl_s

    async def plan(self) -> PackedPlan:
        """The plan. Raises what planning raises; LoadError when the stored model is another one by now."""
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

    async def shared(self) -> Any:
        """Its tables as an argument of a remote call: themselves while they are small.

        Else in Ray's object store, put there once, where nodes get them from each other.
        """
        plan = await self.plan()
        if self._record.shared is None:
            small = len(plan.shared) <= IN_MESSAGE_BYTES
            self._record.share(plan.shared if small else await asyncio.to_thread(ray.put, plan.shared))
        return self._record.shared
