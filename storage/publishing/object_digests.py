"""One object read, hashed and checked: what publish and verify do to every shard and file.

digest_object    read once: digest of the whole, of each chunk, and the checksum the store has, compared
bad_chunks       read again: chunks whose digest is another now
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

from storage.checksum import HASH_NAMES, digest_of, new_hasher
from storage.errors import IntegrityError
from storage.object_store import ObjectInfo, ObjectStore
from storage.ranges import ByteRange
from storage.streaming import RangeReader

STORE_CHECKSUMS = ("crc64nvme", "crc32c", "crc32", "sha256", "md5")  # in order of preference: the cheapest to compute

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ObjectDigests:
    """What one reading of an object gave."""

    whole: str  # hex
    chunks: tuple[str, ...]  # hex, one for each range
    store_checksum: str | None  # name of the store's own checksum that agreed; None: it has none


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A range whose bytes are not the expected ones."""

    key: str
    chunk: int  # number within the object
    start: int
    end: int
    expected: str  # hex digests
    found: str


def store_checksum(info: ObjectInfo) -> str | None:
    """Name of the checksum that the store keeps of the whole object and that can be computed here, or None."""
    return next((name for name in STORE_CHECKSUMS if name in info.checksums and name in HASH_NAMES), None)


def digest_object(
    reader: RangeReader,
    store: ObjectStore,
    info: ObjectInfo,
    ranges: Sequence[ByteRange],
    hash_name: str,
    *,
    sink: Callable[[memoryview], None] | None = None,
    on_bytes: OnBytes,
) -> ObjectDigests:
    """Read the object once, as the version that `info` describes; `sink` gets every range in order.

    Raises IntegrityError when the store's own checksum disagrees, and the store's errors.
    """
    whole = new_hasher(hash_name)
    name = store_checksum(info)
    check = new_hasher(name) if name else None
    chunks: list[str] = []
    # Closed at once when the sink fails: its ring of buffers may be wanted for another try.
    with closing(reader.read(store, info.key, ranges, etag=info.etag)) as views:
        for _, view in views:
            whole.update(view)
            chunks.append(digest_of(hash_name, view).hex())
            if check is not None:
                check.update(view)
            if sink is not None:
                sink(view)
            on_bytes(len(view))
    if name and check is not None and check.hexdigest() != info.checksums[name].lower():
        raise IntegrityError(
            f"what was read does not have the {name} that the store keeps of the object",
            hint="the object is damaged where it is stored, or was damaged on its way",
            uri=store.uri,
            key=info.key,
            expected=info.checksums[name],
            found=check.hexdigest(),
        )
    return ObjectDigests(whole.hexdigest(), tuple(chunks), name)


def bad_chunks(
    reader: RangeReader,
    store: ObjectStore,
    info: ObjectInfo,
    ranges: Sequence[ByteRange],
    hash_name: str,
    expected: Sequence[str],
    *,
    on_bytes: OnBytes,
) -> Generator[BadChunk, None, None]:
    """Read the object and yield every chunk whose digest is not the expected one."""
    with closing(reader.read(store, info.key, ranges, etag=info.etag)) as views:
        for number, view in views:
            found = digest_of(hash_name, view).hex()
            on_bytes(len(view))
            if found != expected[number]:
                place = ranges[number]
                yield BadChunk(info.key, number, place.start, place.end, expected[number], found)
