"""One chunk as a file of the disk tier: a header, then the chunk's bytes. Whatever a file says is checked.

    0    8  magic, with the version of the format
    8    8  length of the chunk, bytes
    16  32  cache key of the chunk
    48  16  name of the hash, padded with zeros
    64  32  digest of the chunk, padded with zeros
    96   4  CRC-32 of all before; zeros up to 128

A chunk with a published digest is checked against that one, not against the header's. Without one, the header's digest
shows accidents only: that nobody else writes there is the folder's own business (`storage.disk.folder`).
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from storage.checksum import DIGEST_SIZES, MANIFEST_HASH_NAMES, new_hasher
from storage.errors import DiskChunkUnusable
from storage.object_store import cut
from storage.problems import quote

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
