"""Which model answers a load: one that is resident or on its way, once the asking client's own access is checked.

    attach(request) -- no record of the same identity ----------> None: the caller loads it
                    -- not planned yet, read with another access or for another revision: waits until it is planned,
                                                                    looks again
                    -- of another revision than is asked for ---> next record, or None
                    -- the store is asked with the client's access: refused ---------> raises; nobody else notices
                                                                    other revision --> next record, or None
                                                                    same revision ---> the record; the access is kept
                    -- the store is away and this access worked lately --------------> the record

Everything is looked at again after each wait, because records end and others begin meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from actors.coordination.model_record import ModelRecord
from actors.coordination.planner import Planner
from cluster.load_request import LoadRequest, StoreAccess
from storage.errors import LongshoreError, StoreUnavailable

CHECK_WITH_GRACE_S = 5.0  # how long the check of an access that worked lately may take


class Attaching:
    """Finds records for new loads and keeps the access of their clients. `models` is the coordinator's table."""

    def __init__(self, models: dict[str, ModelRecord], planner: Planner, grace_s: float) -> None:
        """`grace_s`: an access that worked this recently attaches to a model while its store is away."""
        self._models = models
        self._planner = planner
        self._grace_s = grace_s

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

    async def supply(self, record: ModelRecord, client_id: str, access: StoreAccess) -> None:
        """Keep a holder's access if it works. Raises what the check raises."""
        if await self._ask(record, access):
            record.proven(client_id, access)
            await record.touch()

    async def _is_current(self, record: ModelRecord, request: LoadRequest) -> bool:
        """Return True while the store still has the record's revision, as far as this client can tell."""
        now_s = time.monotonic()
        worked_s = record.access.worked_at_s(request.store, now_s - self._grace_s)
        try:
            limit_s = None if worked_s is None else CHECK_WITH_GRACE_S
            current = await asyncio.wait_for(self._ask(record, request.store), limit_s)
        except (StoreUnavailable, TimeoutError):
            if worked_s is None:
                raise
            record.proven(request.client_id, request.store, worked_s)
            return True
        if current:
            record.proven(request.client_id, request.store)
        return current

    async def _ask(self, record: ModelRecord, access: StoreAccess) -> bool:
        return await self._planner.is_current(replace(record.request, store=access), record.revision)


def _asks_alike(one: LoadRequest, other: LoadRequest) -> bool:
    """Whether the store's answer to one of two requests for the same model is its answer to the other."""
    return (one.store, one.revision) == (other.store, other.revision)


async def use_working_access(record: ModelRecord, planner: Planner) -> None:
    """Before a process reads for the model again: of several known accesses, take the first that still works."""
    candidates = record.access.candidates(record.holders.ids)
    for access in candidates if len(candidates) > 1 else ():
        try:
            await planner.is_current(replace(record.request, store=access), record.revision)
        except LongshoreError:  # refused, or the store is away: the next one may do better
            continue
        record.read_with(access)
        return
