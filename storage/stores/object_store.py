"""The protocol of an object store, byte ranges, a store in memory for tests, and readers of whole objects.

Every byte of a model comes through this protocol.

    stat(key)                     size and version of one object, in one request
    list(prefix)                  every object under a prefix, paged by the store
    read_into(key, range, buf)    exactly those bytes into the caller's buffer, or an error
    read_pieces(key, range, bufs) the same into several buffers in order, each processed while it is still in the CPU's
                                  cache (`ReadsPieces`: the stores of the hot path; `read_pieces` works with any store)
    put(key, data)                writes a small object, whole and atomic
    upload(key)                   writes a large object in parts; visible only when it is complete
    delete(key)                   removes one object if it exists

Keys are relative to the root that the store was opened on, `/`-separated, never absolute and never with `..`
(`check_key`). Stores are thread-safe: many threads call `read_into` at once, each on a connection of its own.

Whole objects are read in order, through a few reused buffers, with several reads in flight for each consumer:

    run_readers(jobs) -- consumer threads --> work(job, reader)
        reader.read(key, ranges) --> (0, bytes), (1, bytes), ...     views, valid until the next step
            ring of `depth` buffers, filled ahead by shared reading threads; a buffer is filled again only
            after the consumer has taken its next step. Memory: consumers x depth x buffer_bytes, allocated once.
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
from typing import Protocol, TypeVar, cast, runtime_checkable

from storage.errors import ObjectChanged, ObjectNotFound, RangeMismatch, StoreError
from storage.stores.requests import ReadLimit, RetryPolicy, with_retries


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes `[start, end)` of one object. `ByteRange(0, 8)` is the first eight bytes."""

    start: int  # first byte, counted from 0
    end: int  # first byte after the range

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a byte range: [{self.start}, {self.end})")

    @property
    def size_bytes(self) -> int:
        """Number of bytes in the range."""
        return self.end - self.start

    def check_buffer(self, buffer: memoryview) -> None:
        """Raise ValueError unless the range fills the buffer exactly."""
        if len(buffer) != self.size_bytes:
            raise ValueError(f"buffer has {len(buffer)} bytes, the range {self.size_bytes}")

    def split(self, piece_bytes: int) -> Iterator[ByteRange]:
        """Yield the range in pieces of `piece_bytes`. The last may be shorter; an empty range yields none."""
        for start in range(self.start, self.end, piece_bytes):
            yield ByteRange(start, min(start + piece_bytes, self.end))

    def http_header(self) -> str:
        """Return the value of an HTTP `Range` header, whose end is inclusive (RFC 9110 section 14.1.2)."""
        if not self.size_bytes:
            raise ValueError("HTTP cannot ask for an empty range")
        return f"bytes={self.start}-{self.end - 1}"

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


# Small enough that a piece is hashed or copied while it is still in a core's own cache (1 to 2 MiB on servers). Large
# enough that the work between two receives does not matter. Measured in docs/benchmarks.md.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The facts that a store reports about one object."""

    key: str  # relative to the store's root
    size_bytes: int
    etag: str | None  # opaque version tag without quotes; None if the store has none
    checksums: dict[str, str] = field(default_factory=dict)  # of the whole object: {"crc64nvme" | "sha256" | ...: hex}
    composites: dict[str, str] = field(default_factory=dict)  # digests over the digests of its parts (see KeepsParts)


class Upload(Protocol):
    """An object that is written in order. Nothing is visible before `complete`."""

    def write(self, data: memoryview) -> None: ...

    def complete(self) -> ObjectInfo: ...


@runtime_checkable
class ObjectStore(Protocol):
    """Reads and writes bytes by key. Methods raise only the errors of `storage.errors`."""

    uri: str  # the root, for messages; contains no credentials

    def stat(self, key: str) -> ObjectInfo:
        """Return size, ETag and known checksums. Raises ObjectNotFound, AccessDenied, StoreUnavailable."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with `prefix`, recursively, in key order."""
        ...

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        """Fill `buffer` (writable, exactly `byte_range.size_bytes` long) with those bytes of `key`.

        With `etag`, the answer must be that version, whether the server honours If-Match or ignores it. Otherwise
        ObjectChanged is raised. Returns the ETag of the answer. An empty range sends no request.
        Raises ShortRead, RangeMismatch, ObjectChanged, ObjectNotFound, AccessDenied, StoreUnavailable.
        After an error the buffer's contents are undefined.
        """
        ...

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a small object whole."""
        ...

    def upload(self, key: str) -> AbstractContextManager[Upload]:
        """Write a large object in order. Leaving the block without `complete()` removes what was written."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object. No error if it does not exist."""
        ...

    def close(self) -> None:
        """Close every connection. Idempotent."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A store that can name the files below its root that cannot be objects: no valid key, or no bytes."""

    def left_out(self) -> Iterator[str]:
        """Yield their names as the file system has them, in no order."""
        ...


@runtime_checkable
class ReadsPieces(Protocol):
    """A store that can pause between two pieces of a range, so that the caller processes each while it is cached."""

    def read_pieces(
        self,
        key: str,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        etag: str | None = None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        """Read like `ObjectStore.read_into`, into `pieces` in order. Together they have the size of the range.

        Each piece is filled before the next one is taken from the iterator. After the last piece the iterator is
        advanced to its end. Any piece may end in an error. If the error came in the body, its detail `received_bytes`
        is how many bytes of the range are in the pieces. Raises ReadEnded if `limit` was ended.
        """
        ...


@runtime_checkable
class KeepsParts(Protocol):
    """A store that knows in which parts an object was uploaded."""

    def part_ends(self, key: str, etag: str | None) -> tuple[int, ...]:
        """Return the end offsets of the parts, or () if the store does not know them. Raises StoreError."""
        ...


def cut(buffer: memoryview, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """Yield the buffer in pieces of `piece_bytes`. The last may be shorter."""
    for start in range(0, len(buffer), piece_bytes):
        yield buffer[start : start + piece_bytes]


def read_pieces(
    store: ObjectStore | ReadsPieces,
    key: str,
    byte_range: ByteRange,
    parts: Sequence[memoryview],
    seen: Callable[[memoryview], object] | None = None,
    *,
    etag: str | None = None,
    limit: ReadLimit | None = None,
) -> str | None:
    """Read a range into `parts`, which are adjacent in the object. Calls `seen` with every piece, in order.

    If the store is a `ReadsPieces`, a piece has at most `PIECE_BYTES`. Raises what `ObjectStore.read_into` raises, and
    ValueError if the parts do not fit the range. After an error, every piece passed to `seen` has arrived. The error's
    `received_bytes` counts the bytes that arrived in all (see ReadsPieces). A store that reads whole ranges has
    delivered nothing after an error, and its reads cannot be ended halfway.
    """
    if sum(map(len, parts)) != byte_range.size_bytes:
        raise ValueError(f"parts have {sum(map(len, parts))} bytes, the range {byte_range.size_bytes}")

    def pieces() -> Iterator[memoryview]:
        for part in parts:
            for piece in cut(part):
                yield piece
                if seen is not None:
                    seen(piece)

    if issubclass(type(store), ReadsPieces):  # cached by Python, which isinstance of a protocol is not
        return cast(ReadsPieces, store).read_pieces(key, byte_range, pieces(), etag=etag, limit=limit)
    store = cast(ObjectStore, store)
    whole = parts[0] if len(parts) == 1 else memoryview(bytearray(byte_range.size_bytes))
    found = store.read_into(key, byte_range, whole, etag=etag)
    start = 0
    for piece in pieces():
        if len(parts) > 1:
            piece[:] = whole[start : start + len(piece)]
            start += len(piece)
    return found


def check_key(key: str) -> str:
    """Return `key` if it is safe to join to a root. Raises StoreError if it is empty, absolute or contains '..'."""
    parts = key.split("/")
    if not key or key.startswith("/") or "\\" in key or "\0" in key or any(p in ("", ".", "..") for p in parts):
        raise StoreError(f"not a relative object key: {key!r}", hint="keys may not be absolute or contain '..'")
    return key


def read_bytes(store: ObjectStore, key: str, byte_range: ByteRange, *, etag: str | None = None) -> bytes:
    """Return the bytes of a range as a new object. For headers and JSON, not for the hot path."""
    data = bytearray(byte_range.size_bytes)
    store.read_into(key, byte_range, memoryview(data), etag=etag)
    return bytes(data)


class MemoryStore:
    """An object store in a dict: for unit tests, and the reference in the contract tests."""

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


CONSUMERS = 4  # objects read at a time, enough to keep several cores hashing
MIN_DEPTH = 2  # buffers: one is hashed while the next is filled

J = TypeVar("J")


class Stopped(Exception):
    """Ends one job quietly because another job failed. `run_readers` never raises it."""


class RangeReader:
    """A ring of buffers for one consumer thread, reused for one object after the other."""

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
        """Yield index and bytes of each range, in order. No range may be larger than a buffer.

        Raises what `ObjectStore.read_into` raises, after retries, and Stopped when another job failed.
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
            # A running read still writes to its buffer, so nobody may reuse the ring before it has ended.
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
    """Run `work` for every job, several at a time, with about `concurrency` reads in flight in all.

    The first error (or Ctrl-C) stops all other jobs within one read. It is raised after they have ended.
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
            # Inside the try: a Ctrl-C between two submits must stop the jobs that have started.
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
    """Return half-open ranges from their ends: `[10, 30]` gives [0, 10) and [10, 30)."""
    return [ByteRange(start, end) for start, end in pairwise((0, *ends))]
