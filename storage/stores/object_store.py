"""The protocol of an object store, byte ranges, and a store in memory for tests.

Every byte of a model crosses this boundary.

    stat(key)                     size and version of one object, one request
    list(prefix)                  every object under a prefix, paged by the store
    read_into(key, range, buf)    exactly those bytes into the caller's buffer, or an error
    read_pieces(key, range, bufs) the same into several buffers in a row, each while the last one is still in the CPU's
                                  cache (`ReadsPieces`: the stores of the hot path; `read_pieces` serves all)
    put(key, data)                a small object, whole and atomic
    upload(key)                   a large object in parts; visible only when it is complete
    delete(key)                   one object away, there or not

Keys are relative to the root that the store was opened on, `/`-separated, never absolute and never with `..`
(`check_key`). Stores are thread-safe: many threads call `read_into` at once, each on a connection of its own.

Objects read whole, in order, through a few reused buffers: several reads in flight, one consumer each.

run_readers(jobs) -- consumer threads --> work(job, reader)
    reader.read(key, ranges) --> (0, bytes), (1, bytes), ...     views, valid until the next step
        ring of `depth` buffers, filled ahead by shared reading threads; a buffer is filled again only
        after the consumer has stepped on. Memory: consumers x depth x buffer_bytes, allocated once.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar, runtime_checkable

from storage.errors import ObjectChanged, ObjectNotFound, RangeMismatch, StoreError
from storage.stores.requests import ReadLimit, RetryPolicy, with_retries


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes `[start, end)` of one object. `ByteRange(0, 8)` is the first eight bytes."""

    start: int  # first byte, counted from 0
    end: int  # first byte that is not part of the range

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a byte range: [{self.start}, {self.end})")

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    def check_buffer(self, buffer: memoryview) -> None:
        """Raises ValueError for a buffer that the range does not fill exactly."""
        if len(buffer) != self.size_bytes:
            raise ValueError(f"buffer has {len(buffer)} bytes, the range {self.size_bytes}")

    def split(self, piece_bytes: int) -> Iterator[ByteRange]:
        """The range cut every `piece_bytes`; the last piece may be shorter, an empty range gives none."""
        for start in range(self.start, self.end, piece_bytes):
            yield ByteRange(start, min(start + piece_bytes, self.end))

    def http_header(self) -> str:
        """The value of an HTTP `Range` header (whose end is inclusive, RFC 9110 section 14.1.2)."""
        if not self.size_bytes:
            raise ValueError("HTTP cannot ask for an empty range")
        return f"bytes={self.start}-{self.end - 1}"

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


# What is hashed or copied next while it is still in a core's own cache (1 to 2 MiB on servers), and large enough that
# the work between two receives does not count. Measured: docs/benchmarks.md.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says about one object."""

    key: str  # relative to the store's root
    size_bytes: int
    etag: str | None  # opaque version tag without quotes; None where the store has none
    checksums: dict[str, str] = field(default_factory=dict)  # whole-object: {"crc64nvme" | "sha256" | "md5"...: hex}
    composites: dict[str, str] = field(default_factory=dict)  # of the digests of its parts in a row (see KeepsParts)


class Upload(Protocol):
    """An object being written in order. Nothing is visible before `complete`."""

    def write(self, data: memoryview) -> None: ...

    def complete(self) -> ObjectInfo: ...


@runtime_checkable
class ObjectStore(Protocol):
    """Bytes by key. Every method raises the errors of `storage.errors` and no others."""

    uri: str  # root, for messages: no credentials in it

    def stat(self, key: str) -> ObjectInfo:
        """Size, ETag and known checksums. Raises ObjectNotFound, AccessDenied, StoreUnavailable."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, recursively, in key order."""
        ...

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        """Fill `buffer` (writable, exactly `byte_range.size_bytes` long) with those bytes of `key`.

        With `etag`, the answer must be that version (ObjectChanged otherwise), whether the server honours
        If-Match or ignores it. Returns the ETag of the answer. An empty range moves nothing and asks nothing.
        Raises ShortRead, RangeMismatch, ObjectChanged, ObjectNotFound, AccessDenied, StoreUnavailable.
        After an error the buffer's contents are undefined.
        """
        ...

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a small object whole."""
        ...

    def upload(self, key: str) -> AbstractContextManager[Upload]:
        """Write a large object in order; leaving the block without `complete()` leaves nothing behind."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object; no error when it is not there."""
        ...

    def close(self) -> None:
        """Close every connection. Idempotent."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A store that knows what is below its root and cannot be an object: no key names it, or it has no bytes."""

    def left_out(self) -> Iterator[str]:
        """Their names as they are there, in no order."""
        ...


@runtime_checkable
class ReadsPieces(Protocol):
    """A store that can stop between two parts of a range, so that the caller works on each while it is warm."""

    def read_pieces(
        self,
        key: str,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        etag: str | None = None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        """As `ObjectStore.read_into`, into `pieces` in their order; together they have the range's size.

        Each is filled whole before the next one is asked for, and after the last the end is asked for. An error may
        come after any of them; when it came in the body, its detail `received_bytes` says how many bytes of the range
        stand in the pieces. Raises ReadEnded when `limit` was ended.
        """
        ...


@runtime_checkable
class KeepsParts(Protocol):
    """A store that knows in which parts an object was uploaded."""

    def part_ends(self, key: str, etag: str | None) -> tuple[int, ...]:
        """Where the parts end, the last one the object; () when the store does not know. Raises StoreError."""
        ...


def cut(buffer: memoryview, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """The buffer in pieces of `piece_bytes`, the last one shorter."""
    for start in range(0, len(buffer), piece_bytes):
        yield buffer[start : start + piece_bytes]


def read_pieces(
    store: ObjectStore,
    key: str,
    byte_range: ByteRange,
    parts: Sequence[memoryview],
    seen: Callable[[memoryview], object] | None = None,
    *,
    etag: str | None = None,
    limit: ReadLimit | None = None,
) -> str | None:
    """Read a range into `parts`, which follow each other in the object; `seen` is called with every piece, in order.

    Pieces have `PIECE_BYTES` at most where the store is a `ReadsPieces`. Raises what `ObjectStore.read_into` raises,
    ValueError when the parts do not fit the range. After an error, what was seen has arrived; what arrived beyond
    that, the error's `received_bytes` says (see ReadsPieces). A store that reads whole ranges has brought nothing,
    and cannot be ended in mid-read.
    """
    if sum(map(len, parts)) != byte_range.size_bytes:
        raise ValueError(f"parts have {sum(map(len, parts))} bytes, the range {byte_range.size_bytes}")

    def pieces() -> Iterator[memoryview]:
        for part in parts:
            for piece in cut(part):
                yield piece
                if seen is not None:
                    seen(piece)

    if isinstance(store, ReadsPieces):
        return store.read_pieces(key, byte_range, pieces(), etag=etag, limit=limit)
    whole = parts[0] if len(parts) == 1 else memoryview(bytearray(byte_range.size_bytes))
    found = store.read_into(key, byte_range, whole, etag=etag)
    start = 0
    for piece in pieces():
        if len(parts) > 1:
            piece[:] = whole[start : start + len(piece)]
            start += len(piece)
    return found


def check_key(key: str) -> str:
    """`key` itself when it is safe to join to a root; StoreError when it is absolute, empty or climbs out."""
    parts = key.split("/")
    if not key or key.startswith("/") or "\\" in key or "\0" in key or any(p in ("", ".", "..") for p in parts):
        raise StoreError(f"not a relative object key: {key!r}", hint="keys may not be absolute or contain '..'")
    return key


def read_bytes(store: ObjectStore, key: str, byte_range: ByteRange, *, etag: str | None = None) -> bytes:
    """Those bytes as an object of their own: for headers and JSON, not for the hot path."""
    data = bytearray(byte_range.size_bytes)
    store.read_into(key, byte_range, memoryview(data), etag=etag)
    return bytes(data)


class MemoryStore:
    """An object store in a dict: the twin for unit tests, and the reference in the contract suite."""

    def __init__(self, objects: dict[str, bytes] | None = None, uri: str = "twin://memory") -> None:
        self.uri = uri
        self._objects: dict[str, tuple[bytes, str]] = {}  # key -> data, ETag
        self._lock = threading.Lock()
        for key, data in (objects or {}).items():
            self._objects[key] = bytes(data), _etag(data)

    def stat(self, key: str) -> ObjectInfo:
        data, etag = self._get(key)
        return ObjectInfo(key, len(data), etag)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            found = sorted(key for key in self._objects if key.startswith(prefix))
        for key in found:
            yield self.stat(key)

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        byte_range.check_buffer(buffer)
        if not byte_range.size_bytes:
            return etag
        data, found = self._get(key)
        if etag is not None and etag != found:
            raise ObjectChanged("object is not the pinned version", key=key, expected=etag, found=found)
        if byte_range.end > len(data):
            raise RangeMismatch(
                "range reaches past the object's end", key=key, range=str(byte_range), size_bytes=len(data)
            )
        buffer[:] = data[byte_range.start : byte_range.end]
        return found

    def put(self, key: str, data: bytes) -> ObjectInfo:
        with self._lock:
            self._objects[check_key(key)] = bytes(data), _etag(data)
        return self.stat(key)

    @contextmanager
    def upload(self, key: str) -> Iterator[_MemoryUpload]:
        yield _MemoryUpload(self, check_key(key))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def close(self) -> None:
        pass

    def _get(self, key: str) -> tuple[bytes, str]:
        with self._lock:
            if check_key(key) not in self._objects:
                raise ObjectNotFound("no such object", uri=self.uri, key=key)
            return self._objects[key]


class _MemoryUpload:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self._key = key
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    def complete(self) -> ObjectInfo:
        return self._store.put(self._key, bytes(self._data))


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


CONSUMERS = 4  # objects read at a time: enough to keep several cores hashing
MIN_DEPTH = 2  # one buffer is hashed while the next is filled

J = TypeVar("J")


class Stopped(Exception):
    """Another part of the same work failed; this one ends quietly. Never leaves `run_readers`."""


class RangeReader:
    """A ring of buffers for one consumer thread; used for one object after the other."""

    def __init__(
        self, executor: Executor, depth: int, buffer_bytes: int, policy: RetryPolicy, stop: threading.Event
    ) -> None:
        self._executor = executor
        self._buffers = [memoryview(bytearray(buffer_bytes)) for _ in range(depth)]
        self._policy = policy
        self._stop = stop

    def read(
        self, store: ObjectStore, key: str, ranges: Sequence[ByteRange], *, etag: str | None
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Index and bytes of each range, in order; no range is larger than a buffer.

        Raises what `ObjectStore.read_into` raises, after retries, and Stopped when the work was called off.
        """
        flying: deque[tuple[int, memoryview, Future[None]]] = deque()
        free = deque(self._buffers)
        submitted = 0
        try:
            for _ in ranges:
                while free and submitted < len(ranges):
                    buffer = free.popleft()
                    view = buffer[: ranges[submitted].size_bytes]
                    fill = self._executor.submit(self._fill, store, key, ranges[submitted], view, etag)
                    flying.append((submitted, buffer, fill))
                    submitted += 1
                index, buffer, fill = flying[0]
                fill.result()
                flying.popleft()
                yield index, buffer[: ranges[index].size_bytes]
                free.append(buffer)
        finally:
            # A buffer belongs to its read until that has ended: nobody may reuse the ring before.
            for _, _, fill in flying:
                fill.cancel()
            wait([fill for _, _, fill in flying])

    def _fill(self, store: ObjectStore, key: str, byte_range: ByteRange, view: memoryview, etag: str | None) -> None:
        def read() -> None:
            if self._stop.is_set():
                raise Stopped
            store.read_into(key, byte_range, view, etag=etag)

        with_retries(read, self._policy, sleep=self._stop.wait)


def run_readers(
    jobs: Sequence[J],
    work: Callable[[J, RangeReader], None],
    *,
    concurrency: int,
    buffer_bytes: int,
    policy: RetryPolicy,
) -> None:
    """`work` of every job, several at a time, with about `concurrency` reads in flight in all.

    The first error (or Ctrl-C) stops all others within one read, and is raised when they have ended.
    """
    if not jobs:
        return
    consumers = min(CONSUMERS, concurrency, len(jobs))
    depth = max(MIN_DEPTH, concurrency // consumers)
    stop = threading.Event()
    waiting = deque(jobs)
    with (
        ThreadPoolExecutor(concurrency, thread_name_prefix="longshore-read") as reads,
        ThreadPoolExecutor(consumers, thread_name_prefix="longshore-hash") as consumer_threads,
    ):

        def consume() -> None:
            reader = RangeReader(reads, depth, buffer_bytes, policy, stop)
            while not stop.is_set():
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                work(job, reader)

        running: list[Future[None]] = []
        try:
            # Inside: a Ctrl-C that comes while these start must stop those that have, or all would be read first.
            for _ in range(consumers):
                running.append(consumer_threads.submit(consume))
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            if len(running) < consumers or not all(future.done() and not future.exception() for future in running):
                stop.set()
            wait(running)
    errors = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def ranges_of(ends: Sequence[int]) -> list[ByteRange]:
    """Half-open ranges from their ends: `[10, 30]` is [0, 10) and [10, 30)."""
    return [ByteRange(start, end) for start, end in pairwise((0, *ends))]
