"""The arena's file: its header, checked before anything believes it, and the lock that says it is in use.

0      magic, version, record bytes, slots, slot bytes, data offset, epoch, checksum
128    the owner: pid, start time, checksum
192    how many slots are ready
4096   records of the slots, then the slots from a page boundary on
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import zlib

from storage.arena.slot_records import RECORD_BYTES
from storage.errors import ArenaCorrupt, ArenaError, ArenaTooLarge

MAGIC = b"LNGSHARE"
FORMAT_VERSION = 1
MAX_SLOTS = 1 << 20
MAX_SLOT_BYTES = 1 << 30
PAGE_BYTES = mmap.PAGESIZE

GEOMETRY = struct.Struct("<8sIIQQQ6s2x")  # as drawn above, without the checksum
CHECKSUM = struct.Struct("<I")
OWNER = struct.Struct("<qQ")  # pid, start time
OWNER_AT = 128
READY = struct.Struct("<Q")
READY_AT = 192  # eight bytes, aligned: one store, never torn
RECORDS_AT = 4096

TOO_LARGE_HINT = (
    "enlarge shared memory (docker run --shm-size=8g; KubeRay: an emptyDir with medium: Memory mounted on"
    " /dev/shm) or set LONGSHORE_ARENA_BYTES to less"
)


def pack_geometry(slot_count: int, slot_bytes: int, epoch: bytes) -> bytes:
    """The first bytes of a new arena. `epoch` is six random bytes."""
    data_offset = data_offset_bytes(slot_count)
    body = GEOMETRY.pack(MAGIC, FORMAT_VERSION, RECORD_BYTES, slot_count, slot_bytes, data_offset, epoch)
    return body + CHECKSUM.pack(zlib.crc32(body))


def is_geometry(slot_count: int, slot_bytes: int) -> bool:
    """Whether an arena can have that many slots of that size: within bounds, in whole pages."""
    return 1 <= slot_count <= MAX_SLOTS and 1 <= slot_bytes <= MAX_SLOT_BYTES and not slot_bytes % PAGE_BYTES


def arena_size_bytes(slot_count: int, slot_bytes: int) -> int:
    """Size of the file of such an arena, header included."""
    return data_offset_bytes(slot_count) + slot_count * slot_bytes


def data_offset_bytes(slot_count: int) -> int:
    """First byte of the first slot."""
    end = RECORDS_AT + slot_count * RECORD_BYTES
    return (end + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def create_locked(path: str) -> int:
    """A new empty file with our shared lock on it.

    A sweep may remove it between the two steps: then another one is made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError as exc:
            raise ArenaError("something is there already", path=path) from exc
        except OSError as exc:
            kind = ArenaTooLarge if exc.errno == errno.ENOSPC else ArenaError
            raise kind(f"cannot create the arena: {exc.strerror}", path=path) from exc
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def open_locked(path: str) -> int:
    """The file at `path` with our shared lock on it, certainly still under that name."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        raise ArenaCorrupt(f"cannot open the arena: {exc.strerror}", path=path) from exc
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not is_at(path, descriptor):
        os.close(descriptor)
        raise ArenaCorrupt("the arena was swept while it was being opened", path=path)
    return descriptor


def is_at(path: str, descriptor: int) -> bool:
    """Whether `path` still names the file that is open."""
    try:
        return identity(os.stat(path, follow_symlinks=False)) == identity(os.fstat(descriptor))
    except FileNotFoundError:
        return False


def identity(info: os.stat_result) -> tuple[int, int]:
    """What stays the same for one file, whatever it is called."""
    return info.st_dev, info.st_ino


def map_checked(path: str, descriptor: int) -> mmap.mmap:
    """Map the whole file, once its header has proved that it is an arena of that size."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes <= RECORDS_AT:
        raise ArenaCorrupt("too short for an arena", path=path, size_bytes=size_bytes)
    try:
        header = os.pread(descriptor, GEOMETRY.size + CHECKSUM.size, 0)
    except OSError as exc:
        raise ArenaCorrupt(f"cannot read the arena: {exc.strerror}", path=path) from exc
    magic, version, record_bytes, slot_count, slot_bytes, data_offset, _ = GEOMETRY.unpack_from(header)
    if magic != MAGIC:
        raise ArenaCorrupt("not an arena", path=path)
    if version != FORMAT_VERSION or record_bytes != RECORD_BYTES:
        raise ArenaCorrupt("an arena of another version", path=path, found=version, expected=FORMAT_VERSION)
    (checksum,) = CHECKSUM.unpack_from(header, GEOMETRY.size)
    if checksum != zlib.crc32(header[: GEOMETRY.size]):
        raise ArenaCorrupt("the arena's header is damaged", path=path)
    if (
        not is_geometry(slot_count, slot_bytes)
        or data_offset != data_offset_bytes(slot_count)
        or size_bytes != arena_size_bytes(slot_count, slot_bytes)
    ):
        raise ArenaCorrupt(
            "the arena's header and its size disagree", path=path, size_bytes=size_bytes, slots=slot_count
        )
    try:
        return mmap.mmap(descriptor, size_bytes)
    except OSError as exc:
        raise ArenaError(f"cannot map the arena: {exc.strerror}", path=path) from exc
