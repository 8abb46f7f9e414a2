"""Chunks for the disk tier, made from a number, and the chunks that a folder of the tier holds."""

from __future__ import annotations

import os

from storage.checksum import digest_of
from storage.disk.files import LOCK_NAME, DiskReader, key_of
from storage.disk.tier import DiskTier, Written


def chunk_of(number: int, size_bytes: int = 1000) -> tuple[bytes, bytes]:
    """(cache key, content) of chunk `number`."""
    content = (number.to_bytes(4, "little") * (size_bytes // 4 + 1))[:size_bytes]
    return digest_of("blake3", b"key" + content), content


def write(tier: DiskTier, number: int, size_bytes: int = 1000) -> Written:
    key, content = chunk_of(number, size_bytes)
    return tier.write(key, "blake3", digest_of("blake3", content), memoryview(content))


def read(reader: DiskReader, number: int, size_bytes: int = 1000) -> bytes:
    """Return the chunk from the reader; raises what the reader raises."""
    key, content = chunk_of(number, size_bytes)
    buffer = bytearray(size_bytes)
    reader.read(key, [memoryview(buffer)], ("blake3", digest_of("blake3", content)))
    return bytes(buffer)


def folder_bytes(path: str) -> int:
    """Bytes of all chunks, finished or being written, as the file system has them."""
    total = 0
    for name in os.listdir(path):
        if name != LOCK_NAME:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def chunks_in(path: str) -> set[bytes]:
    return {key for name in os.listdir(path) if (key := key_of(name)) is not None}
