"""The asyncio twins of public functions.

aload = load_in_thread(load)
async with aload("s3://b/m") as model: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from types import TracebackType
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


class Loading(Coroutine[Any, Any, LoadedModel]):
    """A load that has not begun: `await` it for the model, or use it in `async with`, which releases the model."""

    def __init__(self, load: Coroutine[Any, Any, LoadedModel]) -> None:
        self._load = load
        self._model: LoadedModel | None = None

    def send(self, value: Any, /) -> Any:
        return self._load.send(value)

    def throw(self, *error: Any) -> Any:
        return self._load.throw(*error)

    def close(self) -> None:
        self._load.close()

    def __await__(self) -> Generator[Any, Any, LoadedModel]:
        return self._load.__await__()

    async def __aenter__(self) -> LoadedModel:
        self._model = await self._load
        return await self._model.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._model is not None:
            await self._model.__aexit__(kind, error, trace)


def load_in_thread(load: Callable[P, LoadedModel]) -> Callable[P, Loading]:
    """The async twin of `load`."""
    twin = in_thread(load)

    @functools.wraps(twin)
    def begun(*args: P.args, **kwargs: P.kwargs) -> Loading:
        return Loading(twin(*args, **kwargs))

    begun.__doc__ = f"{twin.__doc__} `async with` takes what it returns, with `await` before it or without."
    return begun
