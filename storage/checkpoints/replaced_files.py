"""The small files that a save replaces, as they were before: they make the revision before readable until the end.

    longshore.save.before     exists while a save replaces small files, and after a save that was interrupted there
      __metadata__            the revision that the contents belong to, and digests of what the save wrote instead
      config.json             the old bytes, as a U8 tensor; a file that is new has none
      model.safetensors.index.json

Names of shards contain a revision. Names of other files do not, so a save replaces them just before its manifest. A
reader that finds other bytes than the manifest lists takes these. The digest of the manifest decides, as always.

A save that nobody will continue is undone: `put_back` writes the old bytes again, where the save's are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from storage.checkpoints.manifest import Path
from storage.checkpoints.model_index import OtherFile
from storage.checkpoints.safetensors_header import MAX_HEADER_BYTES, METADATA_KEY, Header, encode_header, read_head
from storage.checksum import digest_of
from storage.errors import AccessDenied, InvalidHeader, ObjectChanged, ObjectNotFound
from storage.stores.object_store import ByteRange, ObjectInfo, ObjectStore, read_bytes
from storage.stores.requests import RetryPolicy, with_retries

BEFORE_KEY = "longshore.save.before"
MAX_FILE_BYTES = 64 << 20  # of a file whose old bytes are kept; engines get no larger ones (`cluster.small_files`)
MAX_BYTES = 256 << 20  # of all old bytes
PIECE_BYTES = 8 << 20  # read at a time
_DIGESTS = TypeAdapter(dict[Path, tuple[str, ...]])


@dataclass(frozen=True, slots=True)
class ReplacedFiles:
    """The small files that a save replaces. A path without contents did not exist before."""

    revision: str  # of the manifest that lists the contents; "" without one
    contents: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, tuple[str, ...]] = field(default_factory=dict)  # path -> digests of what saves put there

    def and_also(self, store: ObjectStore, path: str, data: bytes, policy: RetryPolicy) -> ReplacedFiles:
        """Return the same, and the stored bytes of a file that `data` is about to replace. Raises StoreError."""
        contents = {name: kept for name, kept in self.contents.items() if name != path}
        written = {name: digests for name, digests in self.written.items() if name != path}
        earlier: tuple[str, ...] = ()
        try:
            before, is_saved = _stored_bytes(store, path, self.written.get(path, ()), policy)
        except ObjectNotFound:
            pass  # it is new
        else:
            if is_saved:
                earlier, before = self.written[path], self.contents.get(path)
            elif before is None or len(before) > MAX_BYTES - sum(map(len, contents.values())) or path == METADATA_KEY:
                return ReplacedFiles(self.revision, contents, written)
            if before is not None:
                contents[path] = before
        return ReplacedFiles(self.revision, contents, {**written, path: (*earlier, _digest(data))})

    def encode(self) -> bytes:
        """Return the bytes to store."""
        kept = sorted(self.contents.items())
        header = encode_header(
            [(path, "U8", (len(data),)) for path, data in kept],
            {"revision": self.revision, "written": json.dumps(self.written, sort_keys=True)},
        )
        return b"".join([header, *(data for _, data in kept)])


def read_replaced(store: ObjectStore, policy: RetryPolicy) -> ReplacedFiles | None:
    """Return what an interrupted save replaced; None if there is nothing, or it cannot be read as such.

    Raises StoreError.
    """
    try:
        info, header = with_retries(lambda: _read_header(store), policy)
        data = with_retries(
            lambda: read_bytes(store, BEFORE_KEY, ByteRange(0, info.size_bytes), etag=info.etag), policy
        )
        written = _DIGESTS.validate_json(header.metadata.get("written", ""))
    except (ObjectNotFound, InvalidHeader, ValidationError):
        return None
    contents = {one.name: data[one.start : one.end] for one in header.tensors if one.name in written}
    return ReplacedFiles(header.metadata.get("revision", ""), contents, written)


def published_bytes(store: ObjectStore, file: OtherFile) -> bytes | None:
    """Return the published bytes of a file that an interrupted save replaced; None if they are not kept.

    Raises StoreError if the store does not answer.
    """
    try:
        info, header = _read_header(store)
        found = next((one for one in header.tensors if one.name == file.key), None)
        if found is None or file.digest is None or found.end - found.start != file.size_bytes:
            return None
        data = read_bytes(store, BEFORE_KEY, ByteRange(found.start, found.end), etag=info.etag)
    except (ObjectNotFound, ObjectChanged, AccessDenied, InvalidHeader):  # S3 also denies what is not there
        return None
    name, _, expected = file.digest.partition(":")
    return data if digest_of(name, data).hex() == expected else None


def _read_header(store: ObjectStore) -> tuple[ObjectInfo, Header]:
    """Return what is kept. Raises ObjectNotFound, StoreError, and InvalidHeader also if it is too large."""
    info = store.stat(BEFORE_KEY)
    if info.size_bytes > MAX_BYTES + MAX_HEADER_BYTES:
        raise InvalidHeader("more is kept than a save keeps", uri=store.uri, key=BEFORE_KEY, size_bytes=info.size_bytes)
    header, _ = read_head(store, BEFORE_KEY, info.size_bytes, etag=info.etag)
    return info, header


def put_back(store: ObjectStore, revision: str, policy: RetryPolicy) -> None:
    """Undo what an interrupted save replaced, where its bytes are still there, and forget it.

    Args:
        store: Root of the checkpoint.
        revision: The one that is published; "" for none. The files of another one are not put back.
        policy: Retries of requests.

    Raises:
        StoreError: The store refuses a request. Calling again continues.
    """
    found = read_replaced(store, policy)
    if found is not None and found.revision == revision:
        for path, digests in found.written.items():
            try:
                _, is_saved = _stored_bytes(store, path, digests, policy)
            except ObjectNotFound:
                continue
            if not is_saved:
                continue
            if path in found.contents:
                with_retries(lambda path=path: store.put(path, found.contents[path]), policy)  # type: ignore[misc]
            else:
                with_retries(lambda path=path: store.delete(path), policy)  # type: ignore[misc]
    with_retries(lambda: store.delete(BEFORE_KEY), policy)


def _stored_bytes(
    store: ObjectStore, path: str, digests: Collection[str], policy: RetryPolicy
) -> tuple[bytes | None, bool]:
    """Return the bytes of a file, and whether a save put them there, which wrote files with these digests.

    The bytes are None for more than 64 MiB. Raises ObjectNotFound and StoreError.
    """
    info = with_retries(lambda: store.stat(path), policy)
    is_small = info.size_bytes <= MAX_FILE_BYTES
    hasher, pieces = hashlib.sha256(), []
    if is_small or digests:
        for place in ByteRange(0, info.size_bytes).split(PIECE_BYTES):
            piece = with_retries(lambda place=place: read_bytes(store, path, place, etag=info.etag), policy)  # type: ignore[misc]
            hasher.update(piece)
            pieces.append(piece if is_small else b"")
    return b"".join(pieces) if is_small else None, hasher.hexdigest() in digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
