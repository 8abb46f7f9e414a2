"""The folder and the files of the disk tier: one chunk is a file with a header, then the chunk's bytes.

The folder is opened once and used by its descriptor, so no name in it leads out of it.
Everything a file contains is checked.

<what the settings name>/longshore-chunks/      0700, ours
    <cache key, hex>.chunk                      0600, one chunk (storage.disk.files)
    .longshore-<random>.part                    being written, locked by its writer
    .longshore-lock                             locked while the folder changes; says how often it has

The folder itself may belong to anybody (a volume); what is in it is only used when nobody else could have put it there.

One chunk as a file of the disk tier: a header, then the chunk's bytes. Whatever a file says is checked.

    0    8  magic, with the version of the format
    8    8  length of the chunk, bytes
    16  32  cache key of the chunk
    48  16  name of the hash, padded with zeros
    64  32  digest of the chunk, padded with zeros
    96   4  CRC-32 of all before; zeros up to 128

A chunk with a published digest is checked against that one, not against the header's. Without one, the header's digest
shows accidents only: that nobody else writes there is the folder's own business (`storage.disk.files`).
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
    """What the file says of itself."""

    key: bytes
    length_bytes: int
    hash_name: str  # one of MANIFEST_HASH_NAMES
    digest: bytes


def pack_header(header: ChunkHeader) -> bytes:
    """HEADER_BYTES bytes. Raises ValueError for what no header can say."""
    if len(header.key) != KEY_BYTES or header.hash_name not in MANIFEST_HASH_NAMES:
        raise ValueError(f"no header for a key of {len(header.key)} bytes and the hash {header.hash_name!r}")
    if len(header.digest) != DIGEST_SIZES[header.hash_name]:
        raise ValueError(f"{len(header.digest)} bytes are no {header.hash_name} digest")
    body = _BODY.pack(MAGIC, header.length_bytes, header.key, header.hash_name.encode(), header.digest)
    return (body + _CRC.pack(zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")


def unpack_header(data: bytes) -> ChunkHeader:
    """The header in the first bytes of a file. Raises DiskChunkUnusable when there is none."""
    if len(data) < HEADER_BYTES:
        raise DiskChunkUnusable("shorter than a header", size_bytes=len(data))
    body = data[: _BODY.size]
    magic, length_bytes, key, name, digest = _BODY.unpack(body)
    if magic != MAGIC:
        raise DiskChunkUnusable("not a chunk of this format")
    if _CRC.unpack_from(data, _BODY.size)[0] != zlib.crc32(body):
        raise DiskChunkUnusable("the header is damaged")
    hash_name = name.rstrip(b"\0").decode("ascii", "replace")
    if hash_name not in MANIFEST_HASH_NAMES:
        raise DiskChunkUnusable("a hash that is not known here", hash=quote(hash_name))
    return ChunkHeader(key, length_bytes, hash_name, digest[: DIGEST_SIZES[hash_name]])


def open_plain(name: str, folder: int) -> int:
    """Descriptor of a file of ours in the open `folder`, for reading: no link, no pipe, nobody else's.

    Raises DiskChunkUnusable; FileNotFoundError when there is none.
    """
    try:
        # NONBLOCK: opening a pipe that somebody put there must not hang.
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise DiskChunkUnusable(f"cannot be opened: {exc.strerror}", file=name) from exc
    info = os.fstat(file)
    if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
        return file
    os.close(file)
    raise DiskChunkUnusable("not a file of this user", file=name)


def read_chunk(file: int, key: bytes, parts: Sequence[memoryview], published: tuple[str, bytes] | None) -> None:
    """Fill `parts` with the chunk in the open file, and check it. `published`: hash name and digest, when there is one.

    Raises DiskChunkUnusable when it is not that chunk, whole; OSError when the disk does not read. `parts` may be
    overwritten then.
    """
    size_bytes = sum(len(part) for part in parts)
    found_bytes = os.fstat(file).st_size
    if found_bytes != HEADER_BYTES + size_bytes:
        raise DiskChunkUnusable("another size", expected=HEADER_BYTES + size_bytes, found=found_bytes)
    header = unpack_header(os.pread(file, HEADER_BYTES, 0))
    if header.key != key or header.length_bytes != size_bytes:
        raise DiskChunkUnusable("another chunk than its name says")
    hash_name, expected = published or (header.hash_name, header.digest)
    hasher = new_hasher(hash_name)
    at = HEADER_BYTES
    for part in parts:
        for piece in cut(part):
            _fill(file, piece, at)
            hasher.update(piece)
            at += len(piece)
    if hasher.digest() != expected:
        raise DiskChunkUnusable(f"another {hash_name} digest", expected=expected.hex(), found=hasher.hexdigest())


def _fill(file: int, piece: memoryview, at: int) -> None:
    done = 0
    while done < len(piece):
        read = os.preadv(file, [piece[done:]], at + done)
        if not read:
            raise DiskChunkUnusable("it was cut short while it was read")
        done += read


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
