"""What is stored under a model's root: by listing it, where that is needed and allowed, or key by key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from storage.errors import AccessDenied, ObjectNotFound, UnsupportedStore
from storage.object_store import ObjectInfo, ObjectStore
from storage.retrying import RetryPolicy, with_retries

MAX_LISTED = 20_000  # a root with more objects is a bucket, not a model: its keys are asked for one by one
THREADS = 16

T = TypeVar("T")
R = TypeVar("R")


class Inventory:
    """Objects below a store's root."""

    def __init__(self, store: ObjectStore, policy: RetryPolicy) -> None:
        self._store = store
        self._policy = policy
        self.denied: AccessDenied | None = None  # why the root could not be listed, if that was why
        self._lock = threading.Lock()
        self._listing: list[dict[str, ObjectInfo] | None] = []  # one, once the root was listed

    @property
    def listed(self) -> dict[str, ObjectInfo] | None:
        """All objects by key, as they were at the first look; None when the root cannot be listed.

        Raises ObjectNotFound for a root that is not there, StoreUnavailable.
        """
        with self._lock:
            if not self._listing:
                self._listing.append(with_retries(self._list, self._policy))
            return self._listing[0]

    def find(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """Return those of `keys` that are there, from one listing if the store allows it."""
        if self.listed is not None:
            return {key: self.listed[key] for key in keys if key in self.listed}
        return self.look_up(keys)

    def look_up(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        """Return those of `keys` that are there, each asked for by name, as they are now.

        The root is listed only when a key is refused: S3 answers so of a missing object to those who may not list.
        """
        infos = map_threads(self._stat, list(keys))
        return {info.key: info for info in infos if info is not None}

    def _list(self) -> dict[str, ObjectInfo] | None:
        try:
            infos = list(islice(self._store.list(), MAX_LISTED + 1))
        except UnsupportedStore:
            return None
        except AccessDenied as error:
            self.denied = error.with_traceback(None)  # many may read the objects of a bucket and not list it
            return None
        return {info.key: info for info in infos} if len(infos) <= MAX_LISTED else None

    def _stat(self, key: str) -> ObjectInfo | None:
        try:
            return with_retries(lambda: self._store.stat(key), self._policy)
        except ObjectNotFound:
            return None
        except AccessDenied:
            if self.listed is None and self.denied is not None:
                return None  # missing, as far as anybody can tell who may not list
            if self.listed is not None and key not in self.listed:
                return None
            raise


def map_threads(function: Callable[[T], R], items: Sequence[T], threads: int = THREADS) -> list[R]:
    """`function` of every item, in order, several at a time; the first error ends it."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="longshore-open") as executor:
        futures = [executor.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
