"""Objects that several processes write together, in parts, and objects that are written only on a condition.

    begin_parts(key) --> id: plain text, which any process may use
    put_part(key, id, number, start, data)        in any order, from any process, again if need be
    copy_part(key, id, number, start, source...)  the same from bytes that the store has (`CopiesParts`)
    complete_parts(key, id, parts, size_bytes)    makes the object visible, whole
    abort_parts(key, id)                          removes what was sent
    stored_parts(key, id)                         the parts that the store has, with their tags (`KeepsTags`)
    take_over(key, id) --> id                     continues an upload without its earlier writers (`KeepsNoTags`)

On S3 that is a multipart upload. On a file system it is a hidden file beside the final one, written at positions. The
parts of a killed writer stay until somebody completes or aborts them, so that a later process can continue.

Stores that write an object by one stream (`in_order`) get the parts of an object in order, from one process. That
process completes it. The parts of a killed writer are lost there, and objects that are complete stay.

A writer that was taken for dead may go on. S3 completes an upload with the tags of its parts, so a part that such a
writer has replaced is noticed. A file system keeps no tags: there the upload gets a new id, under which only the later
writers know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from storage.stores.object_store import ByteRange, ObjectInfo

MIN_PART_BYTES = 5 << 20  # S3's limit for all parts except the last
MAX_PARTS = 10_000  # S3's limit for one object


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that the store has."""

    number: int  # from 1, as S3 counts
    size_bytes: int
    tag: str  # proves the version of the part


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An object that was begun and is neither complete nor aborted."""

    key: str
    upload: str  # the id for `put_part`
    size_bytes: int  # of the parts sent so far; 0 if the store does not report it


@runtime_checkable
class WritesParts(Protocol):
    """A store in which several processes can write one object. Methods raise the errors of `storage.errors`."""

    in_order: bool  # one process writes all parts of an object, one after the other, and completes it

    def begin_parts(self, key: str) -> str:
        """Begin an object and return the id of its upload."""
        ...

    def put_part(self, key: str, upload: str, number: int, start: int, data: memoryview) -> str:
        """Write part `number`, which begins at byte `start`, and return its tag. It is durable after that."""
        ...

    def complete_parts(self, key: str, upload: str, parts: Sequence[tuple[int, str]], size_bytes: int) -> ObjectInfo:
        """Make the object visible, from all its parts (number, tag) in order.

        If it is complete already, compare it. With `in_order`, any process may do that then.
        """
        ...

    def abort_parts(self, key: str, upload: str) -> None:
        """Remove what was sent. No error if the upload is over."""
        ...

    def open_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield the uploads that were begun, of keys with that prefix, in no order."""
        ...

    def put_if(self, key: str, data: bytes, etag: str | None) -> ObjectInfo:
        """Write a small object whole if the stored one has that ETag, or if none exists when `etag` is None.

        Raises ObjectChanged if not.
        """
        ...


@runtime_checkable
class KeepsTags(Protocol):
    """A store that has a tag for each version of a part, and completes an object from parts with these tags only."""

    def stored_parts(self, key: str, upload: str) -> Mapping[int, StoredPart]:
        """Return the parts that the store has, by number. Raises ObjectNotFound for an ended upload."""
        ...


@runtime_checkable
class KeepsNoTags(Protocol):
    """A store that writes parts and cannot tell one version of a part from another."""

    def take_over(self, key: str, upload: str) -> str | None:
        """Return a new id for an upload. Nothing that was sent under the old id arrives after that.

        Returns None if writers of the old id cannot be kept out: begin another upload. Raises ObjectNotFound for an
        ended upload.
        """
        ...

    def has_part(self, key: str, upload: str, start: int, data: memoryview) -> bool:
        """Return whether the upload has these bytes at byte `start`. With `upload` "": whether the object has them."""
        ...


@runtime_checkable
class CopiesParts(Protocol):
    """A store that copies bytes of one object into a part of another, without a way through this machine."""

    def copy_part(
        self, key: str, upload: str, number: int, start: int, source: str, source_range: ByteRange, etag: str | None
    ) -> str:
        """Write part `number`, which begins at byte `start`, from bytes of the object `source`. Return its tag.

        Raises ObjectChanged if the source has another ETag than `etag`, ObjectNotFound if it is gone, and
        UnsupportedStore if this server or file system cannot copy.
        """
        ...
