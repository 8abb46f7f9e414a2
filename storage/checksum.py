"""Digests of bytes, by name: two for chunks and manifests, and those that object stores themselves speak.

    blake3       32 bytes   the default of a manifest: cryptographic, about 3.5 GB/s on one core
    xxh3_128     16 bytes   faster, against accidents only: another content with the same digest is made in microseconds
    sha256, md5, crc32, crc32c, crc64nvme        what a store says of its objects (ObjectInfo.checksums)

Digests are bytes in the order in which the algorithm's hex form is written (CRCs: big-endian, as in S3).
Hashing releases the GIL for buffers of a few KiB and more; one hasher belongs to one thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import xxhash
from awscrt import checksums as _crt
from blake3 import blake3

Buffer = bytes | bytearray | memoryview


class Hasher(Protocol):
    """A running digest. Feeding a buffer in pieces gives the same as feeding it whole."""

    @property
    def digest_size(self) -> int:
        """Length of `digest()`, in bytes."""
        ...

    def update(self, data: Buffer, /) -> object: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


class _Crc:
    """A CRC from awscrt in the shape of hashlib's objects."""

    def __init__(self, function: Callable[..., int], digest_size: int) -> None:
        self.digest_size = digest_size
        self._function = function
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self.digest_size, "big")

    def hexdigest(self) -> str:
        return self.digest().hex()


_NEW: dict[str, Callable[[], Hasher]] = {
    "blake3": lambda: blake3(),
    "xxh3_128": lambda: xxhash.xxh3_128(),
    "sha256": lambda: hashlib.sha256(),
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "crc32": lambda: _Crc(_crt.crc32, 4),
    "crc32c": lambda: _Crc(_crt.crc32c, 4),
    "crc64nvme": lambda: _Crc(_crt.crc64nvme, 8),
}

HASH_NAMES: frozenset[str] = frozenset(_NEW)  # every name that new_hasher knows
MANIFEST_HASH_NAMES: frozenset[str] = frozenset({"blake3", "xxh3_128"})  # those a manifest may use
COLLISION_RESISTANT: frozenset[str] = frozenset({"blake3"})  # of those, what signatures and shared caches may rely on
DIGEST_SIZES: dict[str, int] = {name: new().digest_size for name, new in _NEW.items()}  # bytes, by name


def new_hasher(name: str) -> Hasher:
    """A fresh hasher. Raises ValueError for a name that is not in HASH_NAMES."""
    try:
        return _NEW[name]()
    except KeyError:
        raise ValueError(f"unknown hash {name!r}; known: {', '.join(sorted(HASH_NAMES))}") from None


def digest_of(name: str, data: Buffer) -> bytes:
    """The digest of one whole buffer. Raises ValueError for an unknown name."""
    hasher = new_hasher(name)
    hasher.update(data)
    return hasher.digest()
