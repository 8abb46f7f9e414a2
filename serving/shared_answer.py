"""One question at a time, however many ask it: pages and event streams look once a second each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Who asks while a question is under way shares the next one, so no answer is older than the asking."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._one_at_a_time = asyncio.Lock()
        self._coming: asyncio.Task[T] | None = None  # not asked yet

    async def __call__(self) -> T:
        """The answer, or what asking raised. An asker who gives up leaves the others theirs."""
        if self._coming is None:
            self._coming = asyncio.get_running_loop().create_task(self._next())
            self._coming.add_done_callback(_looked_at)
        return await asyncio.shield(self._coming)

    async def _next(self) -> T:
        async with self._one_at_a_time:
            self._coming = None  # who asks from here on wants a newer answer
            return await self._ask()


def _looked_at(task: asyncio.Task[T]) -> None:
    """Every asker may have given up; their error is nobody's then, and asyncio need not complain of it."""
    if not task.cancelled():
        task.exception()
