"""Read a published model again and compare every digest: all that is wrong is in the report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from storage.checkpoint import NO_MANIFEST, read_manifest
from storage.checkpoint_files import scan_checkpoint
from storage.chunking import fixed_bounds
from storage.errors import NotACheckpoint
from storage.inventory import Inventory
from storage.manifest import MANIFEST_KEY, Manifest, ManifestFile, ManifestShard
from storage.object_digests import BadChunk, bad_chunks, digest_object
from storage.object_store import ObjectInfo, ObjectStore
from storage.retrying import RetryPolicy
from storage.streaming import RangeReader, ranges_of, run_readers


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """One moment of a verification."""

    done_bytes: int
    total_bytes: int
    key: str  # object that was just read from


@dataclass(frozen=True, slots=True)
class WrongSize:
    """An object that is there with another size than the published one."""

    key: str
    expected_bytes: int
    found_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What is stored, compared with what was published."""

    uri: str
    ok: bool  # nothing wrong was found
    source: Literal["manifest", "headers"]  # headers: no manifest, so only structure was checked
    revision: str  # "" without a manifest
    hash_name: str | None
    checked_chunks: int  # of shards
    checked_files: int
    checked_bytes: int
    bad_chunks: tuple[BadChunk, ...]  # by key, then chunk; chunk is the id in the model's chunk table
    bad_files: tuple[str, ...]  # other files with another digest
    missing: tuple[str, ...]
    wrong_size: tuple[WrongSize, ...]
    notes: tuple[str, ...]
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return asdict(self)


def verify(
    store: ObjectStore,
    *,
    concurrency: int = 8,
    only_key: str | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    policy: RetryPolicy | None = None,
) -> VerifyReport:
    """Compare everything the manifest names, or the one shard `only_key`, with what is stored now.

    Damage is in the report, never an exception. Without a manifest the headers are checked and the report says
    so. `progress` is called from several threads, one at a time. Raises InvalidManifest, CheckpointError (without
    a manifest), ObjectChanged when an object is replaced meanwhile, and StoreError when the store cannot be read.
    """
    started_s = time.monotonic()
    policy = policy or RetryPolicy()
    inventory = Inventory(store, policy)
    info = inventory.find([MANIFEST_KEY]).get(MANIFEST_KEY)
    manifest = None if info is None else read_manifest(store, info, policy)
    if manifest is not None and only_key is not None:
        shards = tuple(shard for shard in manifest.shards if shard.path == only_key)
        if not shards:
            raise NotACheckpoint("the manifest does not name that file", uri=store.uri, key=only_key)
    if manifest is None:
        checkpoint = scan_checkpoint(store, only_key=only_key, policy=policy, inventory=inventory)
        return VerifyReport(
            uri=store.uri,
            ok=True,
            source="headers",
            revision="",
            hash_name=None,
            checked_chunks=0,
            checked_files=0,
            checked_bytes=sum(header.data_start for header in checkpoint.headers),
            bad_chunks=(),
            bad_files=(),
            missing=(),
            wrong_size=(),
            notes=(NO_MANIFEST,),
            elapsed_s=time.monotonic() - started_s,
        )
    return _Verify(store, manifest, policy, progress).run(inventory, concurrency, only_key, started_s)


class _Verify:
    """One verification: its manifest and what it has found."""

    def __init__(
        self,
        store: ObjectStore,
        manifest: Manifest,
        policy: RetryPolicy,
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._policy = policy
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0
        self._bad_chunks: list[BadChunk] = []
        self._bad_files: list[str] = []
        counts = [len(shard.chunk_ends) for shard in manifest.shards]
        paths = [shard.path for shard in manifest.shards]
        self._first_chunk = dict(zip(paths, accumulate(counts, initial=0), strict=False))

    def run(self, inventory: Inventory, concurrency: int, only_key: str | None, started_s: float) -> VerifyReport:
        entries = [
            entry
            for entry in (*self._manifest.shards, *self._manifest.files)
            if only_key is None or entry.path == only_key
        ]
        now = inventory.find([entry.path for entry in entries])
        jobs = [
            (entry, now[entry.path])
            for entry in entries
            if entry.path in now and now[entry.path].size_bytes == entry.size_bytes
        ]
        jobs.sort(key=lambda job: -job[1].size_bytes)
        self._total_bytes = sum(info.size_bytes for _, info in jobs)
        run_readers(
            jobs,
            self._check,
            concurrency=concurrency,
            buffer_bytes=self._manifest.chunk_bytes,
            policy=self._policy,
        )
        shards = [entry for entry, _ in jobs if isinstance(entry, ManifestShard)]
        missing = tuple(entry.path for entry in entries if entry.path not in now)
        wrong_size = tuple(
            WrongSize(entry.path, entry.size_bytes, now[entry.path].size_bytes)
            for entry in entries
            if entry.path in now and now[entry.path].size_bytes != entry.size_bytes
        )
        return VerifyReport(
            uri=self._store.uri,
            ok=not (missing or wrong_size or self._bad_chunks or self._bad_files),
            source="manifest",
            revision=self._manifest.revision,
            hash_name=self._manifest.hash,
            checked_chunks=sum(len(shard.chunk_ends) for shard in shards),
            checked_files=len(jobs) - len(shards),
            checked_bytes=self._done_bytes,
            bad_chunks=tuple(sorted(self._bad_chunks, key=lambda bad: bad.chunk)),
            bad_files=tuple(sorted(self._bad_files)),
            missing=missing,
            wrong_size=wrong_size,
            notes=(),
            elapsed_s=time.monotonic() - started_s,
        )

    def _check(self, job: tuple[ManifestFile, ObjectInfo], reader: RangeReader) -> None:
        entry, info = job
        hash_name = self._manifest.hash
        # Listings may carry checksums of the store; the manifest's digests are what is asked for here.
        info = replace(info, checksums={})

        def on_bytes(count: int) -> None:
            self._count(count, entry.path)

        if isinstance(entry, ManifestShard):
            ranges = ranges_of(entry.chunk_ends)
            first = self._first_chunk[entry.path]
            for bad in bad_chunks(reader, self._store, info, ranges, hash_name, entry.chunk_digests, on_bytes=on_bytes):
                with self._lock:
                    self._bad_chunks.append(replace(bad, chunk=first + bad.chunk))
            return
        ranges = ranges_of(fixed_bounds(entry.size_bytes, self._manifest.chunk_bytes))
        digests = digest_object(reader, self._store, info, ranges, hash_name, on_bytes=on_bytes)
        if digests.whole != entry.digest:
            with self._lock:
                self._bad_files.append(entry.path)

    def _count(self, size_bytes: int, key: str) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            if self._progress is not None:
                self._progress(VerifyProgress(self._done_bytes, self._total_bytes, key))
