"""Verification of a published model: reads all of it again and reports every difference from the manifest."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from storage.checkpoints.amax import AMAX_KEY
from storage.checkpoints.checkpoint import check_wanted, not_published, read_manifest, shard_revision
from storage.checkpoints.checkpoint_files import Inventory, scan_checkpoint
from storage.checkpoints.manifest import (
    MANIFEST_KEY,
    BadTensor,
    Manifest,
    ManifestFile,
    ManifestShard,
    table_differences,
)
from storage.checkpoints.model_index import OtherFile, Tensor, fixed_bounds
from storage.checkpoints.replaced_files import published_bytes
from storage.checkpoints.safetensors_header import HeaderBytes
from storage.errors import InvalidHeader, NotACheckpoint
from storage.problems import Problems, quote
from storage.publishing.one_object import AmaxScan, BadChunk, ObjectDigests, Recorded, digest_object
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, RangeReader, ranges_of, run_readers
from storage.stores.requests import RetryPolicy, with_retries

REPLACED = "a save that did not end has replaced files, whose published bytes are kept and read"
NOT_PUBLISHED = "not published, so there are no digests to compare; `longshore publish` writes them"


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """The progress of a verification at one moment."""

    done_bytes: int
    total_bytes: int
    key: str  # the object that was just read from


@dataclass(frozen=True, slots=True)
class WrongSize:
    """An object whose size is not the published one."""

    key: str
    expected_bytes: int
    found_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The differences between what is stored and what was published."""

    uri: str
    ok: bool  # published, and no difference was found
    source: Literal["manifest", "headers"]  # "headers": not published, only the structure was checked, ok is False
    revision: str  # "" without a manifest
    hash_name: str | None
    checked_chunks: int  # of shards
    checked_files: int
    checked_bytes: int
    bad_chunks: tuple[BadChunk, ...]  # by key, then chunk; chunk is the id in the model's chunk table
    bad_tensors: tuple[BadTensor, ...]  # by key: tensors for which manifest, headers or recorded maxima disagree
    bad_shards: tuple[str, ...]  # whose digest as a whole is wrong, although every chunk's digest is right
    bad_files: tuple[str, ...]  # other files with a wrong digest
    missing: tuple[str, ...]
    wrong_size: tuple[WrongSize, ...]
    notes: tuple[str, ...]
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return asdict(self)


def verify(
    store: ObjectStore,
    *,
    concurrency: int = 8,
    only_key: str | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    policy: RetryPolicy | None = None,
    trusted_keys: Sequence[str] = (),
    signed_name: str = "",
    revision: str = "",
) -> VerifyReport:
    """Compare everything the manifest lists, or the one shard `only_key`, with what is stored now.

    Differences are reported, never raised. Compared are the digests of chunks, shards and files, the tensors with each
    shard's header, and recorded maxima with the weights. Without a manifest only the headers are checked, and the
    report is not ok, because nothing defines the right bytes. `progress` is called from several threads, one at a time.
    With `trusted_keys` the manifest must be signed with one of them, under `signed_name` (see `open_model`). With
    `revision` it must have that revision. Otherwise nothing is read.

    Raises InvalidManifest, SignatureError, RevisionMismatch, CheckpointError (without a manifest), ObjectChanged if
    an object is replaced during the verification, and StoreError if the store cannot be read.
    """
    started_s = time.monotonic()
    policy = policy or RetryPolicy()
    inventory = Inventory(store, policy)
    info = inventory.look_up([MANIFEST_KEY]).get(MANIFEST_KEY)
    if info is None and trusted_keys:
        raise not_published(inventory, store.uri)
    manifest = None
    if info is not None:
        manifest = read_manifest(
            store, info, policy, trusted_keys=trusted_keys, signed_name=signed_name, inventory=inventory
        )
    if manifest is not None and only_key is not None:
        shards = tuple(shard for shard in manifest.shards if shard.path == only_key)
        if not shards:
            raise NotACheckpoint("the manifest does not list that file", uri=store.uri, key=only_key)
    found_revision = "" if manifest is None else manifest.revision
    if found_revision and only_key is not None:
        found_revision = shard_revision(found_revision, only_key)
    check_wanted(revision, found_revision, store.uri)
    if manifest is None:
        checkpoint = scan_checkpoint(store, only_key=only_key, policy=policy, inventory=inventory)
        return VerifyReport(
            uri=store.uri,
            ok=False,
            source="headers",
            revision="",
            hash_name=None,
            checked_chunks=0,
            checked_files=0,
            checked_bytes=sum(header.data_start for header in checkpoint.headers),
            bad_chunks=(),
            bad_tensors=(),
            bad_shards=(),
            bad_files=(),
            missing=(),
            wrong_size=(),
            notes=(NOT_PUBLISHED,),
            elapsed_s=time.monotonic() - started_s,
        )
    report = _Verify(store, manifest, policy, progress).run(inventory, concurrency, only_key, started_s)
    return replace(report, revision=found_revision)


class _Verify:
    """One verification: its manifest and the differences found so far."""

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
        self._bad_tensors: list[BadTensor] = []
        self._bad_shards: list[str] = []
        self._bad_files: list[str] = []
        counts = [len(shard.chunk_ends) for shard in manifest.shards]
        paths = [shard.path for shard in manifest.shards]
        self._first_chunk = dict(zip(paths, accumulate(counts, initial=0), strict=False))
        self._tensors: dict[str, list[Tensor]] = defaultdict(list)
        for tensor in manifest.tensors:
            self._tensors[paths[tensor.shard]].append(tensor)
        self._names = frozenset(tensor.name for tensor in manifest.tensors)
        self._recorded = Recorded(manifest)

    def run(self, inventory: Inventory, concurrency: int, only_key: str | None, started_s: float) -> VerifyReport:
        entries = [
            entry
            for entry in (*self._manifest.shards, *self._manifest.files)
            if only_key is None or entry.path == only_key
        ]
        now = inventory.look_up([entry.path for entry in entries])
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
        if only_key is None and any(entry.path == AMAX_KEY for entry, _ in jobs) and AMAX_KEY not in self._bad_files:
            self._bad_tensors.extend(self._recorded.differences(self._store, self._policy))
        shards = [entry for entry, _ in jobs if isinstance(entry, ManifestShard)]
        same_size = {entry.path for entry, _ in jobs}
        kept = self._kept_files(
            entry for entry in entries if entry.path not in same_size or entry.path in self._bad_files
        )
        bad_files = tuple(sorted(set(self._bad_files) - kept))
        missing = tuple(entry.path for entry in entries if entry.path not in now and entry.path not in kept)
        wrong_size = tuple(
            WrongSize(entry.path, entry.size_bytes, now[entry.path].size_bytes)
            for entry in entries
            if entry.path in now and entry.path not in same_size and entry.path not in kept
        )
        return VerifyReport(
            uri=self._store.uri,
            ok=not (
                *missing,
                *wrong_size,
                *self._bad_chunks,
                *self._bad_tensors,
                *self._bad_shards,
                *bad_files,
            ),
            source="manifest",
            revision=self._manifest.revision,
            hash_name=self._manifest.hash,
            checked_chunks=sum(len(shard.chunk_ends) for shard in shards),
            checked_files=len(jobs) - len(shards),
            checked_bytes=self._done_bytes,
            bad_chunks=tuple(sorted(self._bad_chunks, key=lambda bad: bad.chunk)),
            bad_tensors=tuple(sorted(self._bad_tensors, key=lambda bad: bad.key)),
            bad_shards=tuple(sorted(self._bad_shards)),
            bad_files=bad_files,
            missing=missing,
            wrong_size=wrong_size,
            notes=(f"{REPLACED}: {Problems(map(quote, sorted(kept)))}",) if kept else (),
            elapsed_s=time.monotonic() - started_s,
        )

    def _kept_files(self, entries: Iterable[ManifestFile]) -> set[str]:
        """Return those of the files whose published bytes an interrupted save has kept."""
        return {
            entry.path
            for entry in entries
            if not isinstance(entry, ManifestShard)
            and self._is_kept(OtherFile(entry.path, entry.size_bytes, f"{self._manifest.hash}:{entry.digest}"))
        }

    def _is_kept(self, file: OtherFile) -> bool:
        return with_retries(lambda: published_bytes(self._store, file), self._policy) is not None

    def _check(self, job: tuple[ManifestFile, ObjectInfo], reader: RangeReader) -> None:
        entry, info = job
        # A listing may contain checksums of the store, but only the manifest's digests count here.
        info = replace(info, checksums={})
        if isinstance(entry, ManifestShard):
            self._check_shard(entry, info, reader)
            return
        ranges = ranges_of(fixed_bounds(entry.size_bytes, self._manifest.chunk_bytes))
        if self._digests(info, ranges, reader, None).whole != entry.digest:
            with self._lock:
                self._bad_files.append(entry.path)

    def _check_shard(self, entry: ManifestShard, info: ObjectInfo, reader: RangeReader) -> None:
        """Compare a shard's chunks, tensors and whole digest. What a bad chunk explains is not reported again."""
        ranges = ranges_of(entry.chunk_ends)
        head = HeaderBytes(info.size_bytes)
        scan = AmaxScan(self._recorded.weights_of(entry.path))

        def sink(view: memoryview) -> None:
            head.add(view)
            scan.add(view)

        digests = self._digests(info, ranges, reader, sink)
        first = self._first_chunk[entry.path]
        bad_chunks = [
            BadChunk(info.key, first + number, place.start, place.end, expected, found)
            for number, (place, expected, found) in enumerate(
                zip(ranges, entry.chunk_digests, digests.chunks, strict=True)
            )
            if found != expected
        ]
        bad_tensors: list[BadTensor] = []
        if not any(bad.start < head.end for bad in bad_chunks):
            try:
                header = head.parse()
                bad_tensors.extend(
                    table_differences(entry.path, self._tensors.get(entry.path, ()), header, self._names)
                )
            except InvalidHeader as error:
                bad_tensors.append(BadTensor(entry.path, "", "a safetensors header", error.message))
        with self._lock:
            if not bad_chunks:
                self._recorded.add(scan.rows())
            self._bad_chunks.extend(bad_chunks)
            self._bad_tensors.extend(bad_tensors)
            if not bad_chunks and digests.comparable(entry, self._manifest.hash) != entry.digest:
                self._bad_shards.append(entry.path)

    def _digests(
        self,
        info: ObjectInfo,
        ranges: Sequence[ByteRange],
        reader: RangeReader,
        sink: Callable[[memoryview], None] | None,
    ) -> ObjectDigests:
        return digest_object(
            reader,
            self._store,
            info,
            ranges,
            self._manifest.hash,
            sink=sink,
            on_bytes=lambda count: self._count(count, info.key),
        )

    def _count(self, size_bytes: int, key: str) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            if self._progress is not None:
                self._progress(VerifyProgress(self._done_bytes, self._total_bytes, key))
