"""Steps that end before their caller goes on, whatever happens: an actor is being made, and nobody would know of it.

finished(step)       one step, which a cancellation does not cut in two
alongside(a, b, ..)  several at once; when one fails the others are cancelled, and have ended when the error comes out
settled(steps)       several at once, whatever becomes of each
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
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


async def alongside(*steps: Coroutine[Any, Any, Any]) -> None:
    """Every step at once, until all have ended. Raises the first error, or the cancellation of the caller."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await finished(settled(tasks))


async def settled(steps: Iterable[Awaitable[Any]]) -> None:
    """Returns when every step has ended, well or not."""
    await asyncio.gather(*steps, return_exceptions=True)
