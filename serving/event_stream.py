"""A load as server-sent events: what happens to it with numbers to go on from, and its progress in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from cluster.telemetry.report import ModelStatus
from serving.problems import status_of
from serving.service import Service
from storage.errors import LongshoreError

LOOK_S = 1.0
QUIET_S = 15.0  # after that long a comment tells proxies that the line lives
OVER = ("failed", "released")


def frame(kind: str, data: dict[str, Any], number: int | None = None) -> str:
    """One event, as the wire has it. JSON has no line ends outside of strings, and none inside."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n"


async def stream(service: Service, model_id: str, after: int, *, until: str) -> AsyncIterator[str]:
    """Frames until the load is over, or `until` "ready" as soon as it is ready; an error ends it as an event too."""
    shown: dict[str, Any] = {}
    quiet_s = 0.0
    try:
        while True:
            events = await service.events(model_id, after, LOOK_S)
            for event in events:
                after = event.number
                yield frame(event.kind, event.as_dict(), event.number)
            now = await service.model(model_id)
            progress = {k: v for k, v in now.progress.as_dict().items() if k != "elapsed_s"}
            quiet_s = 0.0 if events or progress != shown else quiet_s + LOOK_S
            if progress != shown:
                shown = progress
                yield frame("progress", now.progress.as_dict())
            if _is_over(now, until) and not await service.events(model_id, after, 0):
                yield frame("end", {"state": now.progress.state, "error": now.error})
                return
            if quiet_s >= QUIET_S:
                quiet_s = 0.0
                yield ": still here\n\n"
    except asyncio.CancelledError:
        raise
    except LongshoreError as error:
        yield frame("error", {"status": int(status_of(error)), "kind": type(error).__name__, "detail": error.message})


def _is_over(now: ModelStatus, until: str) -> bool:
    return now.progress.state in OVER or (until == "ready" and now.progress.state == "ready")
