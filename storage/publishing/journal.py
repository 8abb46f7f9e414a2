"""What a publish has finished, kept beside the model until the manifest is written: an interrupted one goes on.

A journal is a hint: an entry counts only while source and destination still have the sizes and ETags it names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal

from pydantic import ValidationError

from storage.checkpoints.checkpoint_files import JOURNAL_KEY, read_whole
from storage.checkpoints.manifest import MAX_JSON_VALUES, MAX_MANIFEST_BYTES, ManifestEntry, ManifestFile, ManifestShard
from storage.problems import json_values
from storage.stores.object_store import ObjectInfo, ObjectStore
from storage.stores.retrying import RetryPolicy, with_retries

MIN_PAUSE_S = 1.0  # between two saves
PAUSE_PER_SAVE = 10.0  # times what the last save took: a slow store is kept busy with the model, not with this


class JournalContents(ManifestEntry):
    """The stored JSON."""

    format: Literal["longshore.publish"]
    version: Literal[1]
    hash: str
    chunk_bytes: int
    shards: tuple[ManifestShard, ...]
    files: tuple[ManifestFile, ...]


def parse_journal(data: bytes) -> JournalContents | None:
    """The journal in those bytes; None for what is none, or too much of one."""
    if len(data) > MAX_MANIFEST_BYTES or json_values(data) > MAX_JSON_VALUES:
        return None
    try:
        return JournalContents.model_validate_json(data)
    except ValidationError:
        return None


class Journal:
    """Finished objects of one publish; `add` may be called from many threads."""

    def __init__(
        self,
        store: ObjectStore,
        hash_name: str,
        chunk_bytes: int,
        policy: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._hash_name = hash_name
        self._chunk_bytes = chunk_bytes
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._unsaved = False
        self._next_save_s = 0.0  # on the clock; not before
        self._entries: dict[str, ManifestFile] = {}

    def load(self, info: ObjectInfo | None) -> None:
        """Take over what an earlier publish with the same hash and chunk size left; anything else is ignored."""
        if info is None or info.size_bytes > MAX_MANIFEST_BYTES:
            return
        found = parse_journal(read_whole(self._store, info, self._policy))
        if found is None:
            return
        if (found.hash, found.chunk_bytes) == (self._hash_name, self._chunk_bytes):
            self._entries = {entry.path: entry for entry in (*found.shards, *found.files)}

    def adopt(self, entries: Iterable[ManifestFile]) -> None:
        """Take over what a manifest says of the very objects that are there."""
        self._entries = {entry.path: entry for entry in entries}

    def get(self, path: str) -> ManifestFile | None:
        """The entry of a finished object."""
        return self._entries.get(path)

    def add(self, entry: ManifestFile) -> None:
        """Note a finished object, and save when that was not done just now: each time all of them are written."""
        with self._lock:
            self._entries[entry.path] = entry
            self._unsaved = True
            if self._clock() >= self._next_save_s:
                self._save()

    def flush(self) -> None:
        """Save what was not saved yet. Raises StoreError."""
        with self._lock:
            if self._unsaved:
                self._save()

    def start(self) -> None:
        """Save what there is: shows before any reading that the store can be written. Raises StoreError."""
        with self._lock:
            self._save()

    def remove(self) -> None:
        """Take the journal away, after the manifest is there."""
        with_retries(lambda: self._store.delete(JOURNAL_KEY), self._policy)

    def _save(self) -> None:
        started_s = self._clock()
        contents = JournalContents(
            format="longshore.publish",
            version=1,
            hash=self._hash_name,
            chunk_bytes=self._chunk_bytes,
            shards=tuple(e for e in self._entries.values() if isinstance(e, ManifestShard)),
            files=tuple(e for e in self._entries.values() if not isinstance(e, ManifestShard)),
        )
        data = contents.model_dump_json().encode()
        with_retries(lambda: self._store.put(JOURNAL_KEY, data), self._policy)
        self._unsaved = False
        ended_s = self._clock()
        self._next_save_s = ended_s + max(MIN_PAUSE_S, PAUSE_PER_SAVE * (ended_s - started_s))
