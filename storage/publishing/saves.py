"""The journal of a save, and what interrupted saves leave behind: open uploads and files of no revision.

    longshore.save.json     exists from the first part of a save until its manifest is written
      revision, fingerprint     the save, and the layout of its files: only a save of the same layout can continue it
      shards                    per file: the id of its upload, and the parts that were written, with their digests
      state                     the number of the training state that it saves first, and a random mark of the save

A repeated save hashes its own bytes again. A part whose digests are those of the journal, and which the store still
has, is not sent again. So the journal is a hint that can save work, and never decides what a checkpoint contains. Only
a conversion does not read such parts again: its fingerprint also covers the versions of the source's files.

Each version of the journal is written on the condition that the last one is still there. So of two saves to one URI at
one time the one that began later goes on, and the other ends.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from storage.checkpoints.checkpoint import read_manifest
from storage.checkpoints.checkpoint_files import SAVE_JOURNAL_KEY, read_whole
from storage.checkpoints.manifest import MANIFEST_KEY, Hex, Manifest, ManifestEntry, Path
from storage.checkpoints.replaced_files import BEFORE_KEY, put_back
from storage.errors import (
    AccessDenied,
    InvalidManifest,
    ObjectChanged,
    ObjectNotFound,
    SignatureError,
    StoreError,
    StoreUnavailable,
    UnsupportedStore,
)
from storage.problems import json_values
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes
from storage.stores.parts import MAX_PARTS, WritesParts
from storage.stores.requests import RetryPolicy, with_retries

MAX_JOURNAL_BYTES = 64 << 20
MAX_JSON_VALUES = 3_000_000
COPY_PROBE_KEY = "longshore.save.probe"  # of an upload that tries a copy, and never becomes an object
MIN_PAUSE_S = 1.0  # between two versions of the journal
PAUSE_PER_WRITE = 10.0  # times the duration of the last one
STATE_FILE = re.compile(r"training/([0-9a-f]{16})(?:\.json|/.*)", re.DOTALL)  # of a training state, by its number

Text = Annotated[str, StringConstraints(max_length=2048)]


class PartRecord(ManifestEntry):
    """A part that was written: plain data, which processes exchange."""

    shard: Annotated[int, Field(ge=0, lt=100_000)]
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]  # from 0
    tag: Text  # of the store; "" if it keeps none
    digests: tuple[Hex, ...]  # of its chunks


class JournalShard(ManifestEntry):
    """A file of the save: its name and the id of its upload."""

    file: Path
    upload: Text


class SaveJournal(ManifestEntry):
    """The JSON of a stored journal."""

    format: Literal["longshore.save"]
    version: Literal[1]
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{1,64}$")]  # in the names of the files
    fingerprint: Hex
    shards: tuple[JournalShard, ...]
    parts: tuple[PartRecord, ...]
    state: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16}\.[0-9a-f]{16})?$")] = ""


class StoredJournal:
    """The journal of one save in its store. Thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        policy: RetryPolicy,
        etag: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over the stored journal of that ETag; None: there is none yet."""
        self._store = store
        self._policy = policy
        self._etag = etag
        self._clock = clock
        self._next_s = 0.0
        self._lock = threading.Lock()

    @property
    def etag(self) -> str | None:
        """Return the version that was written last."""
        return self._etag

    def is_due(self) -> bool:
        """Return whether `write` would write a version now, without `now`."""
        return self._clock() >= self._next_s

    def write(self, journal: SaveJournal, *, now: bool = False) -> bool:
        """Write a version of the journal, unless the last one was written just now. Return whether it was.

        Raises ObjectChanged if another save has replaced or removed it.
        """
        with self._lock:
            began_s = self._clock()
            if began_s < self._next_s and not now:
                return False
            data = journal.model_dump_json().encode()
            if len(data) > MAX_JOURNAL_BYTES:
                return False  # nobody would read it; the save itself does not need it
            self._etag = put_if(self._store, SAVE_JOURNAL_KEY, data, self._etag, self._policy).etag
            ended_s = self._clock()
            self._next_s = ended_s + max(MIN_PAUSE_S, PAUSE_PER_WRITE * (ended_s - began_s))
            return True

    def check(self) -> None:
        """Raise ObjectChanged if another save has replaced or removed the version that was written last."""
        try:
            found = with_retries(lambda: self._store.stat(SAVE_JOURNAL_KEY), self._policy).etag
        except ObjectNotFound:
            found = None
        if found != self._etag:
            raise ObjectChanged("another save took over", uri=self._store.uri, key=SAVE_JOURNAL_KEY)

    def remove(self) -> None:
        """Delete the journal, when the manifest is written."""
        with_retries(lambda: self._store.delete(SAVE_JOURNAL_KEY), self._policy)


def writes_parts(store: ObjectStore) -> WritesParts:
    """Return the store as one that several processes can write an object in. Raises UnsupportedStore."""
    if not isinstance(store, WritesParts):
        raise UnsupportedStore(
            "nothing can be saved to this kind of store",
            hint="save to an object store, or to a folder that all ranks share",
            uri=store.uri,
        )
    return store


def put_if(store: ObjectStore, key: str, data: bytes, etag: str | None, policy: RetryPolicy) -> ObjectInfo:
    """Write on a condition, as `WritesParts.put_if`, with retries. A write whose answer was lost counts as done.

    Raises ObjectChanged, StoreError.
    """

    def is_written() -> ObjectInfo | None:
        try:
            info = store.stat(key)
            same = info.size_bytes == len(data) and read_bytes(store, key, ByteRange(0, len(data))) == data
        except (ObjectNotFound, AccessDenied):
            return None
        return info if same else None

    def write() -> ObjectInfo:
        try:
            return writes_parts(store).put_if(key, data, etag)
        except StoreUnavailable:
            with contextlib.suppress(StoreError):
                if (info := is_written()) is not None:
                    return info
            raise
        except ObjectChanged:  # perhaps by an earlier try of this write: if that cannot be read now, try again
            if (info := is_written()) is not None:
                return info
            raise

    return with_retries(write, policy)


def read_journal(store: ObjectStore, policy: RetryPolicy) -> tuple[SaveJournal | None, str | None]:
    """Return the stored journal and its ETag. The journal is None if there is none or it cannot be used."""
    try:
        info = with_retries(lambda: store.stat(SAVE_JOURNAL_KEY), policy)
    except ObjectNotFound:
        return None, None
    if info.size_bytes > MAX_JOURNAL_BYTES:
        return None, info.etag
    return parse_journal(read_whole(store, info, policy)), info.etag


def parse_journal(data: bytes) -> SaveJournal | None:
    """Return the journal in those bytes; None if they are not one, or too large."""
    if len(data) > MAX_JOURNAL_BYTES or json_values(data) > MAX_JSON_VALUES:
        return None
    try:
        journal = SaveJournal.model_validate_json(data)
    except ValidationError:
        return None
    mark = f"model-{journal.revision}-"
    return journal if all(shard.file.startswith(mark) and "/" not in shard.file for shard in journal.shards) else None


def published(store: ObjectStore, policy: RetryPolicy) -> tuple[Manifest | None, ObjectInfo | None]:
    """Return the published manifest, as far as it can be read, and the facts about its object."""
    try:
        info = with_retries(lambda: store.stat(MANIFEST_KEY), policy)
    except ObjectNotFound:
        return None, None
    try:
        return read_manifest(store, info, policy), info
    except (InvalidManifest, SignatureError):
        return None, info


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that a save left behind and no published revision uses."""

    key: str
    kind: Literal["upload", "file", "journal", "replaced"]  # "replaced": the old bytes of small files
    revision: str  # the save's, as in the file name, or the number of a training state; "" if it is not known
    size_bytes: int
    upload: str = ""  # the id, for an upload


@dataclass(frozen=True, slots=True)
class SavesReport:
    """The saves at one URI."""

    uri: str
    published: tuple[str, ...]  # revisions in the names of the published files; empty if no save published here
    manifest_revision: str  # of the manifest; "" without one
    leftovers: tuple[Leftover, ...]
    cleaned: bool  # whether they were removed
    problem: str = ""  # why files that nobody may use are neither listed nor removed; "" if they are

    @property
    def leftover_bytes(self) -> int:
        """Return the size of the files that no published revision uses. Sizes of S3's uploads are not known."""
        return sum(item.size_bytes for item in self.leftovers)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {**asdict(self), "leftover_bytes": self.leftover_bytes}


def list_saves(
    store: ObjectStore,
    revision_of: Callable[[str], str | None],
    policy: RetryPolicy,
    kept: Collection[tuple[str, str]] = (),
) -> SavesReport:
    """Return what saves have left at the root of the store, and in the folders of training states.

    Args:
        store: Root of the checkpoint.
        revision_of: Returns the revision in a file's name, or None for a file that no save wrote.
        policy: Retries of requests.
        kept: Revisions that were published before, each with the number of its training state. Their files are no
            leftovers.

    Raises:
        UnsupportedStore: The store cannot be written in parts, so no save wrote there.
        StoreError: The store cannot be read.
    """
    writes = writes_parts(store)
    manifest, info = published(store, policy)
    used = set() if manifest is None else {shard.path for shard in manifest.shards}
    journal, etag = read_journal(store, policy)
    found: list[Leftover] = []
    problem = ""
    if etag is not None or journal is not None:  # some stores name no versions
        found.append(Leftover(SAVE_JOURNAL_KEY, "journal", journal.revision if journal else "", 0))
    for prefix in ("model-", "training/", COPY_PROBE_KEY):
        for upload in with_retries(lambda prefix=prefix: list(writes.open_uploads(prefix)), policy):  # type: ignore[misc]
            state = STATE_FILE.fullmatch(upload.key)
            revision = revision_of(upload.key) if state is None else state[1]
            if revision is None and upload.key == COPY_PROBE_KEY:
                revision = ""
            if revision is not None:
                found.append(Leftover(upload.key, "upload", revision, upload.size_bytes, upload.upload))
    if manifest is not None or info is None:
        with contextlib.suppress(ObjectNotFound):
            replaced = with_retries(lambda: store.stat(BEFORE_KEY), policy)
            found.append(Leftover(BEFORE_KEY, "replaced", "", replaced.size_bytes))
        found += unused_files(store, manifest, revision_of, policy, kept)
    else:
        problem = (
            f"{MANIFEST_KEY} cannot be read, so nobody knows which files it uses: all files stay, and so does "
            f"{BEFORE_KEY}; save again or write the manifest anew, then clean again"
        )
    revisions = sorted({revision for path in used if (revision := revision_of(path)) is not None})
    found.sort(key=lambda item: (item.revision, item.kind, item.key, item.upload))
    named = "" if manifest is None else manifest.revision
    return SavesReport(store.uri, tuple(revisions), named, tuple(found), cleaned=False, problem=problem)


def saved_revision(manifest: Manifest | None, revision_of: Callable[[str], str | None]) -> tuple[str, str]:
    """Return the save and the number of the training state that a manifest names, each "" without one."""
    if manifest is None:
        return "", ""
    saves = (revision_of(shard.path) for shard in manifest.shards)
    states = (STATE_FILE.fullmatch(file.path) for file in manifest.files)
    return next((one for one in saves if one), ""), next((found[1] for found in states if found), "")


def unused_files(
    store: ObjectStore,
    manifest: Manifest | None,
    revision_of: Callable[[str], str | None],
    policy: RetryPolicy,
    kept: Collection[tuple[str, str]],
) -> Iterator[Leftover]:
    """Yield the files of saves, and those of training states, that neither the manifest nor `kept` names.

    Arguments are those of `list_saves`. Raises StoreError.
    """
    named = set() if manifest is None else {entry.path for entry in (*manifest.shards, *manifest.files)}
    revisions = {revision for revision, _ in kept}
    states = {state for _, state in kept} | {found[1] for path in named if (found := STATE_FILE.fullmatch(path))}
    for prefix in ("model-", "training/"):
        try:
            stored = with_retries(lambda prefix=prefix: list(store.list(prefix)), policy)  # type: ignore[misc]
        except ObjectNotFound:  # the folder does not exist
            return
        for item in stored:
            state = STATE_FILE.fullmatch(item.key)
            revision = revision_of(item.key) if state is None else state[1]
            if revision is None or item.key in named or revision in (revisions if state is None else states):
                continue
            is_journal = state is not None and item.key.endswith(f"/{SAVE_JOURNAL_KEY}")
            yield Leftover(item.key, "journal" if is_journal else "file", revision, item.size_bytes)


def remove_leftovers(store: ObjectStore, leftovers: Iterable[Leftover], policy: RetryPolicy) -> None:
    """Put small files back as they were before, abort those uploads and delete those files. Raises StoreError."""
    writes = writes_parts(store)
    # The small files first: as long as an index names files, they are there. Then manifests, for the same reason.
    for item in sorted(leftovers, key=lambda item: (item.kind != "replaced", not item.key.endswith(MANIFEST_KEY))):
        if item.kind == "upload":
            with_retries(lambda item=item: writes.abort_parts(item.key, item.upload), policy)  # type: ignore[misc]
        elif item.kind == "replaced":
            manifest, info = published(store, policy)
            if manifest is not None or info is None:
                put_back(store, "" if manifest is None else manifest.revision, policy)
        else:
            with_retries(lambda item=item: store.delete(item.key), policy)  # type: ignore[misc]


def abort_uploads(store: ObjectStore, prefix: str, policy: RetryPolicy) -> None:
    """Abort the open uploads whose keys begin with `prefix`, which nobody continues. Raises StoreError."""
    writes = writes_parts(store)
    for item in with_retries(lambda: list(writes.open_uploads(prefix)), policy):
        with_retries(lambda item=item: writes.abort_parts(item.key, item.upload), policy)  # type: ignore[misc]


def remove_save(store: ObjectStore, journal: SaveJournal, used: Sequence[str], policy: RetryPolicy) -> int:
    """Undo an interrupted save: its small files, uploads and files. Return how many uploads and files there were.

    Files in `used` stay, which are those that the manifest lists.
    """
    writes = writes_parts(store)
    mark = f"model-{journal.revision}-"
    uploads = {(item.key, item.upload) for item in with_retries(lambda: list(writes.open_uploads(mark)), policy)}
    uploads |= {(shard.file, shard.upload) for shard in journal.shards if shard.upload}
    gone = [Leftover(key, "upload", journal.revision, 0, upload) for key, upload in sorted(uploads)]
    gone += [
        Leftover(item.key, "file", journal.revision, item.size_bytes)
        for item in with_retries(lambda: list(store.list(mark)), policy)
        if item.key not in used
    ]
    remove_leftovers(store, [Leftover(BEFORE_KEY, "replaced", "", 0), *gone], policy)
    return len(gone)
