"""Where a load's plan comes from: kept in its record, made again by a coordinator that was restarted."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray

from actors.coordination.model_record import ModelRecord
from actors.coordination.planner import Planner
from cluster.errors import LoadError
from cluster.plans.packed_plan import PackedPlan

IN_MESSAGE_BYTES = 64 << 10  # what goes with the message is there sooner


class PlanSource:
    """The plan of one record. `holder_ttl_s`: within it, whoever holds the model says its credentials again."""

    def __init__(self, record: ModelRecord, planner: Planner, holder_ttl_s: float) -> None:
        self._record = record
        self._planner = planner
        self._holder_ttl_s = holder_ttl_s

    async def plan(self) -> PackedPlan:
        """The plan. Raises what planning raises; LoadError when the stored model is another one by now."""
        record = self._record
        if record.plan is None:
            async with record.changed:
                with contextlib.suppress(TimeoutError):
                    supplied = record.changed.wait_for(lambda: not record.credentials_missing)
                    await asyncio.wait_for(supplied, self._holder_ttl_s)
            plan = await self._planner.prepare(record.request)
            if plan.revision != record.revision:
                raise LoadError("the stored model has changed since the load began", model=record.model_id)
            record.plan = plan
        return record.plan

    async def shared(self) -> Any:
        """Its tables as an argument of a remote call: themselves while they are small.

        Else in Ray's object store, put there once, where nodes get them from each other.
        """
        plan = await self.plan()
        if self._record.shared is None:
            small = len(plan.shared) <= IN_MESSAGE_BYTES
            self._record.shared = plan.shared if small else await asyncio.to_thread(ray.put, plan.shared)
        return self._record.shared
