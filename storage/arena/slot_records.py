"""What an arena remembers about each slot, and the boundary over which the chunk cache writes it down.

A record is written *before* anybody learns of what it says (write-ahead), so that whoever reads the records
after a crash knows at least as much as any worker was ever told.
"""

from __future__ import annotations

import enum
import struct
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from storage.host.processes import ProcessId
from storage.ranges import ByteRange

KEY_BYTES = 32


class SlotState(enum.IntEnum):
    """Who may touch a slot."""

    FREE = 0  # nobody
    LEASED = 1  # its holder writes
    COMMITTED = 2  # readers read: the bytes were verified
    QUARANTINED = 3  # taken back from its holder, who may write all the same


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot as it is written down."""

    state: SlotState = SlotState.FREE
    generation: int = 0  # leases this slot has had; never falls
    length_bytes: int = 0  # of the committed chunk
    key: bytes = b""  # cache key of the chunk, KEY_BYTES long; empty for a free slot
    holder: ProcessId | None = None  # who writes or wrote; None for a free or committed slot


FREE_RECORD = SlotRecord()


class SlotJournal(Protocol):
    """Where slot records are kept: an Arena's header, or memory in tests."""

    @property
    def epoch(self) -> str:
        """Name of this set of slots, unlike that of any other: it makes lease ids unique across restarts."""
        ...

    def write_record(self, slot: int, record: SlotRecord) -> None:
        """Keep `record`; a crash in the middle leaves the one before."""
        ...

    def records(self) -> Sequence[SlotRecord]:
        """The last record of each slot, in slot order."""
        ...


class MemoryJournal:
    """The twin of an arena's header in a list; it survives the cache that wrote it, as the file does."""

    def __init__(self, slot_count: int) -> None:
        self.epoch = uuid.uuid4().hex[:12]
        self._records = [FREE_RECORD] * slot_count

    def write_record(self, slot: int, record: SlotRecord) -> None:
        self._records[slot] = record

    def records(self) -> Sequence[SlotRecord]:
        return tuple(self._records)


def digest_key(hash_name: str, digest: bytes, size_bytes: int) -> bytes:
    """Return the cache key of a chunk with a collision-resistant digest: equal bytes are one chunk in every model."""
    return _key("digest", hash_name, digest.hex(), str(size_bytes))


def location_key(store: str, object_key: str, version: str, byte_range: ByteRange) -> bytes:
    """Return the cache key of a chunk without such a digest: where it is stored.

    `store` names endpoint, bucket and prefix; `version` is the object's ETag, and its digest if it has any. Where it
    has neither, pass something that no other load shares, or stale bytes could be taken for new ones.
    """
    return _key("location", store, object_key, version, str(byte_range.start), str(byte_range.end))


def _key(*parts: str) -> bytes:
    hasher = blake3()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(struct.pack("<Q", len(data)))  # or ("ab", "c") and ("a", "bc") would be one key
        hasher.update(data)
    return hasher.digest()


# --- the stored form ---------------------------------------------------------------------------------------
# A slot has two copies; a write goes to the older one. A process killed in the middle of a write leaves a
# copy whose checksum fails and the other one whole.

_COPY = struct.Struct("<QQQqQ32sB3x")  # sequence, generation, length, pid, start time, key, state
_CHECKSUM = struct.Struct("<I")
COPY_BYTES = 128
RECORD_BYTES = 2 * COPY_BYTES


def pack_copy(sequence: int, record: SlotRecord) -> bytes:
    """One copy as bytes, COPY_BYTES long. `sequence` counts the writes of this slot and begins at 1."""
    if record.key and len(record.key) != KEY_BYTES:
        raise ValueError(f"a cache key has {KEY_BYTES} bytes, this one {len(record.key)}")
    holder = record.holder or ProcessId(0, 0)
    body = _COPY.pack(
        sequence,
        record.generation,
        record.length_bytes,
        holder.pid,
        holder.start_time,
        record.key,
        record.state,
    )
    return (body + _CHECKSUM.pack(zlib.crc32(body))).ljust(COPY_BYTES, b"\0")


def unpack_copy(data: bytes | memoryview) -> tuple[int, SlotRecord] | None:
    """(sequence, record) of one copy. None when it was torn; sequence 0 when it was never written."""
    body = bytes(data[: _COPY.size])
    sequence, generation, length_bytes, pid, start_time, key, state = _COPY.unpack(body)
    if not any(data):
        return 0, FREE_RECORD
    (checksum,) = _CHECKSUM.unpack(data[_COPY.size : _COPY.size + _CHECKSUM.size])
    if checksum != zlib.crc32(body) or sequence == 0 or state not in SlotState.__members__.values():
        return None
    holder = ProcessId(pid, start_time) if pid else None
    return sequence, SlotRecord(SlotState(state), generation, length_bytes, key if any(key) else b"", holder)
