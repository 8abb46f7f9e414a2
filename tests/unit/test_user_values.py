"""Values of user code come back from a worker, or a typed error says why they cannot."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.gpu_worker import MOST_TEXT_CHARS, run_function
from cluster.errors import ConfigError, ModuleMismatch, RemoteCallFailed
from cluster.user_values import Packed, pack, pack_call, result_of, unpack


def called(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of `LoadedModel.call` on rank 3, whose shard is only its number."""
    shard: Any = SimpleNamespace(rank=3)
    return result_of(3, run_function(shard, pack_call(fn, args, kwargs)))


def test_values_come_back_and_large_arrays_are_not_copied() -> None:
    array = np.arange(100_000)
    packed = pack({"array": array, "text": "é", "fn": lambda number: number + 1})
    assert sum(memoryview(part).nbytes for part in packed.buffers) == array.nbytes
    assert packed.size_bytes >= array.nbytes
    assert memoryview(packed.data).nbytes < array.nbytes
    found = unpack(packed)
    assert (found["text"], found["fn"](1)) == ("é", 2)
    assert np.array_equal(found["array"], array)


def generated(shard: Any) -> Iterator[int]:
    yield shard.rank
    yield 7


async def awaited(shard: Any) -> int:
    await asyncio.sleep(0)
    return int(shard.rank)


async def awaited_generator(shard: Any) -> AsyncIterator[int]:
    for number in range(shard.rank):
        await asyncio.sleep(0)
        yield number


@pytest.mark.parametrize(
    ("fn", "result"),
    [
        (generated, [3, 7]),
        (lambda shard: iter((1, 2)), [1, 2]),
        (lambda shard: map(str, range(2)), ["0", "1"]),
        (lambda shard: iter(()), []),
        (awaited, 3),
        (awaited_generator, [0, 1, 2]),
        (lambda shard: (1, 2), (1, 2)),
        (lambda shard: range(4), range(4)),
        (lambda shard: None, None),
    ],
)
def test_an_iterator_comes_back_as_a_list_of_all_its_items(fn: Callable[..., Any], result: object) -> None:
    assert called(fn) == result


def test_an_iterator_that_raises_is_a_function_that_raises() -> None:
    def broken(shard: Any) -> Iterator[int]:
        yield 1
        raise ValueError("in the second item")

    with pytest.raises(RemoteCallFailed, match="in the second item") as caught:
        called(broken)
    assert isinstance(caught.value.__cause__, ValueError)


class Unreadable:
    """Pickles, and cannot be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


class OfTwoArguments(Exception):
    """Pickles, and cannot be made again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("of two")


class WithALock(Exception):
    """Does not pickle."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Hurried(BaseException):
    """A BaseException that is not an Exception."""


@pytest.mark.parametrize("result", [threading.Lock, lambda: {"deep": [threading.Lock()]}, lambda: (_ for _ in ())])
def test_an_unpicklable_result_names_its_type_and_alternatives(result: Callable[[], Any]) -> None:
    with pytest.raises(RemoteCallFailed, match="the result of rank 3 cannot be sent") as caught:
        called(lambda shard: (result(),))
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.details["rank"], error.details["type"]) == (3, "tuple")
    assert "cannot pickle" in error.details["cause"]
    assert "numpy arrays" in error.hint


def test_a_result_that_cannot_be_unpickled_is_reported() -> None:
    with pytest.raises(RemoteCallFailed, match="the result of rank 3 cannot be unpickled in this process") as caught:
        called(lambda shard: Unreadable())
    assert caught.value.details["rank"] == 3


@pytest.mark.parametrize(
    "make", [lambda: OfTwoArguments(1, 2), WithALock, lambda: Hurried("away"), lambda: RecursionError("too deep")]
)
def test_any_exception_is_one_typed_error_with_its_traceback(make: Callable[[], BaseException]) -> None:
    def fail(shard: Any) -> None:
        raise make()

    kind = type(make()).__name__
    with pytest.raises(RemoteCallFailed, match=f"raised {kind} on rank 3") as caught:
        called(fail)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.details["rank"], again.details["type"]) == (3, kind)
    assert "in fail" in again.message
    assert "run_function" not in again.message


def test_a_longshore_error_comes_back_unchanged_with_its_rank() -> None:
    def fail(shard: Any) -> None:
        raise ModuleMismatch("not this module", names="a, b")

    with pytest.raises(ModuleMismatch, match="not this module") as caught:
        called(fail)
    assert caught.value.details == {"names": "a, b", "rank": 3}


def test_the_text_of_a_large_exception_is_bounded() -> None:
    def fail(shard: Any) -> None:
        raise ValueError("x" * 10_000_000 + "the end")

    with pytest.raises(RemoteCallFailed, match="characters are left out") as caught:
        called(fail)
    assert len(caught.value.message) < MOST_TEXT_CHARS + 200
    assert caught.value.message.endswith("the end")


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [((1, threading.Lock()), {}, "argument 2"), ((), {"lock": threading.Lock()}, "argument 'lock'")],
)
def test_an_argument_that_cannot_be_pickled_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} cannot be sent") as caught:
        called(len, *args, **kwargs)
    assert caught.value.details["type"] == "lock"


def test_a_function_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="the function cannot be sent"):
        called(lambda shard: lock.locked())


def test_a_function_that_cannot_be_unpickled_is_reported() -> None:
    with pytest.raises(RemoteCallFailed, match="the function cannot be read on rank 3") as caught:
        called(len, Unreadable())
    assert "ValueError" in caught.value.details["cause"]


def test_a_packed_value_can_be_read_twice() -> None:
    packed: Packed = pack_call(len, (1,), {})
    assert unpack(packed) == unpack(packed) == (len, (1,), {})
