"""Steps that must not be cut in two by a cancellation: an actor is being made, and nobody would know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finished(step: Coroutine[Any, Any, T]) -> T:
    """The step's result. When the caller is cancelled meanwhile, the step still ends first; what it notes, stands.

    However often it is cancelled: a gather that is cancelled cancels its tasks, and so does whoever tidies up after it.
    """
    task = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: nobody is told of it any more
        raise cancelled
    return task.result()
