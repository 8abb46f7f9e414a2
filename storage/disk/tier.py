"""The disk tier of one node: verified chunks on disk that outlive the arena, the agent and the cluster.

    write(key, ...)   room made -> temporary file, full size at once -> bytes -> fsync -> renamed to its name
    key in tier       whether there is such a file; `storage.disk.files.DiskReader` reads and verifies it

Least recently used chunks are removed to stay within a budget of bytes. Several processes may use one folder. Each
changes it only under a lock on a file in it, and lists the folder again when another process has changed it. A killed
process leaves temporary files, which the next listing removes. A chunk is visible whole or not at all. A full disk is
no error: the chunk is not kept, and is counted in `unkept_chunks`.

DiskIndex decides what to remove. It is pure and touches no file.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from storage.disk.files import (
    HEADER_BYTES,
    ChunkHeader,
    FolderLock,
    chunk_name,
    key_of,
    make_folder,
    open_folder,
    pack_header,
)
from storage.errors import DiskTierError
from storage.host.memory import free_bytes
from storage.stores.local import is_temporary, open_locked, remove_unless_locked


class DiskIndex:
    """The sizes of finished files by key, least recently used first, and of files being written, by name.

    The law: a file is added only after enough was removed, so `used_bytes` never exceeds `budget_bytes`.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0  # of finished files and reservations
        self._chunks: OrderedDict[bytes, int] = OrderedDict()
        self._reserved: dict[str, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Return the keys of finished files, least recently used first."""
        return tuple(self._chunks)

    def replace(
        self,
        chunks: Iterable[tuple[bytes, int]],
        reserved: Iterable[tuple[str, int]],
        *,
        kept: bool = False,
        gone: Iterable[bytes] = (),
    ) -> None:
        """Set the index to the result of a listing. `chunks` are ordered by use, least recently used first.

        `kept` means that only new names were examined. Then known files stay, except those in `gone`.
        """
        if kept:
            for key in gone:
                self.remove(key)
            for key, size_bytes in chunks:
                self.add(key, size_bytes)
            for name in tuple(self._reserved):
                self.release(name)
            for name, size_bytes in reserved:
                self.reserve(name, size_bytes)
            return
        self._chunks = OrderedDict(chunks)
        self._reserved = dict(reserved)
        self.used_bytes = sum(self._chunks.values()) + sum(self._reserved.values())

    def make_room(self, size_bytes: int) -> list[bytes] | None:
        """Remove keys until `size_bytes` more fit, and return them. None, without a change, if they cannot fit."""
        fixed_bytes = self.used_bytes - sum(self._chunks.values()) if self._reserved else 0
        if fixed_bytes + size_bytes > self.budget_bytes:
            return None
        gone = []
        while self.used_bytes + size_bytes > self.budget_bytes:
            gone.append(self.drop_oldest())
        return gone

    def drop_oldest(self) -> bytes:
        """Remove the least recently used key and return it. Raises KeyError if there is none."""
        key, size_bytes = self._chunks.popitem(last=False)
        self.used_bytes -= size_bytes
        return key

    def reserve(self, name: str, size_bytes: int) -> None:
        """Reserve the size of a file that will be written. Call `make_room` first."""
        self.release(name)
        self._reserved[name] = size_bytes
        self.used_bytes += size_bytes

    def release(self, name: str) -> None:
        """Drop a reservation, because the file is finished or abandoned."""
        self.used_bytes -= self._reserved.pop(name, 0)

    def add(self, key: bytes, size_bytes: int) -> None:
        """Add a finished file as the most recently used."""
        self.remove(key)
        self._chunks[key] = size_bytes
        self.used_bytes += size_bytes

    def touch(self, key: bytes) -> None:
        """Make the file the most recently used."""
        if key in self._chunks:
            self._chunks.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """Remove the file from the index."""
        self.used_bytes -= self._chunks.pop(key, 0)


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counts since this process opened the tier. `budget_bytes`, `used_bytes` and `files` are the state now."""

    budget_bytes: int
    used_bytes: int  # including files being written
    files: int
    written_chunks: int
    evicted_chunks: int
    unkept_chunks: int  # writes that failed or had no room


LOOK_SHARE = 100  # listing every file of a large folder takes at most this fraction (1/100) of the time
LARGE = 1000  # files in a folder that counts as large
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Written(enum.Enum):
    """The result of writing a chunk."""

    DONE = "done"
    PRESENT = "present"  # the chunk was there already
    NO_ROOM = "no room"  # larger than the budget, or files being written use all of it
    FULL = "full"  # the disk has no space left, or the process may not write such a large file
    FAILED = "failed"  # the disk reported another error


class DiskTier:
    """The writer of the disk tier. Thread-safe. `in` and `touch` never wait for the disk."""

    def __init__(self, parent: str, budget_bytes: int = 0) -> None:
        """Open the tier. `budget_bytes` 0 means half of its files and the free space together. Raises DiskTierError."""
        self.path = make_folder(parent)
        self.counts: Counter[Written] = Counter()
        self.evicted_chunks = 0
        self.last_error = ""  # of the last write that failed
        self._folder = open_folder(self.path)
        self._index = DiskIndex(budget_bytes)
        self._books = threading.Lock()  # protects the index; never held during disk operations
        self._writing = threading.Lock()  # one change at a time in this process
        self._stamp_ns = 0
        self._look_again_s = 0.0  # when every file may be examined again
        self._eviction_helps = True  # False if removing chunks did not free space on a full disk
        try:
            self._lock = FolderLock(self._folder)
            with self._changing():
                if not budget_bytes:
                    self._index.budget_bytes = (free_bytes(self.path) + self._index.used_bytes) // 2
        except OSError as exc:
            self.close()
            raise DiskTierError(
                f"the folder for chunks on disk cannot be used: {exc.strerror or exc}",
                hint="set LONGSHORE_DISK_CACHE_DIR to a folder that this user can write to",
                path=self.path,
            ) from exc

    @property
    def budget_bytes(self) -> int:
        """Most bytes that the tier may hold."""
        return self._index.budget_bytes

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all files that this process knows, including those being written."""
        return self._index.used_bytes

    @property
    def unkept_chunks(self) -> int:
        """Return the number of writes that failed or had no room."""
        return self.counts[Written.NO_ROOM] + self.counts[Written.FULL] + self.counts[Written.FAILED]

    def stats(self) -> DiskStats:
        """Return the counts and the state of the tier."""
        with self._books:
            return DiskStats(
                self.budget_bytes,
                self.used_bytes,
                len(self._index),
                self.counts[Written.DONE],
                self.evicted_chunks,
                self.unkept_chunks,
            )

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        with self._books:
            return key in self._index

    def touch(self, key: bytes) -> None:
        """Make the chunk the most recently used in this index. Its reader notes the use on disk."""
        with self._books:
            self._index.touch(key)

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys of the chunks on disk, least recently used first."""
        with self._books:
            return self._index.keys

    def write(self, key: bytes, hash_name: str, digest: bytes, data: memoryview) -> Written:
        """Keep a verified chunk. Never raises for errors of the disk."""
        header = pack_header(ChunkHeader(key, len(data), hash_name, digest))
        try:
            written = self._write(key, header, data)
            if written is Written.DONE:
                self._eviction_helps = True
        except OSError as exc:
            written = Written.FULL if exc.errno in (*_NO_SPACE, errno.EFBIG) else Written.FAILED
            self.last_error = f"{exc.strerror or exc}"
        self.counts[written] += 1
        return written

    def trim(self) -> None:
        """Remove what exceeds the budget, which opening a tier does not do. Never raises for errors of the disk."""
        with contextlib.suppress(OSError), self._changing():
            self._evict(0)

    def discard(self, key: bytes) -> None:
        """Remove a file that is not the chunk that its name says. Never raises for errors of the disk."""
        with contextlib.suppress(OSError), self._changing():
            self._unlink(key)
            with self._books:
                self._index.remove(key)

    def close(self) -> None:
        """Close the folder and keep its files. No other call may be running."""
        lock = getattr(self, "_lock", None)
        if lock is not None:
            lock.close()
        os.close(self._folder)

    # -- inside ------------------------------------------------------------------------------------------------

    def _write(self, key: bytes, header: bytes, data: memoryview) -> Written:
        size_bytes = HEADER_BYTES + len(data)
        if key in self:
            return Written.PRESENT
        with self._changing():
            if key in self:  # another process wrote it in the meantime
                return Written.PRESENT
            if not self._evict(size_bytes):
                return Written.NO_ROOM
            name, file = self._reserve(size_bytes)
        try:
            try:
                self._fill(file, header, data)
            except OSError as exc:
                if exc.errno not in _NO_SPACE or not self._give_back(size_bytes):
                    raise
                self._eviction_helps = False  # until this write succeeds, because other files may have filled the disk
                self._fill(file, header, data)
            with self._changing():
                os.rename(name, chunk_name(key), src_dir_fd=self._folder, dst_dir_fd=self._folder)
                with self._books:
                    self._index.release(name)
                    self._index.add(key, size_bytes)
            return Written.DONE
        except BaseException:
            self._cancel(name)
            raise
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock for a change, after updating the index with changes by other processes. Raises OSError."""
        with self._writing, self._lock.held() as changed:
            if changed:
                self._look()
                self._lock.looked()
            self._lock.changing()
            yield

    def _look(self) -> None:
        """Update the index from the folder, and remove temporary files of killed writers.

        If several processes write to a large folder, each lists it after each write of another. To save time, only new
        names are examined then, because finished files never change. Their order of use is read only now and then.
        """
        begun_s = time.monotonic()
        names = set(os.listdir(self._folder))
        known: dict[str, bytes] = {}
        if len(self) > LARGE and begun_s < self._look_again_s:
            known = {chunk_name(key): key for key in self.keys()}
        chunks: list[tuple[int, str, bytes, int]] = []
        reserved: list[tuple[str, int]] = []
        for name in names - known.keys():
            key, temporary = key_of(name), is_temporary(name)
            if temporary:
                remove_unless_locked(name, dir_fd=self._folder)
            if key is None and not temporary:
                continue
            try:
                info = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(info.st_mode):
                continue
            if key is None:
                reserved.append((name, info.st_size))
            else:
                chunks.append((info.st_mtime_ns, name, key, info.st_size))
        gone = [known[name] for name in known.keys() - names]
        with self._books:
            found = ((key, size_bytes) for _, _, key, size_bytes in sorted(chunks))
            self._index.replace(found, reserved, kept=bool(known), gone=gone)
        if not known:
            now_s = time.monotonic()
            self._look_again_s = now_s + LOOK_SHARE * (now_s - begun_s)

    def _evict(self, size_bytes: int) -> bool:
        """Make room for that many bytes. False, and nothing is removed, if that is impossible."""
        with self._books:
            gone = self._index.make_room(size_bytes)
        for key in gone or ():
            self.evicted_chunks += 1
            self._unlink(key)
        return gone is not None

    def _give_back(self, size_bytes: int) -> bool:
        """Remove older chunks, because the disk is full before the budget is used. False if that does not help."""
        with self._changing():
            left_bytes = size_bytes
            while left_bytes > 0 and self._eviction_helps and len(self):
                with self._books:
                    before_bytes = self._index.used_bytes
                    key = self._index.drop_oldest()
                    left_bytes -= before_bytes - self._index.used_bytes
                self.evicted_chunks += 1
                self._unlink(key)
        return left_bytes <= 0

    def _unlink(self, key: bytes) -> None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(chunk_name(key), dir_fd=self._folder)

    def _reserve(self, size_bytes: int) -> tuple[str, int]:
        """Create a file that counts in full from now on, for every process. Return its name and descriptor."""
        name, file = open_locked("", mode=0o600, dir_fd=self._folder)
        try:
            os.truncate(file, size_bytes)
        except BaseException:
            os.close(file)
            os.unlink(name, dir_fd=self._folder)
            raise
        with self._books:
            self._index.reserve(name, size_bytes)
        return name, file

    def _fill(self, file: int, header: bytes, data: memoryview) -> None:
        at = 0
        for part in (memoryview(header), data):
            while part:
                done = os.pwrite(file, part, at)
                at, part = at + done, part[done:]
        # If power fails, only the new name may get lost. Then the chunk is fetched again.
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # the arena has the bytes; the page cache need not
        self._stamp_ns = max(self._stamp_ns + 1, time.time_ns())
        os.utime(file, ns=(self._stamp_ns, self._stamp_ns))

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(OSError), self._changing():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
            with self._books:
                self._index.release(name)
