"""A file system of fsspec's, in memory, some of whose reads do not come back until they are let go."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from storage.store_ref import StoreRef
from storage.stores.fsspec_store import FsspecStore


class Stalls:
    """What is stored, which reads hang, and how many do."""

    def __init__(self, objects: dict[str, bytes], hangs: Callable[[int], bool]) -> None:
        """`hangs` is asked with the number of each read of data (from 1)."""
        self.objects = dict(objects)
        self.go = threading.Event()
        self.reads = 0
        self.hanging = 0
        self._hangs = hangs
        self._lock = threading.Lock()

    def store(self) -> FsspecStore:
        stalls = self

        class StallingFileSystem(AbstractFileSystem):  # type: ignore[misc]
            protocol = "stalling"
            cachable = False

            def info(self, path: str, **_: Any) -> dict[str, Any]:
                data = stalls.objects[self._strip_protocol(path).rpartition("/")[2]]
                etag = hashlib.md5(data, usedforsecurity=False).hexdigest()  # as the twin in memory has it
                return {"name": path, "size": len(data), "type": "file", "ETag": etag}

            def cat_file(self, path: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
                stalls.wait()
                return stalls.objects[self._strip_protocol(path).rpartition("/")[2]][start:end]

        fsspec.register_implementation("stalling", StallingFileSystem, clobber=True)
        return FsspecStore(StoreRef("stalling", "bucket", "model"))

    def wait(self) -> None:
        with self._lock:
            self.reads += 1
            hangs = self._hangs(self.reads)
            self.hanging += hangs
        if hangs:
            self.go.wait()
            with self._lock:
                self.hanging -= 1
