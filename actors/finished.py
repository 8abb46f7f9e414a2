"""Steps that must not be cut in two by a cancellation: an actor is being made, and nobody would know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finished(step: Coroutine[Any, Any, T]) -> T:
    """The step's result. When the caller is cancelled meanwhile, the step still ends first; what it notes, stands."""
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
