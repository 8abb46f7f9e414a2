"""The folder of the disk tier, opened once and used by its descriptor: no name in it can lead out of it.

<what the settings name>/longshore-chunks/      0700, ours
    <cache key, hex>.chunk                      0600, one chunk (storage.disk.format)
    .longshore-<random>.part                    being written, locked by its writer
    .longshore-lock                             locked while the folder changes; says how often it has

The folder itself may belong to anybody (a volume); what is in it is only used when nobody else could have put it there.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

from storage.disk.format import KEY_BYTES, open_plain, read_chunk
from storage.errors import DiskChunkUnusable, DiskTierError

SUBFOLDER = "longshore-chunks"
LOCK_NAME = ".longshore-lock"
LOCK_PATIENCE_S = 10.0  # a holder does a few calls of the file system; one that is stopped must not stop us
_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.chunk")
_CHANGES = struct.Struct("<Q")


def chunk_name(key: bytes) -> str:
    """Name of the chunk's file."""
    return f"{key.hex()}.chunk"


def key_of(name: str) -> bytes | None:
    """The key in a name of ours; None for any other."""
    found = _NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def open_folder(path: str) -> int:
    """Descriptor of a folder that is ours alone. Raises DiskTierError."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise DiskTierError(f"cannot open the folder for chunks on disk: {exc.strerror}", path=path) from exc
    try:
        info = os.fstat(folder)
        if info.st_uid != os.geteuid():
            raise DiskTierError(
                "the folder for chunks on disk is another user's",
                hint="remove it, or set LONGSHORE_DISK_CACHE_DIR to another one",
                path=path,
                owner=info.st_uid,
            )
        if stat.S_IMODE(info.st_mode) != 0o700:
            os.fchmod(folder, 0o700)
    except OSError as exc:
        os.close(folder)
        raise DiskTierError(f"cannot protect the folder for chunks on disk: {exc.strerror}", path=path) from exc
    except DiskTierError:
        os.close(folder)
        raise
    return folder


def make_folder(parent: str) -> str:
    """Path of the tier's own folder in `parent`; both are made where they are missing. Raises DiskTierError."""
    path = os.path.join(parent, SUBFOLDER)
    try:
        os.makedirs(parent, exist_ok=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as exc:
        raise DiskTierError(
            f"cannot make the folder for chunks on disk: {exc.strerror}",
            hint="LONGSHORE_DISK_CACHE_DIR names a folder that this user can write to",
            path=path,
        ) from exc
    return path


class FolderLock:
    """One process at a time changes the folder, and the others see that it has changed. One thread at a time."""

    def __init__(self, folder: int) -> None:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder)
        self._seen = -1  # so the first one to hold it looks at the folder

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether somebody else has changed the folder since this process last held it. Raises OSError."""
        self._wait()
        try:
            yield self._seen < 0 or self._changes() != self._seen
        finally:
            flock(self._file, LOCK_UN)

    def looked(self) -> None:
        """This process knows what is in the folder now."""
        self._seen = self._changes()

    def changing(self) -> None:
        """Said before a change: were this process killed in between, the others would look in vain, not too little."""
        self._seen = (self._changes() + 1) % (1 << 63)
        os.pwrite(self._file, _CHANGES.pack(self._seen), 0)

    def close(self) -> None:
        os.close(self._file)

    def _changes(self) -> int:
        data = os.pread(self._file, _CHANGES.size, 0)
        return int(_CHANGES.unpack(data)[0]) % (1 << 63) if len(data) == _CHANGES.size else 0

    def _wait(self) -> None:
        give_up_s = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                return flock(self._file, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.005)


class DiskReader:
    """Reads chunks out of the folder; thread-safe. The writer may remove any of them at any time."""

    def __init__(self, path: str) -> None:
        """`path`: the tier's own folder (`DiskTier.path`). Raises DiskTierError."""
        self._folder = open_folder(path)

    def read(self, key: bytes, parts: Sequence[memoryview], published: tuple[str, bytes] | None) -> None:
        """Fill `parts` with the chunk, verified; see `read_chunk`. Raises DiskChunkUnusable, for a missing one too."""
        try:
            file = open_plain(chunk_name(key), self._folder)
        except FileNotFoundError as exc:
            raise DiskChunkUnusable("not there any more") from exc
        try:
            read_chunk(file, key, parts, published)
            now_ns = time.time_ns()  # (the kernel's own stamp is a few milliseconds coarse)
            os.utime(file, ns=(now_ns, now_ns))  # for whoever looks for the least recently used one
        except OSError as exc:
            raise DiskChunkUnusable(f"the disk does not read it: {exc.strerror}") from exc
        finally:
            os.close(file)

    def close(self) -> None:
        """No read may be under way."""
        os.close(self._folder)
