"""The writer of a checkpoint: parts in any order, from any number of processes, then one commit.

    layouts --begin_save--> Begun: plain data, for the writer of every process
    CheckpointWriter.write(shard, start, data) --> part is whole --> hash its chunks --> send --> PartRecord
    CheckpointWriter.commit(records) --> files are made visible --> other files, index --> manifest, on a condition

Nothing refers to the files of a save before the manifest does, and their names are new. So the previous revision stays
as it is, whenever a process dies. An interrupted save leaves a journal (`storage.publishing.saves`). The next save with
the same layout continues: it hashes every part again and sends those that the store lacks. A file
that was complete cannot be changed, so other bytes of it are PartsDiffer: the save begins anew.

The interrupted save may still run. S3 notices a part that it replaces by the part's tag. Where the store keeps no tags,
uploads that are continued get new ids, and a part counts as written only if the store has its bytes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from cluster.errors import SaveConflict, SaveError, SaveRefused
from cluster.saving.shards import (
    ShardLayout,
    fingerprint,
    manifest_tensors,
    new_revision,
    renamed,
    revision_of_file,
    weight_index,
)
from cluster.saving.unchanged import StoredChunks
from storage.checkpoints.amax import AMAX_KEY
from storage.checkpoints.checkpoint_files import INDEX_KEY, OWN_KEYS, SINGLE_KEY, SUFFIX, map_threads
from storage.checkpoints.manifest import (
    MANIFEST_KEY,
    MAX_MANIFEST_BYTES,
    WRITTEN,
    Manifest,
    ManifestEntry,
    ManifestFile,
    ManifestShard,
    chunks_digest,
    is_safe_path,
)
from storage.checkpoints.model_index import DEFAULT_CHUNK_BYTES, fixed_bounds
from storage.checkpoints.replaced_files import BEFORE_KEY, ReplacedFiles, read_replaced
from storage.checksum import digest_of, new_hasher
from storage.errors import AccessDenied, ObjectChanged, ObjectNotFound, StoreError, UnsupportedStore
from storage.problems import Problems, quote
from storage.publishing.publish import PIECE_BYTES
from storage.publishing.saves import (
    COPY_PROBE_KEY,
    STATE_FILE,
    JournalShard,
    PartRecord,
    SaveJournal,
    StoredJournal,
    abort_uploads,
    published,
    put_if,
    read_journal,
    remove_save,
    saved_revision,
    writes_parts,
)
from storage.publishing.signing import SIGNATURE_KEY
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, check_key, ranges_of
from storage.stores.parts import MIN_PART_BYTES, CopiesParts, KeepsNoTags, KeepsTags, WritesParts
from storage.stores.requests import RetryPolicy, with_retries

_LOG = logging.getLogger("longshore.save")


class PartsDiffer(SaveError):
    """An interrupted save wrote other bytes than are to be saved now, where they cannot be replaced. Begin anew."""


class Begun(ManifestEntry):
    """A save that has begun: plain data that the writers of all processes share."""

    revision: str  # in the names of the files
    fingerprint: str
    hash_name: str
    chunk_bytes: int
    uploads: tuple[str, ...]  # the id per file; "" for a file that is complete
    known: tuple[PartRecord, ...]  # parts of an interrupted save that the store has
    manifest_etag: str | None  # of the revision that this save replaces
    replaces: str  # the revision of that manifest; "" without one
    replaces_save: str  # the save that wrote it, as the history of saves names it; "" if none did
    replaces_state: str  # number of its training state; "" without one
    journal_etag: str | None
    state: str = ""  # of the journal
    in_order: bool = False  # one process writes all parts of a file, in order (`storage.stores.parts`)
    continues: bool = False  # uploads of an interrupted save, which may have sent parts that its journal lacks


def begin_save(
    store: ObjectStore,
    layouts: Sequence[ShardLayout],
    *,
    hash_name: str = "blake3",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    policy: RetryPolicy | None = None,
    anew: bool = False,
    contents: str = "",
    state: str = "",
) -> tuple[tuple[ShardLayout, ...], Begun]:
    """Begin a save, or continue an interrupted one of the same layout and contents.

    What another interrupted save left is removed. Call it in one process.

    Args:
        store: Root of the checkpoint.
        layouts: The files, from `lay_out`.
        hash_name: Digest of the chunks.
        chunk_bytes: Size of chunks with which `lay_out` was called.
        policy: Retries of requests.
        anew: Continue nothing.
        contents: Names what the bytes are made from, such as a digest of versions of files. Parts that the store has
            of a save with the same contents need not be made again. Default: the bytes are not known before.
        state: What `claim_state` returned. "": the save has no training state.

    Returns:
        The layouts with the names of the files to write, and what the writers need.

    Raises:
        SaveConflict: Another save began at the same time.
        SaveRefused: The folder has a model.safetensors.
        StoreError: The store cannot be written.
        UnsupportedStore: The store cannot be written in parts.
    """
    policy = policy or RetryPolicy()
    writes = writes_parts(store)
    manifest, info = published(store, policy)
    _check_weights(store, policy)
    replaced = saved_revision(manifest, revision_of_file)
    used = [] if manifest is None else [shard.path for shard in manifest.shards]
    journal, etag = read_journal(store, policy)
    if state and (journal is None or journal.state != state):
        raise _conflict(store)
    mark = fingerprint(layouts, hash_name, contents)
    live = {revision_of_file(path) for path in used}
    can_continue = (
        journal is not None
        and not anew
        and (journal.fingerprint, len(journal.shards)) == (mark, len(layouts))
        and journal.revision not in live
    )
    stored = StoredJournal(store, policy, etag)
    if journal is not None and not can_continue:
        try:  # a save that still runs finds another journal, and ends before its manifest
            stored.write(journal.model_copy(update={"parts": ()}), now=True)
        except ObjectChanged as error:
            raise _conflict(store) from error
        remove_save(store, journal, used, policy)
    revision = journal.revision if journal is not None and can_continue else new_revision()
    layouts = renamed(layouts, revision)
    known: list[PartRecord] = []
    uploads = [""] * len(layouts)
    if journal is not None and can_continue:
        uploads = [shard.upload for shard in journal.shards]
        known = _sound_records(layouts, journal.parts)
    draft = _journal(layouts, revision, mark, uploads, known, state)
    try:
        stored.write(draft, now=True)  # before the first upload, so that whoever comes later knows whose it is

        def prepare(number: int) -> tuple[str, list[PartRecord]]:
            mine = [record for record in known if record.shard == number]
            return _open_shard(store, writes, layouts[number], uploads[number], mine, policy)

        opened = map_threads(prepare, range(len(layouts)))
        uploads = [upload for upload, _ in opened]
        known = [record for _, records in opened for record in records]
        stored.write(_journal(layouts, revision, mark, uploads, known, state), now=True)
    except ObjectChanged as error:
        raise _conflict(store) from error
    return layouts, Begun(
        revision=revision,
        fingerprint=mark,
        hash_name=hash_name,
        chunk_bytes=chunk_bytes,
        uploads=tuple(uploads),
        known=tuple(known),
        manifest_etag=None if info is None else info.etag,
        replaces="" if manifest is None else manifest.revision,
        replaces_save=replaced[0],
        replaces_state=replaced[1],
        journal_etag=stored.etag,
        state=state,
        in_order=writes.in_order,
        continues=can_continue,
    )


def claim_state(store: ObjectStore, number: str, policy: RetryPolicy | None = None) -> str:
    """Note in the journal which training state a save writes before it begins, and return that note.

    It is the state of an interrupted save, if no manifest names that, else the one of `number`. So what was written of
    it is used again. A save that still runs finds another journal, and ends before its manifest names the state.

    Raises:
        SaveConflict: Another save began at the same time.
        SaveRefused: The folder has a model.safetensors.
        StoreError: The store cannot be written.
    """
    policy = policy or RetryPolicy()
    manifest, info = published(store, policy)
    _check_weights(store, policy)
    journal, etag = read_journal(store, policy)
    if journal is None:
        journal = _journal((), new_revision(), fingerprint((), ""), (), (), "")
    before = journal.state.partition(".")[0]
    if before and (info is None or manifest is not None) and before != saved_revision(manifest, revision_of_file)[1]:
        number = before
    state = f"{number}.{new_revision()}"
    try:
        StoredJournal(store, policy, etag).write(journal.model_copy(update={"state": state}), now=True)
    except ObjectChanged as error:
        raise _conflict(store) from error
    return state


def _check_weights(store: ObjectStore, policy: RetryPolicy) -> None:
    if has_other_weights(store, policy):
        raise SaveRefused(
            f"the folder has a {SINGLE_KEY}, which transformers would load in the place of what is saved",
            hint="name a new folder, or remove that file",
            uri=store.uri,
        )


def has_other_weights(store: ObjectStore, policy: RetryPolicy) -> bool:
    """Return whether a folder has the file that transformers would load in the place of what is saved."""
    try:
        with_retries(lambda: store.stat(SINGLE_KEY), policy)
    except ObjectNotFound:
        return False
    return True


def _open_shard(
    store: ObjectStore,
    writes: WritesParts,
    layout: ShardLayout,
    upload: str,
    records: list[PartRecord],
    policy: RetryPolicy,
) -> tuple[str, list[PartRecord]]:
    """Return the upload of a file, and those of its recorded parts that the store has. "": the file is complete."""
    if upload:
        with contextlib.suppress(ObjectNotFound):  # it was completed or aborted
            if isinstance(writes, KeepsTags):
                parts = with_retries(lambda: writes.stored_parts(layout.file, upload), policy)
                kept = [
                    record
                    for record in records
                    if (part := parts.get(record.part + 1)) is not None
                    and (part.tag, part.size_bytes) == (record.tag, layout.parts[record.part].size_bytes)
                ]
                return upload, kept
            if isinstance(writes, KeepsNoTags):
                continued = with_retries(lambda: writes.take_over(layout.file, upload), policy)
                if continued is not None:
                    return continued, records
                with_retries(lambda: writes.abort_parts(layout.file, upload), policy)
                records = []
    if len(records) == len(layout.parts):
        try:
            info = with_retries(lambda: store.stat(layout.file), policy)
        except ObjectNotFound:
            pass
        else:
            tag = max(records, key=lambda record: record.part).tag if writes.in_order else ""
            if info.size_bytes == layout.size_bytes and tag in ("", info.etag):
                return "", records
    return with_retries(lambda: writes.begin_parts(layout.file), policy), []


def _sound_records(layouts: Sequence[ShardLayout], records: Iterable[PartRecord]) -> list[PartRecord]:
    """Return the records of parts that exist in the layout, one for each."""
    found = {
        (record.shard, record.part): record
        for record in records
        if record.shard < len(layouts)
        and record.part < len(layouts[record.shard].parts)
        and len(record.digests) == len(layouts[record.shard].chunks_of(layouts[record.shard].parts[record.part]))
    }
    return list(found.values())


def _journal(
    layouts: Sequence[ShardLayout],
    revision: str,
    mark: str,
    uploads: Sequence[str],
    parts: Iterable[PartRecord],
    state: str,
) -> SaveJournal:
    shards = tuple(
        JournalShard(file=layout.file, upload=upload) for layout, upload in zip(layouts, uploads, strict=True)
    )
    return SaveJournal(
        format="longshore.save",
        version=1,
        revision=revision,
        fingerprint=mark,
        shards=shards,
        parts=tuple(parts),
        state=state,
    )


def stored_chunks(
    store: ObjectStore, since: str = "latest", policy: RetryPolicy | None = None, *, probe: bool = True
) -> StoredChunks | None:
    """Return the chunks of the published revision, for `CheckpointWriter`; None if the store cannot copy them.

    None also if `since` is neither "latest" nor that revision.

    One copy is tried, of an upload that is aborted: a server that does not know the request would damage a real one.
    With `probe=False` it is not: another process of the save does that.
    """
    policy = policy or RetryPolicy()
    manifest, _ = published(store, policy)
    if manifest is None or since not in ("latest", manifest.revision) or not isinstance(store, CopiesParts):
        return None
    if not probe:
        return StoredChunks(manifest)
    largest = max(manifest.shards, key=lambda shard: shard.size_bytes)
    writes = writes_parts(store)
    try:
        upload = with_retries(lambda: writes.begin_parts(COPY_PROBE_KEY), policy)
        try:
            place = ByteRange(0, min(largest.size_bytes, MIN_PART_BYTES))
            store.copy_part(COPY_PROBE_KEY, upload, 1, 0, largest.path, place, largest.etag)
        finally:
            writes.abort_parts(COPY_PROBE_KEY, upload)
    except StoreError:
        return None
    return StoredChunks(manifest)


@dataclass(slots=True)
class _Assembly:
    """A part that is put together from ranges."""

    data: bytearray
    missing_bytes: int


class CheckpointWriter:
    """The writer of one process. Thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        layouts: Sequence[ShardLayout],
        begun: Begun,
        *,
        policy: RetryPolicy | None = None,
        stored: StoredChunks | None = None,
    ) -> None:
        """Write the files of `begin_save`, as it returned them. Chunks that are `stored` are copied by the store."""
        self._store = store
        self._writes = writes_parts(store)
        self._layouts = tuple(layouts)
        self._begun = begun
        self._policy = policy or RetryPolicy()
        self._known = {(record.shard, record.part): record for record in begun.known}
        self._lock = threading.Lock()
        self._assemblies: dict[tuple[int, int], _Assembly] = {}
        self._records: dict[tuple[int, int], PartRecord] = {}
        self._unseen: list[PartRecord] = []
        self._journal = StoredJournal(store, self._policy, begun.journal_etag)
        self.written_bytes = 0  # sent to the store
        self.reused_bytes = 0  # of parts that an interrupted save had written
        self.copied_bytes = 0  # of parts that the store copied from the published revision
        self._stored = stored if stored is not None and stored.hash_name == begun.hash_name else None

    @property
    def pending_bytes(self) -> int:
        """Return the bytes of memory that incomplete parts take now."""
        with self._lock:
            return sum(len(one.data) for one in self._assemblies.values())

    def write(self, shard: int, start: int, data: memoryview) -> None:
        """Write a range of a file. A part is hashed and sent by the call that makes it whole.

        Ranges come in any order, and never overlap. The header is not written: the writer has it. A range that is
        exactly one part is sent without a copy; it then contains the header if it begins at byte 0.

        Args:
            shard: Number of the file in the layouts.
            start: First byte, counted from the start of the file.
            data: The bytes.

        Raises:
            SaveError: The range is outside the file, or bytes were written twice.
            StoreError: The store does not take a part.
        """
        data = data.cast("B") if data.ndim != 1 or data.format != "B" else data
        layout = self._layouts[shard]
        whole = layout.part_starting_at(start)
        if whole is not None and layout.parts[whole].size_bytes == len(data):
            self._finish(shard, whole, data)
            return
        end = start + len(data)
        if not len(layout.header) <= start <= end <= layout.size_bytes:
            raise SaveError("bytes outside the tensors of a file", file=layout.file, start=start, end=end)
        while start < end:
            number = layout.part_holding(start)
            part = layout.parts[number]
            count = min(end, part.end) - start
            ready = self._add(shard, number, start - part.start, data[:count])
            if ready is not None:
                self._finish(shard, number, memoryview(ready))
            start, data = start + count, data[count:]

    def write_part(self, shard: int, number: int, data: memoryview) -> PartRecord:
        """Hash and send a whole part, the header included if it begins the file. Raises as `write` does."""
        return self._finish(shard, number, data)

    def _add(self, shard: int, number: int, place: int, data: memoryview) -> bytearray | None:
        layout = self._layouts[shard]
        part = layout.parts[number]
        with self._lock:
            one = self._assemblies.get((shard, number))
            if one is None:
                if (shard, number) in self._records:
                    raise SaveError("bytes of a part were written twice", file=layout.file, part=number)
                one = _Assembly(bytearray(part.size_bytes), part.size_bytes)
                self._assemblies[shard, number] = one
                if number == 0:
                    one.data[: len(layout.header)] = layout.header
                    one.missing_bytes -= len(layout.header)
        one.data[place : place + len(data)] = data  # ranges do not overlap, so no lock
        with self._lock:
            one.missing_bytes -= len(data)
            if one.missing_bytes > 0:
                return None
            del self._assemblies[shard, number]
            return one.data

    def _finish(self, shard: int, number: int, data: memoryview) -> PartRecord:
        """Hash the chunks of a whole part, and send it unless the store has it. Return its record."""
        layout = self._layouts[shard]
        part = layout.parts[number]
        digests = tuple(
            digest_of(self._begun.hash_name, data[chunk.start - part.start : chunk.end - part.start]).hex()
            for chunk in layout.chunks_of(part)
        )
        known, upload = self._known.get((shard, number)), self._begun.uploads[shard]
        copied = False
        if known is not None and known.digests == digests and self._has(layout, upload, number, data):
            record = known
        elif not upload:
            raise PartsDiffer(
                "a file of the interrupted save is complete and has other bytes", file=layout.file, part=number
            )
        else:
            try:
                tag = self._copy(layout, upload, number, digests)
                copied = tag is not None
                if tag is None:
                    tag = with_retries(
                        lambda: self._writes.put_part(layout.file, upload, number + 1, part.start, data), self._policy
                    )
                    if self._begun.in_order and number + 1 == len(layout.parts):
                        tag = self._complete(shard).etag or ""
            except StoreError as error:
                if not self._begun.continues or error.details.get("status") != 501:
                    raise
                raise PartsDiffer("the store cannot replace a part of the interrupted save", part=number) from error
            record = PartRecord(shard=shard, part=number, tag=tag, digests=digests)
        with self._lock:
            if (shard, number) in self._records:
                raise SaveError("a part was written twice", file=layout.file, part=number)
            self._records[shard, number] = record
            self._unseen.append(record)
            if record is known:
                self.reused_bytes += len(data)
            elif copied:
                self.copied_bytes += len(data)
            else:
                self.written_bytes += len(data)
        return record

    def _has(self, layout: ShardLayout, upload: str, number: int, data: memoryview) -> bool:
        """Return whether the store has a part of the interrupted save as it was recorded."""
        if not isinstance(self._writes, KeepsNoTags):
            return True  # its tag is the one of the record
        writes, start = self._writes, layout.parts[number].start
        return with_retries(lambda: writes.has_part(layout.file, upload, start, data), self._policy)

    def _copy(self, layout: ShardLayout, upload: str, number: int, digests: Sequence[str]) -> str | None:
        """Let the store copy a part that the published revision has, and return its tag; None: it must be sent."""
        part = layout.parts[number]
        found = None if self._stored is None else self._stored.find(digests, part.size_bytes)
        if found is None or not isinstance(self._store, CopiesParts):
            return None
        try:
            return self._store.copy_part(
                layout.file, upload, number + 1, part.start, found.path, found.place, found.etag
            )  # fmt: skip
        except StoreError as error:  # sending the part always works
            if isinstance(error, UnsupportedStore | AccessDenied):
                self._stored = None
            return None

    def take_records(self) -> list[PartRecord]:
        """Return the records of parts that were finished since the last call, for the process that commits."""
        with self._lock:
            records, self._unseen = self._unseen, []
            return records

    def note(self, records: Iterable[PartRecord], *, now: bool = False) -> None:
        """Add records of other processes, and write the journal if it was not written just now.

        Call it in the process that commits only. Raises SaveConflict if another save took over.
        """
        with self._lock:
            self._records.update({(record.shard, record.part): record for record in records})
            if not now and not self._journal.is_due():
                return  # a journal of a large model takes long to build
            # What an interrupted save had written stays in the journal until this save has written it itself.
            parts = {**self._known, **self._records}
        begun = self._begun
        journal = _journal(self._layouts, begun.revision, begun.fingerprint, begun.uploads, parts.values(), begun.state)
        try:
            self._journal.write(journal, now=now)
        except ObjectChanged as error:
            raise _conflict(self._store) from error

    def abandon(self) -> None:
        """Remove the parts that were sent, and the journal. Nothing of this save can be continued.

        If another save took over, it has done that, and what is there is its own.
        """
        try:
            self._journal.check()
        except ObjectChanged:
            return
        begun = self._begun
        remove_save(
            self._store,
            _journal(self._layouts, begun.revision, begun.fingerprint, begun.uploads, (), begun.state),
            (),
            self._policy,
        )
        self._journal.remove()

    def commit(
        self,
        records: Iterable[PartRecord] = (),
        *,
        extra_files: Mapping[str, bytes] | None = None,
        on_step: Callable[[str], object] = lambda step: None,
    ) -> Manifest:
        """Make the new revision visible, when every part is written. Call it in one process, once.

        Args:
            records: Records of parts that other processes wrote and that were not noted yet.
            extra_files: Contents of further files of the model by name: config.json, tokenizer files.
            on_step: Called before each step with its name.

        Returns:
            The manifest as it was written.

        Raises:
            SaveError: Parts are missing; the message names some.
            SaveConflict: Another revision was published since `begin_save`.
            StoreError: The store refuses a write.
        """
        for number, layout in enumerate(self._layouts):
            if len(layout.header) == layout.size_bytes and (number, 0) not in self._records:
                self._finish(number, 0, memoryview(layout.header))  # a file whose tensors have no bytes
        on_step("journal")
        self.note(records, now=True)
        self._check_complete()
        on_step("shards")
        infos = map_threads(self._complete, range(len(self._layouts)))
        index = weight_index(self._layouts)
        on_step("files")
        same = self._keep_replaced({**(extra_files or {}), INDEX_KEY: index})
        files = [self._put_file(name, data, same) for name, data in sorted((extra_files or {}).items())]
        on_step("index")
        files.append(self._put_file(INDEX_KEY, index, same))
        manifest = Manifest.build(
            hash_name=self._begun.hash_name,
            chunk_bytes=self._begun.chunk_bytes,
            shards=[self._entry(number, info) for number, info in enumerate(infos)],
            tensors=manifest_tensors(self._layouts),
            files=sorted(files, key=lambda file: file.path),
        )
        data = manifest.to_json()
        if len(data) > MAX_MANIFEST_BYTES:
            raise SaveError(f"the manifest would have {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
        on_step("manifest")
        self._check_journal()
        try:
            put_if(self._store, MANIFEST_KEY, data, self._begun.manifest_etag, self._policy)
        except ObjectChanged as error:
            raise _conflict(self._store) from error
        on_step("cleanup")
        self._clean_up()
        on_step("done")
        return manifest

    def _clean_up(self) -> None:
        """Remove what belongs to the revision before, and to the save. The checkpoint is published, so never raises."""
        steps: list[Callable[[], object]] = [
            functools.partial(with_retries, functools.partial(self._store.delete, key), self._policy)
            for key in (SIGNATURE_KEY, AMAX_KEY, BEFORE_KEY)
        ]
        steps += [  # beginnings whose answers were lost
            functools.partial(abort_uploads, self._store, prefix, self._policy)
            for prefix in (f"model-{self._begun.revision}-", COPY_PROBE_KEY)
        ]
        steps.append(self._journal.remove)
        errors = []
        for step in steps:
            try:
                step()
            except StoreError as error:
                errors.append(error)
        if errors:
            _LOG.warning(
                "the new revision is published, but %d of %d things could not be removed that it does not need (an old "
                "signature, open uploads, the journal): allow the deletion of objects, then `longshore saves --clean "
                "%s`: %s",
                len(errors),
                len(steps),
                self._store.uri,
                errors[0],
            )

    def _check_complete(self) -> None:
        missing = Problems(
            f"part {number} of {layout.file}"
            for shard, layout in enumerate(self._layouts)
            for number in range(len(layout.parts))
            if (shard, number) not in self._records
        )
        if missing:
            raise SaveError(f"parts were not written: {missing}", uri=self._store.uri)

    def _complete(self, shard: int) -> ObjectInfo:
        layout, upload = self._layouts[shard], self._begun.uploads[shard]
        if not upload:
            return with_retries(lambda: self._store.stat(layout.file), self._policy)
        records = [self._records.get((shard, number)) for number in range(len(layout.parts))]
        parts = [(number, record.tag if record else "") for number, record in enumerate(records, 1)]
        return with_retries(
            lambda: self._writes.complete_parts(layout.file, upload, parts, layout.size_bytes), self._policy
        )

    def _entry(self, shard: int, info: ObjectInfo) -> ManifestShard:
        layout = self._layouts[shard]
        digests = tuple(
            digest for number in range(len(layout.parts)) for digest in self._records[shard, number].digests
        )
        return ManifestShard(
            path=layout.file,
            size_bytes=layout.size_bytes,
            etag=info.etag,
            source_etag=info.etag,
            checked_by=WRITTEN,
            digest=chunks_digest(self._begun.hash_name, digests),
            chunk_ends=layout.chunk_ends,
            chunk_digests=digests,
        )

    def _check_journal(self) -> None:
        """Raise SaveConflict if another save took over: it may have removed the files of this one."""
        try:
            self._journal.check()
        except ObjectChanged as error:
            raise _conflict(self._store) from error

    def _check_conflict(self) -> None:
        """Raise SaveConflict if another save took over, or another revision was published: its files are not ours."""
        self._check_journal()
        try:
            found = with_retries(lambda: self._store.stat(MANIFEST_KEY), self._policy).etag
        except ObjectNotFound:
            found = None
        if found != self._begun.manifest_etag:
            raise _conflict(self._store)

    def _keep_replaced(self, files: Mapping[str, bytes]) -> dict[str, ObjectInfo]:
        """Keep the bytes of files that are about to be replaced. Return those that the store has already."""
        self._check_conflict()
        found = read_replaced(self._store, self._policy)
        if found is None or found.revision != self._begun.replaces:
            found = ReplacedFiles(self._begun.replaces)
        kept, same = found, {}
        for name, data in files.items():
            info = self._same_stored(name, len(data), digest_of(self._begun.hash_name, data).hex())
            if info is None:
                kept = kept.and_also(self._store, name, data, self._policy)
            else:
                same[name] = info
        if kept != found:
            encoded = kept.encode()
            with_retries(lambda: self._store.put(BEFORE_KEY, encoded), self._policy)
        return same

    def _put_file(self, name: str, data: bytes, same: Mapping[str, ObjectInfo]) -> ManifestFile:
        """Write a file unless the store has the same bytes, which keeps the revision before as it is."""
        digest = digest_of(self._begun.hash_name, data).hex()
        info = same.get(name)
        if info is None:
            self._check_conflict()
            info = with_retries(lambda: self._store.put(name, data), self._policy)
        return ManifestFile(
            path=name, size_bytes=len(data), etag=info.etag, source_etag=info.etag, checked_by=WRITTEN, digest=digest
        )

    def _same_stored(self, name: str, size_bytes: int, digest: str) -> ObjectInfo | None:
        try:
            info = with_retries(lambda: self._store.stat(name), self._policy)
        except ObjectNotFound:
            return None
        if info.size_bytes != size_bytes:
            return None
        hasher = new_hasher(self._begun.hash_name)
        buffer = memoryview(bytearray(min(PIECE_BYTES, size_bytes)))
        for place in ranges_of(fixed_bounds(size_bytes, PIECE_BYTES)):
            view = buffer[: place.size_bytes]
            with_retries(lambda place=place, view=view: self._store.read_into(name, place, view), self._policy)  # type: ignore[misc]
            hasher.update(view)
        return info if hasher.hexdigest() == digest else None


def check_extra_files(names: Collection[str]) -> Problems:
    """Return every reason why files of these names cannot be stored beside the weights."""
    problems, all_names = Problems(), {*names, *OWN_KEYS, INDEX_KEY}
    for name in names:
        try:
            unsafe = not is_safe_path(check_key(name))
        except StoreError:
            unsafe = True
        if unsafe:
            problems.add(f"{quote(name)} is no relative path of a file")
        elif name in OWN_KEYS or name == INDEX_KEY or name.endswith(SUFFIX) or STATE_FILE.fullmatch(name):
            problems.add(f"{quote(name)} is a name that the save uses itself")
        elif above := next((each for each in map(str, PurePosixPath(name).parents) if each in all_names), ""):
            problems.add(f"{quote(name)} is in a folder whose name is that of a file: {quote(above)}")
    return problems


def _conflict(store: ObjectStore, **details: Any) -> SaveConflict:
    return SaveConflict(
        "another save or publish wrote to this URI while this save ran",
        hint="let one job save to a URI at a time, and save again",
        uri=store.uri,
        **details,
    )
