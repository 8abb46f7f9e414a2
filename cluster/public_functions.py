"""What every public function has: arguments whose types are checked, and an async twin.

    @checks_arguments
    def load(uri: str, *, keep: bool = False): ...

    load("s3://b/m", keep="yes")   ConfigError: load: keep must be True or False, not str

The value of an argument is never part of a message: it may be a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import NoneType, SimpleNamespace, TracebackType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from cluster.errors import ConfigError
from cluster.model import LoadedModel
from storage.errors import LongshoreError

P = ParamSpec("P")
T = TypeVar("T")

_PHRASES: dict[Any, str] = {
    NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a str",
    Mapping: "a dict",
    Callable: "a function",
    os.PathLike: "a path",
}


def checks_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Make `function` raise ConfigError for an argument that its annotations do not allow.

    Names of classes in annotations must be importable when the function is called first, so not for type checkers only.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    names = [*positional, *(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)]

    @functools.cache
    def hints() -> dict[str, Any]:
        inner = inspect.unwrap(function)
        given = {name: inner.__annotations__[name] for name in names}
        return get_type_hints(SimpleNamespace(__annotations__=given), globalns=inner.__globals__)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in (*zip(positional, args, strict=False), *kwargs.items()):
            hint = hints().get(name, Any)  # a name that is not there is Python's own TypeError, below
            if not _is_accepted(value, hint):
                raise ConfigError(f"{function.__name__}: {name} must be {_phrase(hint)}, not {_kind(value)}")
        return function(*args, **kwargs)

    return checked


def _is_accepted(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_accepted(value, one) for one in args)
    if origin is Callable:
        return callable(value)
    if origin in (int, float):
        return isinstance(value, int if origin is int else int | float) and not isinstance(value, bool)
    if origin is Mapping:
        items = value.items() if isinstance(value, Mapping) else [(None, None)]
        return isinstance(value, Mapping) and all(
            _is_accepted(each, one) for pair in items for each, one in zip(pair, args, strict=False)
        )
    if origin is Sequence:  # a generator is one too: its items are seen when it is read
        if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
            return False
        return not isinstance(value, Collection) or all(_is_accepted(each, args[0]) for each in value)
    return isinstance(value, NoneType if origin is None else origin)


def _phrase(hint: Any) -> str:
    """What is accepted, in words: "a str, a path or None"."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        *first, last = dict.fromkeys(_phrase(one) for one in args)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is Sequence:
        return f"a list (each item {_phrase(args[0])})"
    return _PHRASES.get(origin) or f"a {getattr(origin, '__name__', origin)}"


def _kind(value: object) -> str:
    """The type of a value, and those of what is in it."""
    kind = type(value).__name__
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Collection):
        return kind
    inner: list[Iterable[object]] = [value.keys(), value.values()] if isinstance(value, Mapping) else [value]
    kinds = [" and ".join(sorted({type(each).__name__ for each in some})) for some in inner]
    return f"{kind} of {' to '.join(kinds)}" if all(kinds) else f"empty {kind}"


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
