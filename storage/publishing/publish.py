"""Publishing a checkpoint: reads everything, checks what was read, and writes the manifest last.

    scan names and headers --> for each shard and file, several at a time:
        read, hash, compare with the store's checksum   or   read, hash, read again, compare
        copying: written while it is read, then read back from the destination and compared
        --> journal
    --> sizes and ETags again --> recorded maxima, if requested --> manifest --> its signature --> journal removed

A manifest declares that these bytes are the model, so it must never be made from a wrong reading. The memory is that of
a few chunks, and of one number for each row if maxima are recorded.

The journal lists the objects that are finished. It is kept beside the model until the manifest is written, so that an
interrupted publish can continue. It is only a hint: an entry counts only while source and destination have the sizes
and ETags that it names.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from pydantic import ValidationError

from storage.checkpoints.amax import AMAX_KEY, Amax, encode_amax, is_recorded
from storage.checkpoints.checkpoint import read_manifest
from storage.checkpoints.checkpoint_files import (
    JOURNAL_KEY,
    OWN_KEYS,
    PROBE_KEY,
    Checkpoint,
    Inventory,
    names_left_out,
    read_whole,
    scan_checkpoint,
)
from storage.checkpoints.manifest import (
    MANIFEST_KEY,
    MAX_JSON_VALUES,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestEntry,
    ManifestFile,
    ManifestShard,
)
from storage.checkpoints.model_index import (
    DEFAULT_CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Tensor,
    chunk_bounds,
    fixed_bounds,
)
from storage.checkpoints.replaced_files import BEFORE_KEY
from storage.checksum import MANIFEST_HASH_NAMES, digest_of
from storage.errors import (
    AccessDenied,
    IntegrityError,
    InvalidManifest,
    NewerManifest,
    ObjectChanged,
    ObjectNotFound,
    PublishError,
    SignatureError,
    StoreError,
)
from storage.problems import json_values
from storage.publishing.one_object import ObjectPublisher, PublishJob
from storage.publishing.one_object import PublishProgress as PublishProgress
from storage.publishing.signing import SIGNATURE_KEY, SigningKey, check_signable, key_id, sign_manifest, signed_name_of
from storage.stores.object_store import (
    ByteRange,
    ObjectInfo,
    ObjectStore,
    RangeReader,
    ranges_of,
    read_bytes,
    run_readers,
)
from storage.stores.requests import RetryPolicy, with_retries

MIN_PAUSE_S = 1.0  # between two saves of the journal
PAUSE_PER_SAVE = 10.0  # times the duration of the last save, so that a slow store spends its time on the model


class JournalContents(ManifestEntry):
    """The JSON of a stored journal."""

    format: Literal["longshore.publish"]
    version: Literal[1]
    hash: str
    chunk_bytes: int
    shards: tuple[ManifestShard, ...]
    files: tuple[ManifestFile, ...]


def parse_journal(data: bytes) -> JournalContents | None:
    """Return the journal in those bytes; None if they are not a journal, or too large."""
    if len(data) > MAX_MANIFEST_BYTES or json_values(data) > MAX_JSON_VALUES:
        return None
    try:
        return JournalContents.model_validate_json(data)
    except ValidationError:
        return None


class Journal:
    """The finished objects of one publish. `add` may be called from many threads."""

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
        self._next_save_s = 0.0  # earliest time of the next save, on the clock
        self._entries: dict[str, ManifestFile] = {}

    def load(self, info: ObjectInfo | None) -> None:
        """Take over the journal of an earlier publish with the same hash and chunk size. Any other is ignored."""
        if info is None or info.size_bytes > MAX_MANIFEST_BYTES:
            return
        found = parse_journal(read_whole(self._store, info, self._policy))
        if found is None:
            return
        if (found.hash, found.chunk_bytes) == (self._hash_name, self._chunk_bytes):
            self._entries = {entry.path: entry for entry in (*found.shards, *found.files)}

    def adopt(self, entries: Iterable[ManifestFile]) -> None:
        """Take over the entries of a manifest, for objects that have not changed since."""
        self._entries = {entry.path: entry for entry in entries}

    def get(self, path: str) -> ManifestFile | None:
        """Return the entry of a finished object."""
        return self._entries.get(path)

    def add(self, entry: ManifestFile) -> None:
        """Note a finished object. Save the journal unless it was saved just now, because a save writes all entries."""
        with self._lock:
            self._entries[entry.path] = entry
            self._unsaved = True
            if self._clock() >= self._next_save_s:
                self._save()

    def flush(self) -> None:
        """Save what is not saved yet. Raises StoreError."""
        with self._lock:
            if self._unsaved:
                self._save()

    def start(self) -> None:
        """Save the journal now, to find out before any reading whether the store can be written. Raises StoreError."""
        with self._lock:
            self._save()

    def remove(self) -> None:
        """Delete the journal after the manifest was written."""
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


def same_place(source: ObjectStore, dest: ObjectStore, policy: RetryPolicy) -> bool:
    """Return whether both stores are the same place, where copying would overwrite the objects with themselves.

    URIs are not enough: two servers can have a bucket of the same name, and a folder can have many names. So a probe is
    written to one store and read from the other.
    """
    if source is dest or not (source.uri == dest.uri or source.uri[:5] == dest.uri[:5] == "file:"):
        return source is dest
    token = uuid.uuid4().hex.encode()
    with_retries(lambda: dest.put(PROBE_KEY, token), policy)
    try:
        return with_retries(lambda: read_bytes(source, PROBE_KEY, ByteRange(0, len(token))), policy) == token
    except (ObjectNotFound, AccessDenied):
        return False
    finally:
        with_retries(lambda: dest.delete(PROBE_KEY), policy)


def is_entry_of(entry: ManifestFile, source: ObjectInfo, stored: ObjectInfo | None) -> bool:
    """Return whether an entry is for these versions. Without ETags that cannot be known, so the result is False."""
    return (
        stored is not None
        and None not in (entry.etag, entry.source_etag)
        and (entry.size_bytes, entry.source_etag) == (source.size_bytes, source.etag)
        and (entry.size_bytes, entry.etag) == (stored.size_bytes, stored.etag)
    )


def check_same(expected: ObjectInfo, now: ObjectInfo | None, uri: str) -> None:
    """Raise ObjectChanged unless the sizes are equal and also the ETags, if both are known."""
    same = (
        now is not None
        and now.size_bytes == expected.size_bytes
        and (expected.etag == now.etag or None in (expected.etag, now.etag))
    )
    if not same:
        raise ObjectChanged(
            "object was replaced or removed while it was published",
            hint="publish again when nobody else writes to the folder",
            uri=uri,
            key=expected.key,
            expected=expected.etag,
            found=now.etag if now else "nothing",
        )


PIECE_BYTES = 8 << 20  # bytes written, or read back, at a time


def write_amax(
    store: ObjectStore, names: Sequence[str], rows: Mapping[str, Amax], hash_name: str, policy: RetryPolicy
) -> ManifestFile:
    """Write the maxima of those weights in that order, and return their manifest entry. Raises IntegrityError."""
    data = encode_amax((name, rows[name]) for name in names)
    _write(store, AMAX_KEY, data, policy)
    info = with_retries(lambda: store.stat(AMAX_KEY), policy)
    return ManifestFile(
        path=AMAX_KEY,
        size_bytes=len(data),
        etag=info.etag,
        source_etag=info.etag,
        checked_by="read-twice+read-back",  # the weights were read twice, and this file was read back
        digest=digest_of(hash_name, data).hex(),
    )


def write_manifest(
    store: ObjectStore,
    manifest: Manifest,
    policy: RetryPolicy,
    *,
    sign_key: SigningKey | None,
    signed_name: str,
    signed_before: bool,
) -> None:
    """Write the manifest and then its signature. `signed_before`: an older manifest's signature exists.

    Raises PublishError, IntegrityError, StoreError.
    """
    data = manifest.to_json()
    if len(data) > MAX_MANIFEST_BYTES:
        raise PublishError(
            f"the manifest would have {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read",
            hint="publish with larger chunks",
        )
    if signed_before:  # the old signature would make the new manifest look tampered with
        with_retries(lambda: store.delete(SIGNATURE_KEY), policy)
    _write(store, MANIFEST_KEY, data, policy)
    if sign_key is not None:
        signature = sign_manifest(data, sign_key, signed_name)
        with_retries(lambda: store.put(SIGNATURE_KEY, signature), policy)


def _write(store: ObjectStore, key: str, data: bytes, policy: RetryPolicy) -> None:
    """Write an object and read it back. If it differs, delete it and raise IntegrityError."""
    with_retries(lambda: _send(store, key, data), policy)
    for place in ranges_of(fixed_bounds(len(data), PIECE_BYTES)):
        written = with_retries(partial(read_bytes, store, key, place), policy)
        if written != data[place.start : place.end]:
            with_retries(lambda: store.delete(key), policy)
            what = "the manifest" if key == MANIFEST_KEY else key
            raise IntegrityError(
                f"{what} was read back with other bytes than were written",
                hint="check disks, memory and network, then publish again",
                uri=store.uri,
                key=key,
            )


def _send(store: ObjectStore, key: str, data: bytes) -> None:
    if key == MANIFEST_KEY or len(data) <= PIECE_BYTES:
        store.put(key, data)  # on any store, a manifest appears whole or not at all
        return
    with store.upload(key) as upload:
        for place in ranges_of(fixed_bounds(len(data), PIECE_BYTES)):
            upload.write(memoryview(data)[place.start : place.end])
        upload.complete()


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of a publish."""

    uri: str  # the place of the manifest
    revision: str
    hash_name: str
    chunk_bytes: int
    shards: int
    tensors: int
    chunks: int
    files: int  # other files that the manifest lists
    size_bytes: int  # of all shards
    read_bytes: int  # by this publish; every reading counts
    copied_bytes: int  # written to the destination
    resumed: int  # shards and files that an earlier, interrupted publish had finished
    unchanged: bool  # the manifest existed and fits what is stored, so nothing was read
    checks: dict[str, int]  # how the source was checked -> number of objects
    skipped: tuple[str, ...]  # not published: weights that are not part of the model, odd names, fifos, broken links
    elapsed_s: float
    amax: bool = False  # the manifest lists the largest value of each row of the weights
    signed_by: str | None = None  # id of the key that signed the manifest, now or earlier
    signed_name: str | None = None  # the name under which it is signed

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return asdict(self)


def publish(
    source: ObjectStore,
    dest: ObjectStore | None = None,
    *,
    hash_name: str = "blake3",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    concurrency: int = 8,
    force: bool = False,
    only_key: str | None = None,
    progress: Callable[[PublishProgress], None] | None = None,
    policy: RetryPolicy | None = None,
    sign_key: SigningKey | None = None,
    signed_name: str = "",
    amax: bool = False,
) -> PublishReport:
    """Publish the checkpoint at the root of `source`, in place or copied to `dest`.

    `concurrency` is the number of reads in flight; the memory is about that many chunks. Objects that an interrupted
    publish finished are not read again. A published and unchanged model is not read at all, unless `force`.
    `progress` is called from several threads, one at a time.

    With `sign_key` the manifest is signed. Then only readings of this publish count: a journal is ignored, and so is a
    manifest that is not signed with the same key under the same name. The name is `signed_name`, by default the path of
    the URI where the manifest is written. With `amax` the largest absolute value of each row of the weights is written
    beside the manifest (`storage.checkpoints.amax`). Shards of an earlier publish are read once more for it.

    Raises PublishError for invalid arguments, WeakDigest for a `sign_key` with digests that can be forged,
    IntegrityError (shard and chunk in its details) if two readings, the store's checksum or the copy differ,
    ObjectChanged if an object is replaced during the publish, CheckpointError if there is no valid checkpoint,
    NewerManifest if a later Longshore published the model (unless `force`), and StoreError. After an error there is no
    new manifest. In place, an older manifest stays, and its own digests decide. In a destination it is removed before
    anything is overwritten.
    """
    if hash_name not in MANIFEST_HASH_NAMES:
        raise PublishError(
            f"unknown hash {hash_name!r}", hint=f"choose one of {', '.join(sorted(MANIFEST_HASH_NAMES))}"
        )
    if sign_key is not None:
        check_signable(hash_name)
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise PublishError(f"chunk_bytes={chunk_bytes} must be from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")
    if concurrency < 1:
        raise PublishError(f"concurrency={concurrency} must be at least 1")
    policy = policy or RetryPolicy()
    if dest is not None and same_place(source, dest, policy):
        dest = None
    if sign_key is not None:
        signed_name = signed_name_of((dest or source).uri, signed_name)
    run = _Publish(source, dest, hash_name, chunk_bytes, policy, progress, sign_key, signed_name, amax)
    return run.run(concurrency, force, only_key)


class _Publish:
    """One publish: its two stores, its settings and its counters."""

    def __init__(
        self,
        source: ObjectStore,
        dest: ObjectStore | None,
        hash_name: str,
        chunk_bytes: int,
        policy: RetryPolicy,
        progress: Callable[[PublishProgress], None] | None,
        sign_key: SigningKey | None,
        signed_name: str,
        amax: bool,
    ) -> None:
        self._sign_key = sign_key
        self._signed_name = signed_name
        self._amax = amax
        self._source = source
        self._dest = dest if dest is not None else source
        self._copying = dest is not None
        self._hash_name = hash_name
        self._chunk_bytes = chunk_bytes
        self._policy = policy
        self._publisher = ObjectPublisher(source, dest, hash_name, policy, progress)
        self._journal = Journal(self._dest, hash_name, chunk_bytes, policy)
        self._entries: dict[str, ManifestFile] = {}
        self._left_out: tuple[str, ...] = ()
        self._signed_before = False  # whether an older manifest's signature exists

    def run(self, concurrency: int, force: bool, only_key: str | None) -> PublishReport:
        started_s = time.monotonic()
        inventory = Inventory(self._source, self._policy)
        checkpoint = scan_checkpoint(self._source, only_key=only_key, policy=self._policy, inventory=inventory)
        if inventory.listed is not None:
            if BEFORE_KEY in inventory.listed:  # config and index may be of another revision than the shards
                raise PublishError(
                    "a save was interrupted while it replaced small files of this checkpoint",
                    hint="repeat the save, or run longshore saves URI --clean, which puts the files back",
                    uri=self._source.uri,
                )
            self._left_out = names_left_out(self._source, self._policy)
        stored = Inventory(self._dest, self._policy) if self._copying else inventory
        there = stored.find([*OWN_KEYS, *(info.key for info in (*checkpoint.shards, *checkpoint.files))])
        old = self._old_manifest(there.get(MANIFEST_KEY), force, stored)
        if old is not None and self._still_describes(old, checkpoint, there):
            if self._has_what_is_recorded(old, there.get(AMAX_KEY)):
                return self._report(old, checkpoint, started_s, resumed=0, unchanged=True)
            self._journal.adopt((*old.shards, *old.files))
        elif not force and self._sign_key is None:
            self._journal.load(there.get(JOURNAL_KEY))
        jobs = self._jobs(checkpoint)
        resumed = [self._resume(job, there.get(job.source.key)) for job in jobs]
        todo = [job for job in resumed if job.finished is None or job.weights]
        self._journal.start()
        if self._copying and MANIFEST_KEY in there and any(job.finished is None for job in todo):
            with_retries(lambda: self._dest.delete(MANIFEST_KEY), self._policy)
        self._signed_before = SIGNATURE_KEY in there
        self._publisher.foresee(todo)
        todo.sort(key=lambda job: -job.source.size_bytes)
        try:
            run_readers(
                todo,
                self._publish_object,
                concurrency=concurrency,
                buffer_bytes=min(self._chunk_bytes, max((job.source.size_bytes for job in todo), default=0)),
                policy=self._policy,
            )
            self._check_nothing_moved(jobs)
            manifest = self._write_manifest(checkpoint)
        except BaseException:
            with contextlib.suppress(StoreError):  # the error that ended the publish matters more
                self._journal.flush()
            raise
        if AMAX_KEY in there and not self._amax:
            with_retries(lambda: self._dest.delete(AMAX_KEY), self._policy)
        self._journal.remove()
        finished = sum(job.finished is not None for job in resumed)
        return self._report(manifest, checkpoint, started_s, resumed=finished, unchanged=False)

    def _old_manifest(self, info: ObjectInfo | None, force: bool, stored: Inventory) -> Manifest | None:
        """Return the existing manifest, or None if it must be replaced. Raises NewerManifest unless `force`."""
        keys = () if self._sign_key is None else (self._sign_key.public,)
        if info is None or force:
            return None
        try:
            return read_manifest(
                self._dest, info, self._policy, trusted_keys=keys, signed_name=self._signed_name, inventory=stored
            )
        except NewerManifest:
            raise
        except (InvalidManifest, SignatureError):
            return None

    def _still_describes(self, manifest: Manifest, checkpoint: Checkpoint, there: Mapping[str, ObjectInfo]) -> bool:
        """Return whether the manifest was made with the same settings from objects that have not changed since."""
        entries = {entry.path: entry for entry in (*manifest.shards, *manifest.files) if entry.path != AMAX_KEY}
        sources = {info.key: info for info in (*checkpoint.shards, *checkpoint.files)}
        return (
            (manifest.hash, manifest.chunk_bytes) == (self._hash_name, self._chunk_bytes)
            and [shard.path for shard in manifest.shards] == [info.key for info in checkpoint.shards]
            and checkpoint.tensors == manifest.tensors
            and entries.keys() == sources.keys()
            and all(is_entry_of(entry, sources[path], there.get(path)) for path, entry in entries.items())
        )

    def _has_what_is_recorded(self, manifest: Manifest, there: ObjectInfo | None) -> bool:
        """Return whether the maxima that the manifest lists exist, and the requested ones are listed."""
        entry = next((file for file in manifest.files if file.path == AMAX_KEY), None)
        if entry is None:
            return not self._amax
        return there is not None and is_entry_of(entry, there, there)

    def _jobs(self, checkpoint: Checkpoint) -> list[PublishJob]:
        weights: list[list[Tensor]] = [[] for _ in checkpoint.shards]
        for tensor in checkpoint.tensors:
            if self._amax and is_recorded(tensor):
                weights[tensor.shard].append(tensor)
        shards = [
            self._job(info, chunk_bounds(header, info.size_bytes, self._chunk_bytes), is_shard=True, weights=of)
            for info, header, of in zip(checkpoint.shards, checkpoint.headers, weights, strict=True)
        ]
        ends = [fixed_bounds(info.size_bytes, self._chunk_bytes) for info in checkpoint.files]
        files = [self._job(info, end, is_shard=False) for info, end in zip(checkpoint.files, ends, strict=True)]
        return shards + files

    def _job(
        self, info: ObjectInfo, ends: Sequence[int], *, is_shard: bool, weights: Sequence[Tensor] = ()
    ) -> PublishJob:
        """Return the job of an object, with its checksums, which a listing may lack. Raises ObjectChanged."""
        now = with_retries(lambda: self._source.stat(info.key), self._policy)
        check_same(info, now, self._source.uri)
        return PublishJob(replace(now, etag=now.etag or info.etag), tuple(ends), is_shard, tuple(weights))

    def _resume(self, job: PublishJob, there: ObjectInfo | None) -> PublishJob:
        """Return the job with the journal's entry if source and destination have not changed since."""
        entry = self._journal.get(job.source.key)
        if entry is None or isinstance(entry, ManifestShard) != job.is_shard:
            return job
        if isinstance(entry, ManifestShard) and entry.chunk_ends != job.ends:
            return job
        if not is_entry_of(entry, job.source, there):
            return job
        self._entries[entry.path] = entry
        return replace(job, finished=entry)

    def _publish_object(self, job: PublishJob, reader: RangeReader) -> None:
        entry = self._publisher.publish(job, reader)
        self._entries[entry.path] = entry
        self._journal.add(entry)

    def _check_nothing_moved(self, jobs: Sequence[PublishJob]) -> None:
        """Check that every object is still the one that was read or written. Raises ObjectChanged."""
        keys = [job.source.key for job in jobs]
        now = Inventory(self._source, self._policy).find(keys)
        there = Inventory(self._dest, self._policy).find(keys) if self._copying else now
        for job in jobs:
            key = job.source.key
            check_same(job.source, now.get(key), self._source.uri)
            if self._copying:
                entry = self._entries[key]
                written = ObjectInfo(key, entry.size_bytes, entry.etag)
                check_same(written, there.get(key), self._dest.uri)

    def _write_manifest(self, checkpoint: Checkpoint) -> Manifest:
        if self._amax:
            names = [tensor.name for tensor in checkpoint.tensors if is_recorded(tensor)]
            recorded = write_amax(self._dest, names, self._publisher.amax, self._hash_name, self._policy)
            self._entries[AMAX_KEY] = recorded
        entries = [self._entries[key] for key in sorted(self._entries)]
        manifest = Manifest.build(
            hash_name=self._hash_name,
            chunk_bytes=self._chunk_bytes,
            shards=[entry for entry in entries if isinstance(entry, ManifestShard)],
            tensors=checkpoint.tensors,
            files=[entry for entry in entries if not isinstance(entry, ManifestShard)],
        )
        write_manifest(
            self._dest,
            manifest,
            self._policy,
            sign_key=self._sign_key,
            signed_name=self._signed_name,
            signed_before=self._signed_before,
        )
        return manifest

    def _report(
        self, manifest: Manifest, checkpoint: Checkpoint, started_s: float, *, resumed: int, unchanged: bool
    ) -> PublishReport:
        return PublishReport(
            uri=self._dest.uri,
            revision=manifest.revision,
            hash_name=manifest.hash,
            chunk_bytes=manifest.chunk_bytes,
            shards=len(manifest.shards),
            tensors=len(manifest.tensors),
            chunks=sum(len(shard.chunk_ends) for shard in manifest.shards),
            files=len(manifest.files),
            size_bytes=sum(shard.size_bytes for shard in manifest.shards),
            read_bytes=self._publisher.read_bytes,
            copied_bytes=self._publisher.copied_bytes,
            resumed=resumed,
            unchanged=unchanged,
            checks=dict(Counter(entry.checked_by for entry in (*manifest.shards, *manifest.files))),
            skipped=(*checkpoint.skipped, *self._left_out),
            elapsed_s=time.monotonic() - started_s,
            amax=any(file.path == AMAX_KEY for file in manifest.files),
            signed_by=None if self._sign_key is None else key_id(self._sign_key.public),
            signed_name=None if self._sign_key is None else self._signed_name,
        )
