"""The arena of one node: equal slots in shared memory, used by the agent and by every worker of the node.

The arena's file:

    0        header     magic, version, record bytes, slots, slot bytes, data offset, window slots, epoch, checksum
    128      owner      pid, start time, checksum
    192      ready      number of slots of the window that have memory
    4096     records    slot_count x 2 copies of what the agent knows of each slot (storage.arena.slots)
    ...      window     window_slots x slot_bytes, starting at a page boundary: mapped by every process

The other slots are kept slots. They are in up to 32 sparse files beside it, dealt out in turn, which nobody maps: they
are written with `keep` and read with `read`. They are several files because the kernel lets one process at a time write
to a file (`shmem_file_write_iter` holds the inode's lock).

The window has all its memory before it is used, and keeps it. Working in the same few pages costs a fifth of touching
new ones, which every process would have to map as well. A kept slot has memory only while it holds a chunk. When
memory runs out, a chunk is not kept. Nobody who writes or reads there can get a SIGBUS.

The header is checked before anything in the file is used. Only the owner (the agent) writes the header and the
records. A worker writes only to slots that it leased. Every process holds a shared flock on the arena's file until it
unmaps it, and on the files of kept slots until it closes them. So `storage.arena.arena_files.sweep` can tell files in
use from those that a killed process left behind. The owner holds a second lock, by which others know that it lives,
also in another PID namespace, where its pid means nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Self

from storage.arena.slots import COPY_BYTES, RECORD_BYTES, SlotRecord, pack_copy, unpack_copy
from storage.errors import ArenaCorrupt, ArenaError, ArenaTooLarge
from storage.host.memory import address_of, populate
from storage.host.processes import ProcessId

MAGIC = b"LNGSHARE"
FORMAT_VERSION = 4
MAX_SLOTS = 1 << 20
MAX_SLOT_BYTES = 1 << 30
PAGE_BYTES = mmap.PAGESIZE
KEPT = ".kept-"  # in names of files of kept slots, after the name of the arena's file
KEPT_FILES = 32  # so many that threads which write at the same moment seldom meet

GEOMETRY = struct.Struct("<8sIIQQQQ6s2x")  # the header as drawn above, without its checksum
CHECKSUM = struct.Struct("<I")
OWNER = struct.Struct("<qQ")  # pid, start time
OWNER_AT = 128
# A lock of the open file, which lasts until it is closed: struct flock (type, whence, start, length, pid).
OWNER_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, OWNER_AT, OWNER.size, 0)
READY = struct.Struct("<Q")
READY_AT = 192  # eight aligned bytes, so that one store writes them and no reader sees half a number
RECORDS_AT = 4096

TOO_LARGE_HINT = (
    "enlarge shared memory (docker run --shm-size=8g; KubeRay: an emptyDir with medium: Memory mounted on"
    " /dev/shm) or set LONGSHORE_ARENA_BYTES to less"
)


def pack_geometry(slot_count: int, slot_bytes: int, window_slots: int, epoch: bytes) -> bytes:
    """Return the header of a new arena, checksum included. `epoch` is six random bytes."""
    data_offset = data_offset_bytes(slot_count)
    body = GEOMETRY.pack(MAGIC, FORMAT_VERSION, RECORD_BYTES, slot_count, slot_bytes, data_offset, window_slots, epoch)
    return body + CHECKSUM.pack(zlib.crc32(body))


def promised_bytes(descriptor: int) -> int:
    """Return the bytes that the window of an open arena file has yet to take. 0 for a file that is no arena."""
    header = os.pread(descriptor, READY_AT + READY.size, 0)
    if len(header) < READY_AT + READY.size:
        return 0
    magic, version, _, _, slot_bytes, _, window_slots, _ = GEOMETRY.unpack_from(header)
    # Versions 2 and 3 have the same header. An agent of them may be on this host.
    if magic != MAGIC or version not in (2, 3, FORMAT_VERSION) or not is_geometry(window_slots, slot_bytes):
        return 0
    (ready,) = READY.unpack_from(header, READY_AT)
    return int(max(0, window_slots - ready)) * int(slot_bytes)


def is_geometry(slot_count: int, slot_bytes: int) -> bool:
    """Return whether an arena can have `slot_count` slots of `slot_bytes`: within bounds, in whole pages."""
    return 1 <= slot_count <= MAX_SLOTS and 1 <= slot_bytes <= MAX_SLOT_BYTES and not slot_bytes % PAGE_BYTES


def arena_size_bytes(slot_count: int, slot_bytes: int, window_slots: int) -> int:
    """Return the size of an arena's file: the header and the window."""
    return data_offset_bytes(slot_count) + window_slots * slot_bytes


def data_offset_bytes(slot_count: int) -> int:
    """Return the offset of the first slot in the file."""
    end = RECORDS_AT + slot_count * RECORD_BYTES
    return (end + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def create_locked(path: str) -> int:
    """Create an empty file, take a shared lock on it and return its descriptor.

    A sweep may remove the file before it is locked. Then another file is created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError as exc:
            raise ArenaError("cannot create the arena, because a file of that name exists already", path=path) from exc
        except OSError as exc:
            kind = ArenaTooLarge if exc.errno == errno.ENOSPC else ArenaError
            raise kind(f"cannot create the arena: {exc.strerror}", path=path) from exc
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if is_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def open_locked(path: str) -> int:
    """Open the file at `path`, take a shared lock on it and check that `path` still names it."""
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
    """Return whether `path` still names the open file."""
    try:
        return identity(os.stat(path, follow_symlinks=False)) == identity(os.fstat(descriptor))
    except FileNotFoundError:
        return False


def identity(info: os.stat_result) -> tuple[int, int]:
    """Return device and inode number, which stay the same when a file is renamed."""
    return info.st_dev, info.st_ino


def map_checked(path: str, descriptor: int) -> mmap.mmap:
    """Map header and window after the header has proved that the file is an arena of that size."""
    info = os.fstat(descriptor)
    size_bytes = info.st_size
    if info.st_uid != os.geteuid():
        raise ArenaCorrupt("an arena of another user", path=path, user=info.st_uid)
    if size_bytes <= RECORDS_AT:
        raise ArenaCorrupt("too short for an arena", path=path, size_bytes=size_bytes)
    try:
        header = os.pread(descriptor, GEOMETRY.size + CHECKSUM.size, 0)
    except OSError as exc:
        raise ArenaCorrupt(f"cannot read the arena: {exc.strerror}", path=path) from exc
    magic, version, record_bytes, slot_count, slot_bytes, data_offset, window_slots, _ = GEOMETRY.unpack_from(header)
    if magic != MAGIC:
        raise ArenaCorrupt("not an arena", path=path)
    if version != FORMAT_VERSION or record_bytes != RECORD_BYTES:
        raise ArenaCorrupt("an arena of another version", path=path, found=version, expected=FORMAT_VERSION)
    (checksum,) = CHECKSUM.unpack_from(header, GEOMETRY.size)
    if checksum != zlib.crc32(header[: GEOMETRY.size]):
        raise ArenaCorrupt("the arena's header is damaged", path=path)
    if (
        not is_geometry(slot_count, slot_bytes)
        or not 1 <= window_slots <= slot_count
        or data_offset != data_offset_bytes(slot_count)
        or size_bytes != arena_size_bytes(slot_count, slot_bytes, window_slots)
    ):
        raise ArenaCorrupt(
            "the arena's header and its size disagree", path=path, size_bytes=size_bytes, slots=slot_count
        )
    try:
        return mmap.mmap(descriptor, size_bytes)
    except OSError as exc:
        raise ArenaError(f"cannot map the arena: {exc.strerror}", path=path) from exc


class Arena:
    """A mapped arena. `create` and `adopt` make the caller its owner; `open` is for workers.

    Thread-safe for its intended use: one thread writes records, one runs `reserve`, any number use slots.
    """

    def __init__(self, path: str, descriptor: int, memory: mmap.mmap, *, owner: bool) -> None:
        """Take over a locked descriptor and a mapping with a checked header. Called by the class methods only."""
        _, _, _, slot_count, slot_bytes, data_offset, window_slots, epoch = GEOMETRY.unpack_from(memory)
        self.path = path
        self.slot_count: int = slot_count
        self.window_slots: int = window_slots
        self.slot_bytes: int = slot_bytes
        self._data_offset: int = data_offset
        self._epoch: str = epoch.hex()
        self._descriptor = descriptor
        self._kept: list[int] = []  # descriptors of the files of kept slots
        self._memory = memory
        self._view = memoryview(memory)
        self._address = address_of(memory)
        self._mapped = bytearray(window_slots)  # 1 for each slot whose pages this process has mapped
        self._owner = owner
        self._file = identity(os.fstat(descriptor))
        self._sequences: list[int] | None = None  # for each slot, the number of its last write
        self._closed = False
        self._closing = threading.Lock()  # so that `reserve` never touches a closed descriptor

    # --- open and close ------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str, *, slot_count: int, slot_bytes: int, window_slots: int | None = None) -> Self:
        """Create an arena at `path` with mode 0600, owned by the caller. `reserve` gives the window memory.

        `window_slots`: default all, so no slot is a kept one.

        Raises ArenaError when a file is at `path` already, ArenaTooLarge when there is no room for the header,
        and ValueError for a geometry that no arena can have.
        """
        window_slots = slot_count if window_slots is None else window_slots
        if not is_geometry(slot_count, slot_bytes) or not 1 <= window_slots <= slot_count:
            raise ValueError(
                f"no arena has {slot_count} slots of {slot_bytes} bytes, {window_slots} of them in its window"
                f" (pages: {PAGE_BYTES})"
            )
        data_offset, size_bytes = data_offset_bytes(slot_count), arena_size_bytes(slot_count, slot_bytes, window_slots)
        descriptor = create_locked(path)
        try:
            os.ftruncate(descriptor, size_bytes)
            os.posix_fallocate(descriptor, 0, data_offset)
            memory = mmap.mmap(descriptor, size_bytes)
        except OSError as exc:
            os.unlink(path)
            os.close(descriptor)
            if exc.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise ArenaTooLarge(
                    "no room for the arena's header", hint=TOO_LARGE_HINT, path=path, header_bytes=data_offset
                ) from exc
            raise ArenaError(f"cannot create the arena: {exc.strerror}", path=path) from exc
        header = pack_geometry(slot_count, slot_bytes, window_slots, secrets.token_bytes(6))
        memory[: len(header)] = header
        arena = cls(path, descriptor, memory, owner=True)
        try:
            arena._open_kept()
        except ArenaError:
            arena.unlink()
            arena.close()
            raise
        arena._become_owner()
        return arena

    @classmethod
    def open(cls, path: str) -> Self:
        """Map an existing arena. Raises ArenaCorrupt when `path` is missing or is not an arena."""
        descriptor = open_locked(path)
        try:
            memory = map_checked(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        arena = cls(path, descriptor, memory, owner=False)
        try:
            arena._open_kept()
        except ArenaCorrupt:
            arena.close()
            raise
        return arena

    @classmethod
    def adopt(cls, path: str) -> Self:
        """Map an arena whose owner has died, and become its owner.

        Raises ArenaCorrupt as `open` does. Raises ArenaError while the former owner lives, because two writers of
        the records would undo each other's fences.
        """
        arena = cls.open(path)
        if not arena._become_owner():
            former = arena.owner
            arena.close()
            raise ArenaError("the arena belongs to a process that lives", path=path, pid=former.pid if former else None)
        return arena

    def close(self) -> None:
        """Release the mapping and the lock. Idempotent.

        While views of slots are in use, the pages stay mapped and the lock stays held. Both end with the last view.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            # The mapping has a duplicate of the descriptor, and so the lock. Both last until it is unmapped.
            for descriptor in (self._descriptor, *self._kept):
                os.close(descriptor)
            with contextlib.suppress(BufferError):
                self._view.release()
            with contextlib.suppress(BufferError):
                self._memory.close()
            del self._view, self._memory

    def forget(self) -> None:
        """Close the arena in a forked child, where no other thread runs. The parent keeps mapping and locks."""
        self._closing = threading.Lock()  # a thread of the parent may have held it
        self.close()

    def unlink(self) -> None:
        """Remove the files' names. The kernel frees the memory when the last process has closed them. Idempotent."""
        for number in range(len(self._kept)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._kept_path(number))
        with contextlib.suppress(FileNotFoundError):
            # Another arena may have taken the name since.
            if identity(os.stat(self.path, follow_symlinks=False)) == self._file:
                os.unlink(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Arena({self.path!r}, slot_count={self.slot_count}, slot_bytes={self.slot_bytes})"

    # --- slots ---------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Return the size of the arena's file in bytes: header and window."""
        return arena_size_bytes(self.slot_count, self.slot_bytes, self.window_slots)

    @property
    def taken_bytes(self) -> int:
        """Return the memory that header, window and kept slots take now."""
        return sum(os.fstat(descriptor).st_blocks for descriptor in (self._descriptor, *self._kept)) * 512

    @property
    def ready_slots(self) -> int:
        """Return how many slots of the window, counted from 0, have memory and may be used."""
        (ready,) = READY.unpack_from(self._view, READY_AT)
        return min(int(ready), self.window_slots)

    def slot(self, index: int) -> memoryview:
        """Return a writable view of a slot of the window, exactly `slot_bytes` long. Release or drop it when done.

        The first call maps all pages of the slot at once. That costs less than a page fault for each page
        (`bench/memory.py`).
        """
        if not 0 <= index < self.window_slots:
            raise IndexError(f"slot {index} of the window's {self.window_slots}")
        start = self._data_offset + index * self.slot_bytes
        if not self._mapped[index] and index < self.ready_slots:
            self._mapped[index] = 1
            populate(self._address + start, self.slot_bytes)
        return self._view[start : start + self.slot_bytes]

    def data(self) -> memoryview:
        """Return the window as one block, so that pinned memory is registered once and not once per slot."""
        return self._view[self._data_offset :]

    @property
    def window_address(self) -> int:
        """Return the address of the window in this process."""
        return self._address + self._data_offset

    def keep(self, index: int, data: memoryview) -> bool:
        """Copy a chunk to a kept slot that the caller has leased. Return False when there is no memory for it."""
        descriptor, start = self._kept_at(index)
        try:
            while data:
                written_bytes = os.pwrite(descriptor, data, start)
                data, start = data[written_bytes:], start + written_bytes
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                return False
            raise ArenaError(f"cannot write to the arena: {exc.strerror}", path=self.path) from exc
        return True

    def read(self, index: int, parts: Sequence[memoryview]) -> None:
        """Fill `parts` one after the other from a kept slot that the caller holds."""
        descriptor, start = self._kept_at(index)
        for part in parts:
            while part:
                try:
                    read_bytes = os.preadv(descriptor, [part], start)
                except OSError as exc:
                    raise ArenaError(f"cannot read the arena: {exc.strerror}", path=self.path) from exc
                if not read_bytes:
                    raise ArenaCorrupt("the arena's file was cut short", path=self.path, slot=index)
                part, start = part[read_bytes:], start + read_bytes

    def place(self, index: int) -> tuple[int, int]:
        """Return the file of a slot that the caller holds, and where it begins in there, to send it from."""
        if index >= self.window_slots:
            return self._kept_at(index)
        return self._descriptor, self._data_offset + index * self.slot_bytes

    def view(self, index: int, length_bytes: int) -> memoryview:
        """Return the first bytes of a slot that the caller holds: a view of the window, or a copy of a kept slot."""
        if index < self.window_slots:
            return self.slot(index)[:length_bytes]
        copy = memoryview(bytearray(length_bytes))
        self.read(index, [copy])
        return copy

    def give_back(self, index: int) -> None:
        """Free the memory of a kept slot that the caller has leased. It then takes none, and reads as zeros."""
        descriptor, start = self._kept_at(index)
        try:
            with self._closing:
                if not self._closed:
                    with mmap.mmap(descriptor, self.slot_bytes, offset=start) as memory:
                        memory.madvise(mmap.MADV_REMOVE)
        except OSError as exc:
            raise ArenaError(f"cannot give back memory of the arena: {exc.strerror}", path=self.path) from exc

    def _open_kept(self) -> None:
        """Create the files of kept slots as the owner, else open them. Raises ArenaError and its kinds."""
        kept_slots = self.slot_count - self.window_slots
        size_bytes = -(-kept_slots // KEPT_FILES) * self.slot_bytes
        for number in range(min(KEPT_FILES, kept_slots)):
            path = self._kept_path(number)
            self._kept.append(create_locked(path) if self._owner else open_locked(path))
            if not self._owner:
                if os.fstat(self._kept[-1]).st_size != size_bytes:
                    raise ArenaCorrupt("a file of kept slots was cut short", path=self.path)
                continue
            try:
                os.ftruncate(self._kept[-1], size_bytes)
            except OSError as exc:
                raise ArenaTooLarge(f"no room for kept slots: {exc.strerror}", path=self.path) from exc

    def _kept_path(self, number: int) -> str:
        return f"{self.path}{KEPT}{self._epoch}-{number}"

    def _kept_at(self, index: int) -> tuple[int, int]:
        """Return the file of a kept slot and where it begins in there."""
        if not self.window_slots <= index < self.slot_count:
            raise IndexError(f"slot {index} is not one of the kept slots {self.window_slots} to {self.slot_count - 1}")
        place, number = divmod(index - self.window_slots, KEPT_FILES)
        return self._kept[number], place * self.slot_bytes

    def reserve(self, stop: Callable[[], bool] = lambda: False, room: Callable[[], bool] = lambda: True) -> int:
        """Allocate memory for every slot of the window in order, and return how many are ready.

        Returns 0 if the arena was closed before.

        Runs in a background thread while `ready_slots` grows. Writing to a slot that is not ready could end the
        process with SIGBUS.

        `stop` is called before each slot and ends the work when it returns True. `room` is called before each slot
        and returns whether the host still has memory. The kernel might kill a process rather than refuse memory.

        When memory runs out, the memory of all slots that are not ready is freed and the file's name is removed.
        Then ArenaTooLarge is raised.
        """
        with self._closing:
            if self._closed:
                return 0
            first = self.ready_slots
        for index in range(first, self.window_slots):
            with self._closing:
                if self._closed or stop():
                    return index
                try:
                    if not room():
                        raise OSError(errno.ENOMEM, "the host's memory is nearly used up")
                    self._reserve_slot(index)
                except OSError as exc:
                    if exc.errno not in (errno.ENOSPC, errno.ENOMEM):
                        raise ArenaError(f"cannot reserve the arena: {exc.strerror}", path=self.path) from exc
                    self.unlink()
                    raise ArenaTooLarge(
                        "shared memory, or the memory behind it, ran out while the arena was being reserved",
                        hint=TOO_LARGE_HINT,
                        path=self.path,
                        reserved_bytes=index * self.slot_bytes,
                        wanted_bytes=self.window_slots * self.slot_bytes,
                    ) from exc
        return self.window_slots

    def _reserve_slot(self, index: int) -> None:
        start = self._data_offset + index * self.slot_bytes
        try:
            os.posix_fallocate(self._descriptor, start, self.slot_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE, start, len(self._memory) - start)
            raise
        READY.pack_into(self._view, READY_AT, index + 1)

    # --- the owner's records (a SlotJournal) ---------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """Return the random name that the arena got when it was created."""
        return self._epoch

    @property
    def owner(self) -> ProcessId | None:
        """Return the process that last created or adopted the arena; None if it died before it had recorded itself."""
        pid, start_time = OWNER.unpack_from(self._view, OWNER_AT)
        (checksum,) = CHECKSUM.unpack_from(self._view, OWNER_AT + OWNER.size)
        body = self._view[OWNER_AT : OWNER_AT + OWNER.size]
        return ProcessId(pid, start_time) if pid and checksum == zlib.crc32(body) else None

    def write_record(self, slot: int, record: SlotRecord) -> None:
        """Store the record of `slot`. If the process is killed while it writes, the previous record stays valid."""
        if not self._owner:
            raise ArenaError("only the arena's owner writes slot records", path=self.path)
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of {self.slot_count}")
        sequences = self._read_sequences()
        sequence = sequences[slot] + 1
        # Odd writes go to the first copy and even ones to the second, so the previous copy stays whole.
        start = RECORDS_AT + slot * RECORD_BYTES + (sequence + 1) % 2 * COPY_BYTES
        self._view[start : start + COPY_BYTES] = pack_copy(sequence, record)
        sequences[slot] = sequence

    def records(self) -> Sequence[SlotRecord]:
        """Return the last whole record of each slot. Raises ArenaCorrupt when a slot has none."""
        return tuple(record for _, record in self._read_records())

    def _read_records(self) -> list[tuple[int, SlotRecord]]:
        found = []
        for slot in range(self.slot_count):
            start = RECORDS_AT + slot * RECORD_BYTES
            copies = [
                copy
                for at in (start, start + COPY_BYTES)
                if (copy := unpack_copy(self._view[at : at + COPY_BYTES])) is not None
            ]
            if not copies:
                raise ArenaCorrupt("both copies of a slot record are broken", path=self.path, slot=slot)
            found.append(max(copies, key=lambda copy: copy[0]))
        return found

    def _read_sequences(self) -> list[int]:
        if self._sequences is None:
            self._sequences = [sequence for sequence, _ in self._read_records()]
        return self._sequences

    def _become_owner(self) -> bool:
        """Take the owner's lock, and record this process. Return False if the owner is another process."""
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, OWNER_LOCK)
        except OSError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EACCES):
                raise ArenaError(f"cannot lock the arena: {exc.strerror}", path=self.path) from exc
            if self.owner != ProcessId.current():
                return False  # else another Arena of this process has the lock
        self._owner = True
        me = ProcessId.current()
        body = OWNER.pack(me.pid, me.start_time)
        data = body + CHECKSUM.pack(zlib.crc32(body))
        self._view[OWNER_AT : OWNER_AT + len(data)] = data
        return True
