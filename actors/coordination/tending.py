"""Runs one task per rank for as long as the model lives (`tend_all`), and steps that always end before their caller.

Ranks of a lost node move, and are tended at their new places. A rank that stays is not disturbed by that. A step that
makes an actor must end before its caller goes on, or nobody would know of the actor:

finished(step)       one step, which a cancellation does not cut in two
alongside(a, b, ..)  several at once; when one fails the others are cancelled, and have ended when the error comes out
settled(steps)       several at once, whatever becomes of each
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from actors.coordination.model_record import Placement
from cluster.errors import NodeLost

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


async def tend_all(
    placements: Mapping[int, Placement],
    tend: Callable[[Placement], Coroutine[Any, Any, None]],
    move: Callable[[], Coroutine[Any, Any, set[int]]],
) -> None:
    """Run `tend(placement)` for every rank, until all have ended.

    When one raises NodeLost, `move()` runs, once at a time: it places ranks anew, and returns which.
    Raises what they raise; nothing of it runs on then.
    """
    tends: dict[int, asyncio.Task[None]] = {}
    homeless: set[int] = set()  # ranks whose tending ended because their node is lost
    moving: asyncio.Task[set[int]] | None = None

    async def begin(ranks: set[int]) -> None:
        for rank in ranks:
            if (stale := tends.pop(rank, None)) is not None:
                await _ended([stale])
            tends[rank] = asyncio.create_task(tend(placements[rank]))

    try:
        await begin(set(placements))
        while tends or moving is not None:
            running: list[asyncio.Task[Any]] = [*tends.values(), *([moving] if moving else [])]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if moving is not None and moving.done():
                await begin(moving.result() | homeless)
                moving, homeless = None, set()
            for rank in [rank for rank, task in tends.items() if task.done()]:
                task = tends.pop(rank)
                if not isinstance(task.exception(), NodeLost):
                    task.result()
                    continue
                homeless.add(rank)
                moving = moving or asyncio.create_task(move())
    finally:
        await _ended([*tends.values(), *([moving] if moving else [])])


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    waiting: list[Awaitable[Any]] = []
    for task in tasks:
        task.cancel()
        waiting.append(task)
    await finished(settled(waiting))
