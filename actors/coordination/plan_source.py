"""Where a load's plan comes from: kept in its record, made again by a coordinator that was restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray

from actors.coordination.attaching import use_working_access
from actors.coordination.model_record import ModelRecord
from actors.coordination.planner import Planner
from cluster.errors import LoadError
from cluster.plans.packed_plan import PackedPlan
from storage.errors import AccessDenied

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
            record.plan = plan
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
            self._record.shared = plan.shared if small else await asyncio.to_thread(ray.put, plan.shared)
        return self._record.shared
