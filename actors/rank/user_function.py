"""Runs one user function beside a rank's tensors, and packs what it returned or raised."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

from actors.shard import RankShard
from cluster.errors import RemoteCallFailed
from cluster.user_values import Packed, Raised, pack, show_cause, unpack

MOST_TEXT_CHARS = 20_000  # of a traceback: a message may hold a whole array


def run_function(shard: RankShard, call: Packed) -> Packed | Raised:
    """Run `fn(shard, *args, **kwargs)`. A coroutine is awaited; any iterator is a list of all its items.

    What the function raises is returned. Raises RemoteCallFailed when the call cannot be unpickled here, when the
    function exits, and when its result cannot be pickled.
    """
    try:
        fn, args, kwargs = unpack(call)
    except Exception as error:
        raise RemoteCallFailed(
            f"the function cannot be read on rank {shard.rank}",
            hint="its modules must be installed on every node, or sent by Ray's runtime_env",
            rank=shard.rank,
            cause=show_cause(error),
        ) from None
    try:
        result = _whole(fn(shard, *args, **kwargs))
    except SystemExit as error:
        # Ray would end this actor, but only after `lifetime` has returned: nobody would hear of it, for ever.
        raise RemoteCallFailed(
            f"the function called exit({error.code!r}) on rank {shard.rank}",
            hint="return from it instead; the rank and its tensors are still there",
            rank=shard.rank,
        ) from None
    except BaseException as error:
        return _raised(error)
    try:
        return pack(result)
    except BaseException as error:
        raise RemoteCallFailed(
            f"the result of rank {shard.rank} cannot be sent: it is a {type(result).__name__}",
            hint="return numbers, strings, numpy arrays or tensors on the CPU; shard.kept keeps what later calls need",
            rank=shard.rank,
            type=type(result).__name__,
            cause=show_cause(error),
        ) from None


def _whole(result: Any) -> Any:
    """Wait for a coroutine, and take all items of an iterator: neither could leave this process."""
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if isinstance(result, AsyncIterator):
        return asyncio.run(_all_items(result))
    return list(result) if isinstance(result, Iterator) else result


async def _all_items(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def _raised(error: BaseException) -> Raised:
    trace = error.__traceback__
    shown = error.with_traceback(trace.tb_next if trace else None)  # from the user's function on
    text = "".join(traceback.format_exception(shown))
    if len(text) > MOST_TEXT_CHARS:
        half = MOST_TEXT_CHARS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"
    try:
        exception = pack(error)
        unpack(exception)  # some can be pickled and not be made again
    except BaseException:
        exception = None
    return Raised(text, type(error).__name__, exception)
