"""Values that travel between a client and its ranks: functions, arguments, results, errors, copies of tensors.

A value that cannot travel raises an error of Longshore.

    client   pack_call(fn, args, kwargs) --Packed--> worker: unpack, run
    client   result_of(rank, answer) <--Packed or Raised-- worker

Longshore pickles values itself, so that a value that cannot travel is a typed error. Ray receives one opaque pickle,
the buffers of large arrays (shared without a copy), and its own references, which it must count.

Copies of a rank's tensors travel in batches of bounded size. A tensor larger than a batch is divided over several, and
a batch has many small tensors. Only `tensors` imports torch.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError, RemoteCallFailed
from storage.errors import LongshoreError
from storage.host.memory import without_collector

if TYPE_CHECKING:
    import torch


MOST_CAUSE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled value."""

    data: Any  # bytes-like: the pickle
    buffers: tuple[Any, ...]  # bytes-like: memory of arrays, outside of the pickle
    references: tuple[Any, ...]  # Ray's object references and actor handles in the value

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the pickle and its buffers."""
        return sum(memoryview(part).nbytes for part in (self.data, *self.buffers))


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that a user's function raised in a worker."""

    text: str  # its traceback
    kind: str  # name of its type
    exception: Packed | None  # None when it cannot be pickled


def pack(value: Any) -> Packed:
    """Pickle a value. Raises whatever its pickling raises."""
    import ray
    from ray import cloudpickle

    references: list[Any] = []
    counted = (ray.ObjectRef, ray.actor.ActorHandle)

    def reference_number(found: Any) -> int | None:
        if not isinstance(found, counted):
            return None
        references.append(found)
        return len(references) - 1

    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler: Any = cloudpickle.CloudPickler(file, protocol=5, buffer_callback=buffers.append)  # type: ignore[no-untyped-call]
    pickler.persistent_id = reference_number
    pickler.dump(value)
    # `getbuffer` would save a copy, but Python 3.11 crashes when it collects such a buffer as garbage.
    return Packed(pickle.PickleBuffer(file.getvalue()), tuple(buffers), tuple(references))


def unpack(packed: Packed) -> Any:
    """Unpickle the value. Raises whatever its unpickling raises."""
    unpickler: Any = pickle.Unpickler(io.BytesIO(packed.data), buffers=packed.buffers)
    unpickler.persistent_load = packed.references.__getitem__
    return unpickler.load()


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Packed:
    """Pickle a function and its arguments. Raises ConfigError, which names the one that cannot be pickled."""
    try:
        return pack((fn, args, kwargs))
    except Exception as error:
        arguments = {f"argument {number}": value for number, value in enumerate(args, 1)}
        arguments |= {f"argument {name!r}": value for name, value in kwargs.items()}
        named = {"the function": fn, **arguments}
        what = next((name for name, value in named.items() if not _can_be_packed(value)), "the call")
        raise ConfigError(
            f"{what} cannot be sent to the ranks",
            hint="send numbers, strings, numpy arrays or tensors on the CPU; make locks, files, connections and models "
            "inside the function",
            type=type(named.get(what)).__name__ if what in arguments else None,
            cause=show_cause(error),
        ) from error


def result_of(rank: int, answer: Packed | Raised) -> Any:
    """Return what the function returned on a rank.

    Raises the function's own error when it is a LongshoreError; RemoteCallFailed for any other exception, which is its
    `__cause__` where pickle can make it again, and for a result that cannot be unpickled in this process.
    """
    if isinstance(answer, Raised):
        exception = None
        if answer.exception is not None:
            with contextlib.suppress(Exception):
                exception = unpack(answer.exception)
        if isinstance(exception, LongshoreError):
            raise exception.with_details(rank=rank)
        raise RemoteCallFailed(
            f"the function raised {answer.kind} on rank {rank}:\n{answer.text.rstrip()}", rank=rank, type=answer.kind
        ) from (exception if isinstance(exception, BaseException) else None)
    try:
        return unpack(answer)
    except Exception as error:
        raise RemoteCallFailed(
            f"the result of rank {rank} cannot be unpickled in this process",
            hint="return numbers, strings, numpy arrays or tensors on the CPU",
            rank=rank,
            cause=show_cause(error),
        ) from error


def show_cause(error: BaseException) -> str:
    """Return the type and the first line of an exception's message, for a detail of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:MOST_CAUSE_CHARS]


def _can_be_packed(value: Any) -> bool:
    try:
        pack(value)
    except Exception:
        return False
    return True


BATCH_BYTES = 8 << 20  # a worker, the object store and a client hold two or three at once; the smallest store has 75 MB
ENTRY_BYTES = 256  # counted for each tensor beside its bytes, for its name, dtype and shape


class Cursor(NamedTuple):
    """The position where a batch begins."""

    tensor: int = 0  # number in the rank's order
    offset: int = 0  # byte in that tensor


class Part(NamedTuple):
    """A range of bytes of a tensor."""

    tensor: int
    offset: int
    size_bytes: int


class Entry(NamedTuple):
    """One part of a batch. Its bytes follow those of the part before it."""

    name: str
    dtype: str  # attribute of the torch module
    shape: tuple[int, ...]
    whole_bytes: int  # bytes of the whole tensor
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Parts of consecutive tensors."""

    entries: tuple[Entry, ...]
    data: NDArray[np.uint8]
    after: Cursor | None  # position of the next batch; None: this is the last one


def cut_batch(sizes: Iterable[int], start: Cursor, most_bytes: int) -> tuple[list[Part], Cursor | None]:
    """Choose the parts of one batch, one of each tensor from `start` on, and where the next batch begins.

    `sizes` has the bytes of the rank's tensors from `start.tensor` on. It is read only as far as the batch has room.
    """
    parts: list[Part] = []
    room, offset = most_bytes, start.offset
    for tensor, size_bytes in enumerate(sizes, start.tensor):
        room -= ENTRY_BYTES
        if parts and room <= 0:
            return parts, Cursor(tensor, offset)
        taken = min(size_bytes - offset, max(room, 1))
        parts.append(Part(tensor, offset, taken))
        room -= taken
        if offset + taken < size_bytes:
            return parts, Cursor(tensor, offset + taken)
        offset = 0
    return parts, None


def tensors(batches: Iterable[TensorBatch]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a rank's batches, in order. The tensors' memory is their own."""
    import torch

    whole = torch.empty(0, dtype=torch.uint8)
    for batch in batches:
        start = 0
        found = []
        with without_collector():
            for name, dtype, shape, whole_bytes, offset, size_bytes in batch.entries:
                if not offset:
                    whole = torch.empty(whole_bytes, dtype=torch.uint8)
                # Copy it, because Ray returns a read-only view of its object store, which is small.
                whole.numpy()[offset : offset + size_bytes] = batch.data[start : start + size_bytes]
                start += size_bytes
                if offset + size_bytes == whole_bytes:
                    found.append((name, whole.view(getattr(torch, dtype)).reshape(shape)))
        yield from found
