"""Which chunks are on disk, in order of their last use, and what has to go for a new one. Pure: no file is touched.

How a disk tier stands and what it has done, in numbers.

Verified chunks on disk: what outlives the arena, the node's agent and the cluster. LRU within a budget of bytes.

    write(key, ...)   room made -> temporary file, full size at once -> bytes -> fsync -> renamed to its name
    key in tier       whether there is such a file; reading is `storage.disk.files.DiskReader`'s, and verifies

Several processes may use one folder: each change of it is made under a lock on a file in it, and whoever finds that
somebody else has changed it looks again. A process that is killed leaves temporary files, which the next look removes;
a chunk is visible whole or not at all. A full disk is no error: the chunk is not kept, and that is counted.

Verified chunks on disk: what outlives the arena, the node's agent and the cluster. LRU within a budget of bytes.

    write(key, ...)   room made -> temporary file, full size at once -> bytes -> fsync -> renamed to its name
    key in tier       whether there is such a file; reading is `storage.disk.files.DiskReader`'s, and verifies

Several processes may use one folder: each change of it is made under a lock on a file in it, and whoever finds that
somebody else has changed it looks again. A process that is killed leaves temporary files, which the next look removes;
a chunk is visible whole or not at all. A full disk is no error: the chunk is not kept, and that is counted.
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
    """Sizes of finished files by key, least recently used first, and of files that are being written, by name.

    The law: what fits goes in only after enough was taken out, so `used_bytes` never rises above `budget_bytes`.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0  # finished files and reservations
        self._chunks: OrderedDict[bytes, int] = OrderedDict()
        self._reserved: dict[str, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Finished ones, least recently used first."""
        return tuple(self._chunks)

    def replace(
        self,
        chunks: Iterable[tuple[bytes, int]],
        reserved: Iterable[tuple[str, int]],
        *,
        kept: bool = False,
        gone: Iterable[bytes] = (),
    ) -> None:
        """What a look at the folder has shown; `chunks` least recently used first. `kept`: it was a look for what is
        new, and what was known is still there but for what is `gone`.
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
        """Keys that are out now, so that `size_bytes` more fit; None, and no change, when nothing helps."""
        fixed_bytes = self.used_bytes - sum(self._chunks.values()) if self._reserved else 0
        if fixed_bytes + size_bytes > self.budget_bytes:
            return None
        gone = []
        while self.used_bytes + size_bytes > self.budget_bytes:
            gone.append(self.drop_oldest())
        return gone

    def drop_oldest(self) -> bytes:
        """The key of the one used least recently, which is out now. Raises KeyError when there is none."""
        key, size_bytes = self._chunks.popitem(last=False)
        self.used_bytes -= size_bytes
        return key

    def reserve(self, name: str, size_bytes: int) -> None:
        """A file of that size is about to be written; `make_room` was asked first."""
        self.release(name)
        self._reserved[name] = size_bytes
        self.used_bytes += size_bytes

    def release(self, name: str) -> None:
        """Nothing came of it, or it is finished."""
        self.used_bytes -= self._reserved.pop(name, 0)

    def add(self, key: bytes, size_bytes: int) -> None:
        """A finished file, used last of all."""
        self.remove(key)
        self._chunks[key] = size_bytes
        self.used_bytes += size_bytes

    def touch(self, key: bytes) -> None:
        """It was used last of all."""
        if key in self._chunks:
            self._chunks.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """It is not there any more."""
        self.used_bytes -= self._chunks.pop(key, 0)


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counts since the tier was opened by this process; `budget_bytes`, `used_bytes` and `files` are now."""

    budget_bytes: int
    used_bytes: int  # files that are being written included
    files: int
    written_chunks: int
    evicted_chunks: int
    unkept_chunks: int  # that should be there and are not


LOOK_SHARE = 100  # of the time, at most one part in so many goes into looking at every file of a large folder
LARGE = 1000  # files
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Written(enum.Enum):
    """What became of a chunk that was to be kept."""

    DONE = "done"
    PRESENT = "present"  # it was there already
    NO_ROOM = "no room"  # larger than the budget, or others are writing all that fits
    FULL = "full"  # the disk has no space left, or the process may write no larger file
    FAILED = "failed"  # the disk did not do it


class DiskTier:
    """The writer's side. Thread-safe; `in` and `touch` never wait for the disk."""

    def __init__(self, parent: str, budget_bytes: int = 0) -> None:
        """`budget_bytes` 0: half of what the tier has and could have. Raises DiskTierError."""
        self.path = make_folder(parent)
        self.counts: Counter[Written] = Counter()
        self.evicted_chunks = 0
        self.last_error = ""  # of the last write that was not done
        self._folder = open_folder(self.path)
        self._index = DiskIndex(budget_bytes)
        self._books = threading.Lock()  # around the index, never around the disk
        self._writing = threading.Lock()  # one change at a time in this process
        self._stamp_ns = 0
        self._look_again_s = 0.0  # at every file
        self._eviction_helps = True  # when the disk is full
        try:
            self._lock = FolderLock(self._folder)
            with self._changing():
                if not budget_bytes:
                    self._index.budget_bytes = (free_bytes(self.path) + self._index.used_bytes) // 2
        except OSError as exc:
            self.close()
            raise DiskTierError(
                f"the folder for chunks on disk cannot be used: {exc.strerror or exc}", path=self.path
            ) from exc

    @property
    def budget_bytes(self) -> int:
        return self._index.budget_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those being written included, as far as this process knows."""
        return self._index.used_bytes

    @property
    def unkept_chunks(self) -> int:
        """Writes that came to nothing."""
        return self.counts[Written.NO_ROOM] + self.counts[Written.FULL] + self.counts[Written.FAILED]

    def stats(self) -> DiskStats:
        """How it stands."""
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
        """The chunk is about to be read (its reader notes that on disk)."""
        with self._books:
            self._index.touch(key)

    def keys(self) -> tuple[bytes, ...]:
        """Chunks that are there, least recently used first."""
        with self._books:
            return self._index.keys

    def write(self, key: bytes, hash_name: str, digest: bytes, data: memoryview) -> Written:
        """Keep a verified chunk. Never raises for what a disk can do."""
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
        """Take out what is over the budget; a tier that only looks leaves it there. Never raises for the disk."""
        with contextlib.suppress(OSError), self._changing():
            self._evict(0)

    def discard(self, key: bytes) -> None:
        """The file is not what its name says: it goes. Never raises for what a disk can do."""
        with contextlib.suppress(OSError), self._changing():
            self._unlink(key)
            with self._books:
                self._index.remove(key)

    def close(self) -> None:
        """Nothing is removed. No other call may be under way."""
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
            if key in self:  # by another process, meanwhile
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
                self._eviction_helps = False  # until it has: a disk that is full of other things empties no cache
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
        """Around every change: nobody else makes one, and what others have changed is known. Raises OSError."""
        with self._writing, self._lock.held() as changed:
            if changed:
                self._look()
                self._lock.looked()
            self._lock.changing()
            yield

    def _look(self) -> None:
        """What is in the folder; what killed writers left is removed.

        Where several processes write to a large folder, each looks after each write of another: then only at names that
        are new, as the files of known ones never change. Their order of use is looked at once in a while.
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
        """Make room for so many bytes more. False, and nothing is gone, when that cannot be."""
        with self._books:
            gone = self._index.make_room(size_bytes)
        for key in gone or ():
            self.evicted_chunks += 1
            self._unlink(key)
        return gone is not None

    def _give_back(self, size_bytes: int) -> bool:
        """The disk is full before the budget is: older chunks make room. False when there are none, or it is no use."""
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
        """Name and descriptor of a new file that counts in full from here on, for every process."""
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
        # (The name alone may get lost with the power: then the chunk is fetched again, and that is all.)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # the arena has it: no second copy in memory
        self._stamp_ns = max(self._stamp_ns + 1, time.time_ns())
        os.utime(file, ns=(self._stamp_ns, self._stamp_ns))

    def _cancel(self, name: str) -> None:
        with contextlib.suppress(OSError), self._changing():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
            with self._books:
                self._index.release(name)
