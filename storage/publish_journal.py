"""What a publish has finished, kept beside the model until the manifest is written: an interrupted one goes on.

A journal is a hint: an entry counts only while source and destination still have the sizes and ETags it names.
"""

from __future__ import annotations

import threading
from typing import Literal

from pydantic import ValidationError

from storage.checkpoint_files import JOURNAL_KEY, read_whole
from storage.manifest import MAX_MANIFEST_BYTES, ManifestEntry, ManifestFile, ManifestShard
from storage.object_store import ObjectInfo, ObjectStore
from storage.retrying import RetryPolicy, with_retries


class JournalContents(ManifestEntry):
    """The stored JSON."""

    format: Literal["longshore.publish"]
    version: Literal[1]
    hash: str
    chunk_bytes: int
    shards: tuple[ManifestShard, ...]
    files: tuple[ManifestFile, ...]


class Journal:
    """Finished objects of one publish; `add` may be called from many threads."""

    def __init__(self, store: ObjectStore, hash_name: str, chunk_bytes: int, policy: RetryPolicy) -> None:
        self._store = store
        self._hash_name = hash_name
        self._chunk_bytes = chunk_bytes
        self._policy = policy
        self._lock = threading.Lock()
        self._entries: dict[str, ManifestFile] = {}

    def load(self, info: ObjectInfo | None) -> None:
        """Take over what an earlier publish with the same hash and chunk size left; anything else is ignored."""
        if info is None or info.size_bytes > MAX_MANIFEST_BYTES:
            return
        try:
            found = JournalContents.model_validate_json(read_whole(self._store, info, self._policy))
        except ValidationError:
            return
        if (found.hash, found.chunk_bytes) == (self._hash_name, self._chunk_bytes):
            self._entries = {entry.path: entry for entry in (*found.shards, *found.files)}

    def get(self, path: str) -> ManifestFile | None:
        """The entry of a finished object."""
        return self._entries.get(path)

    def add(self, entry: ManifestFile) -> None:
        """Note a finished object. Shards are saved at once; small files with the next shard, or at the end."""
        with self._lock:
            self._entries[entry.path] = entry
            if isinstance(entry, ManifestShard):
                self._save()

    def start(self) -> None:
        """Save what there is: shows before any reading that the store can be written. Raises StoreError."""
        with self._lock:
            self._save()

    def remove(self) -> None:
        """Take the journal away, after the manifest is there."""
        with_retries(lambda: self._store.delete(JOURNAL_KEY), self._policy)

    def _save(self) -> None:
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
