"""The folder and the files of the disk tier. One chunk is one file: a header, then the chunk's bytes.

    <configured folder>/longshore-chunks/           mode 0700, owned by this user
        <cache key, hex>.chunk                      mode 0600, one chunk
        .longshore-<random>.part                    being written, locked by its writer
        .longshore-lock                             locked while the folder changes; counts the changes

The configured folder may belong to any user (a volume). The subfolder is used only if nobody else can write to it. It
is opened once and used by its descriptor, so that no name in it leads out of it.

A file of a chunk:

    0    8  magic, with the version of the format
    8    8  length of the chunk, bytes
    16  32  cache key of the chunk
    48  16  name of the hash, padded with zeros
    64  32  digest of the chunk, padded with zeros
    96   4  CRC-32 of all before; zeros up to 128

Everything in a file is checked. A chunk with a published digest is compared with that digest, not with the header's.
For other chunks the header's digest detects accidents only, and the folder's permissions keep other users out.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

from storage.checksum import DIGEST_SIZES, MANIFEST_HASH_NAMES, new_hasher
from storage.errors import DiskChunkUnusable, DiskTierError
from storage.problems import quote
from storage.stores.object_store import cut

HEADER_BYTES = 128
KEY_BYTES = 32
MAGIC = b"LSCHUNK\x01"
_BODY = struct.Struct("<8sQ32s16s32s")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The header of a chunk's file."""

    key: bytes
    length_bytes: int
    hash_name: str  # one of MANIFEST_HASH_NAMES
    digest: bytes


def pack_header(header: ChunkHeader) -> bytes:
    """Return a header as HEADER_BYTES bytes. Raises ValueError for a key, hash or digest that is impossible."""
    if len(header.key) != KEY_BYTES or header.hash_name not in MANIFEST_HASH_NAMES:
        raise ValueError(f"no header for a key of {len(header.key)} bytes and the hash {header.hash_name!r}")
    if len(header.digest) != DIGEST_SIZES[header.hash_name]:
        raise ValueError(f"a {header.hash_name} digest cannot have {len(header.digest)} bytes")
    body = _BODY.pack(MAGIC, header.length_bytes, header.key, header.hash_name.encode(), header.digest)
    return (body + _CRC.pack(zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")


def unpack_header(data: bytes) -> ChunkHeader:
    """Return the header in the first bytes of a file. Raises DiskChunkUnusable if there is none."""
    if len(data) < HEADER_BYTES:
        raise DiskChunkUnusable("the file is shorter than a header", size_bytes=len(data))
    body = data[: _BODY.size]
    magic, length_bytes, key, name, digest = _BODY.unpack(body)
    if magic != MAGIC:
        raise DiskChunkUnusable("the file is not a chunk of this format")
    if _CRC.unpack_from(data, _BODY.size)[0] != zlib.crc32(body):
        raise DiskChunkUnusable("the file's header is damaged")
    hash_name = name.rstrip(b"\0").decode("ascii", "replace")
    if hash_name not in MANIFEST_HASH_NAMES:
        raise DiskChunkUnusable("the file's header names an unknown hash", hash=quote(hash_name))
    return ChunkHeader(key, length_bytes, hash_name, digest[: DIGEST_SIZES[hash_name]])


def open_plain(name: str, folder: int) -> int:
    """Open a file in the open `folder` for reading, and return its descriptor. No links, pipes or files of other users.

    Raises DiskChunkUnusable, and FileNotFoundError if there is none.
    """
    try:
        # NONBLOCK: opening a pipe in this folder must not hang.
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise DiskChunkUnusable(f"the file cannot be opened: {exc.strerror}", file=name) from exc
    info = os.fstat(file)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
        return file
    os.close(file)
    raise DiskChunkUnusable("not a regular file of this user", file=name)


def read_chunk(file: int, key: bytes, parts: Sequence[memoryview], published: tuple[str, bytes] | None) -> None:
    """Fill `parts` with the chunk in the open file, and verify it. `published` is the hash name and digest, if any.

    Raises DiskChunkUnusable unless it is exactly that chunk, and OSError if the disk fails. `parts` may have been
    overwritten then.
    """
    size_bytes = sum(len(part) for part in parts)
    found_bytes = os.fstat(file).st_size
    if found_bytes != HEADER_BYTES + size_bytes:
        raise DiskChunkUnusable("the file has a wrong size", expected=HEADER_BYTES + size_bytes, found=found_bytes)
    header = unpack_header(os.pread(file, HEADER_BYTES, 0))
    if header.key != key or header.length_bytes != size_bytes:
        raise DiskChunkUnusable("the file contains another chunk than its name says")
    hash_name, expected = published or (header.hash_name, header.digest)
    hasher = new_hasher(hash_name)
    at = HEADER_BYTES
    for part in parts:
        for piece in cut(part):
            _fill(file, piece, at)
            hasher.update(piece)
            at += len(piece)
    if hasher.digest() != expected:
        raise DiskChunkUnusable(f"the {hash_name} digest is wrong", expected=expected.hex(), found=hasher.hexdigest())


def _fill(file: int, piece: memoryview, at: int) -> None:
    done = 0
    while done < len(piece):
        read = os.preadv(file, [piece[done:]], at + done)
        if not read:
            raise DiskChunkUnusable("the file became shorter during the read")
        done += read


SUBFOLDER = "longshore-chunks"
LOCK_NAME = ".longshore-lock"
LOCK_PATIENCE_S = 10.0  # a holder makes few calls to the file system, and a stopped process must not stop us
_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.chunk")
_CHANGES = struct.Struct("<Q")


def chunk_name(key: bytes) -> str:
    """Return the name of the chunk's file."""
    return f"{key.hex()}.chunk"


def key_of(name: str) -> bytes | None:
    """Return the key in the name of a chunk's file; None for any other name."""
    found = _NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


def open_folder(path: str) -> int:
    """Open a folder that only this user can access, and return its descriptor. Raises DiskTierError."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise DiskTierError(f"cannot open the folder for chunks on disk: {exc.strerror}", path=path) from exc
    try:
        info = os.fstat(folder)
        if info.st_uid != os.geteuid():
            raise DiskTierError(
                "the folder for chunks on disk belongs to another user",
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
    """Create the tier's folder in `parent`, and `parent` if missing. Return its path. Raises DiskTierError."""
    path = os.path.join(parent, SUBFOLDER)
    try:
        os.makedirs(parent, exist_ok=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as exc:
        raise DiskTierError(
            f"cannot create the folder for chunks on disk: {exc.strerror}",
            hint="set LONGSHORE_DISK_CACHE_DIR to a folder that this user can write to",
            path=path,
        ) from exc
    return path


class FolderLock:
    """A lock by which one process at a time changes the folder, and others notice the change. One thread at a time."""

    def __init__(self, folder: int) -> None:
        """Open the lock file in `folder`. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder)
        self._seen = -1  # so that the first `held` reports a change

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock; yield whether another process has changed the folder since the last time. Raises OSError."""
        self._wait()
        try:
            yield self._seen < 0 or self._changes() != self._seen
        finally:
            flock(self._file, LOCK_UN)

    def looked(self) -> None:
        """Note that this process knows what is in the folder now."""
        self._seen = self._changes()

    def changing(self) -> None:
        """Count a change before it is made. If this process is killed in between, others list the folder in vain."""
        self._seen = (self._changes() + 1) % (1 << 63)
        os.pwrite(self._file, _CHANGES.pack(self._seen), 0)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._file)

    def _changes(self) -> int:
        data = os.pread(self._file, _CHANGES.size, 0)
        return int(_CHANGES.unpack(data)[0]) % (1 << 63) if len(data) == _CHANGES.size else 0

    def _wait(self) -> None:
        deadline_s = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                return flock(self._file, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.005)


class DiskReader:
    """Reads chunks from the folder. Thread-safe. The writer may remove any chunk at any time."""

    def __init__(self, path: str) -> None:
        """Open the tier's own folder at `path` (`DiskTier.path`). Raises DiskTierError."""
        self._folder = open_folder(path)

    def read(self, key: bytes, parts: Sequence[memoryview], published: tuple[str, bytes] | None) -> None:
        """Fill `parts` with the verified chunk (see `read_chunk`). Raises DiskChunkUnusable, also for a missing one."""
        file = self._open(key)
        try:
            read_chunk(file, key, parts, published)
            now_ns = time.time_ns()  # the kernel's own timestamps are some milliseconds coarse
            os.utime(file, ns=(now_ns, now_ns))  # so that writers find the least recently used chunk
        except OSError as exc:
            raise DiskChunkUnusable(f"the disk cannot read the file: {exc.strerror}") from exc
        finally:
            os.close(file)

    def open_bytes(self, key: bytes, size_bytes: int) -> tuple[int, int]:
        """Return (descriptor, offset) of a chunk's bytes, which nobody has checked. The caller closes it.

        Raises DiskChunkUnusable.
        """
        file = self._open(key)
        if os.fstat(file).st_size != HEADER_BYTES + size_bytes:
            os.close(file)
            raise DiskChunkUnusable("the file has a wrong size", expected=HEADER_BYTES + size_bytes)
        return file, HEADER_BYTES

    def _open(self, key: bytes) -> int:
        try:
            return open_plain(chunk_name(key), self._folder)
        except FileNotFoundError as exc:
            raise DiskChunkUnusable("the chunk's file does not exist") from exc

    def close(self) -> None:
        """Close the folder. No read may be running."""
        os.close(self._folder)
