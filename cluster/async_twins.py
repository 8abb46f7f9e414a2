"""The verbs of the client without blocking an event loop: each in a thread, given up when its task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from cluster.model import LoadedModel
from storage.errors import LongshoreError

P = ParamSpec("P")
T = TypeVar("T")

# Set while a verb runs for a task: whether that task was cancelled.
GIVEN_UP: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


def in_thread(verb: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The async twin of a verb."""

    @functools.wraps(verb)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        given_up = threading.Event()
        token = GIVEN_UP.set(given_up)  # the thread runs in a copy of this context
        task = asyncio.ensure_future(asyncio.to_thread(verb, *args, **kwargs))
        GIVEN_UP.reset(token)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            with contextlib.suppress(LongshoreError, asyncio.CancelledError):
                result = await task
                if isinstance(result, LoadedModel):  # it was ready in the same moment
                    await result.arelease()
            raise

    twin.__doc__ = f"`{verb.__name__}`, without blocking the event loop. Cancelling the task gives it up."
    return twin
