"""Checks the types of arguments against annotations, so that a wrong one is a typed error at the door.

    @checks_arguments
    def load(uri: str, *, keep: bool = False): ...

    load("s3://b/m", keep="yes")   ConfigError: load: keep must be True or False, not str

A message never shows the value of an argument, which may be a secret.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from cluster.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    from torch import dtype as TorchDtype
else:

    class _OfTorch(type):
        def __instancecheck__(cls, value: object) -> bool:
            return (type(value).__module__, type(value).__name__) == ("torch", "dtype")

    # torch.dtype, where torch need not be installed
    TorchDtype = _OfTorch("torch.dtype", (), {})

Dtype: TypeAlias = str | TorchDtype
DtypeName = Literal["auto", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32"]

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
        check_types(hints(), dict((*zip(positional, args, strict=False), *kwargs.items())), f"{function.__name__}: ")
        return function(*args, **kwargs)

    return checked


def check_types(hints: Mapping[str, Any], given: Mapping[str, object], where: str = "") -> None:
    """Raise ConfigError for a value that its hint does not allow; `where` begins the message.

    A name without a hint is left to Python, which raises TypeError for it.
    """
    for name, value in given.items():
        hint = hints.get(name, Any)
        if not _is_accepted(value, hint):
            raise ConfigError(f"{where}{name} must be {_phrase(hint)}, not {_kind(value)}")


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
    """Return the accepted types in words: "a str, a path or None"."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        *first, last = dict.fromkeys(_phrase(one) for one in args)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is Sequence:
        return f"a list (each item {_phrase(args[0])})"
    return _PHRASES.get(origin) or f"a {getattr(origin, '__name__', origin)}"


def _kind(value: object) -> str:
    """Return the type of a value and the types of its items."""
    kind = type(value).__name__
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Collection):
        return kind
    inner: list[Iterable[object]] = [value.keys(), value.values()] if isinstance(value, Mapping) else [value]
    kinds = [" and ".join(sorted({type(each).__name__ for each in some})) for some in inner]
    return f"{kind} of {' to '.join(kinds)}" if all(kinds) else f"empty {kind}"
