"""Finds the model that answers a load: resident or on its way, and only after the client's own access is checked.

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
import logging
import time
from dataclasses import replace

from actors.coordination.model_record import ModelRecord
from actors.coordination.planner import CHECK_TIMEOUT_S, Planner
from cluster.request import LoadRequest, StoreAccess
from storage.errors import LongshoreError, StoreUnavailable

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
