"""Stores that fail as real ones do, each wrapped around a good one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from storage.errors import AccessDenied, LongshoreError, StoreUnavailable
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, Upload


class WrappedStore:
    """Passes everything on, and counts: the base of the others, and good for counting alone."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.lock = threading.Lock()
        self.reads: list[tuple[str, ByteRange]] = []  # every range asked for
        self.requests: list[str] = []  # every call, by name

    @property
    def read_bytes(self) -> int:
        return sum(byte_range.size_bytes for _, byte_range in self.reads)

    def stat(self, key: str) -> ObjectInfo:
        self._note("stat")
        return self.inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._note("list")
        return self.inner.list(prefix)

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        self._note("read_into")
        with self.lock:
            self.reads.append((key, byte_range))
        return self.inner.read_into(key, byte_range, buffer, etag=etag)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        self._note("put")
        return self.inner.put(key, data)

    def upload(self, key: str) -> AbstractContextManager[Upload]:
        self._note("upload")
        return self.inner.upload(key)

    def delete(self, key: str) -> None:
        self._note("delete")
        self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()

    def _note(self, request: str) -> None:
        with self.lock:
            self.requests.append(request)


class FlipByteStore(WrappedStore):
    """One byte of one object arrives wrong: on the readings of it that `on_reading` (from 1) says."""

    def __init__(self, inner: ObjectStore, key: str, offset: int, on_reading: Callable[[int], bool]) -> None:
        super().__init__(inner)
        self.key, self.offset, self.on_reading = key, offset, on_reading
        self.readings = 0

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        found = super().read_into(key, byte_range, buffer, etag=etag)
        if key == self.key and byte_range.start <= self.offset < byte_range.end:
            with self.lock:
                self.readings += 1
                flip = self.on_reading(self.readings)
            if flip:
                buffer[self.offset - byte_range.start] ^= 0x10
        return found


class FailingStore(WrappedStore):
    """Reads for which `fails(key, range, number of the read)` is true raise `error` and leave rubbish."""

    def __init__(
        self,
        inner: ObjectStore,
        fails: Callable[[str, ByteRange, int], bool],
        error: Callable[[], BaseException] = lambda: StoreUnavailable("connection reset"),
    ) -> None:
        super().__init__(inner)
        self.fails, self.error = fails, error
        self.started = 0

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        with self.lock:
            self.started += 1
            number = self.started
        found = super().read_into(key, byte_range, buffer, etag=etag)
        if self.fails(key, byte_range, number):
            buffer[:] = b"\xaa" * len(buffer)
            raise self.error()
        return found


class NoListStore(WrappedStore):
    """Objects can be read by name; listing is refused."""

    def __init__(self, inner: ObjectStore, error: type[LongshoreError] = AccessDenied) -> None:
        super().__init__(inner)
        self.error_kind = error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._note("list")
        raise self.error_kind("listing is not allowed")
