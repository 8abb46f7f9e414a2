"""Digests of bytes, by name: two for chunks and manifests, and those that object stores use.

The CRCs of two neighbouring runs combine to the CRC of both, without the bytes.

    blake3       32 bytes   the default of a manifest: cryptographic, about 3.5 GB/s on one core
    xxh3_128     16 bytes   faster, against accidents only: another content with the same digest is made in microseconds
    sha256, md5, crc32, crc32c, crc64nvme        what a store says of its objects (ObjectInfo.checksums)

Digests are bytes in the order in which the algorithm's hex form is written (CRCs: big-endian, as in S3).
Hashing releases the GIL for buffers of a few KiB and more; one hasher belongs to one thread.

CRCs of two runs of bytes as the CRC of both in a row, without the bytes: arithmetic with polynomials over GF(2).

    crc(A + B) = crc(A) * x^(8 * len(B))  xor  crc(B)      modulo the CRC's polynomial

This holds for CRCs that begin with all ones and end inverted, as all of S3's do. Numbers are reflected here, as the
algorithms give them: the highest bit is the coefficient of x^0. So chunks can be hashed by different processes, in any
order, and what comes out is compared with the checksum that a store keeps of the whole object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
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


_POLYNOMIALS: dict[str, tuple[int, int]] = {  # bits, reflected polynomial
    "crc32": (32, 0xEDB88320),
    "crc32c": (32, 0x82F63B78),
    "crc64nvme": (64, 0x9A6C9329AC4BC9B5),
}

COMBINABLE: frozenset[str] = frozenset(_POLYNOMIALS)  # names of hashes (`storage.checksum`) that can be combined


def combine(name: str, first: bytes, second: bytes, second_bytes: int) -> bytes:
    """The CRC of A + B from the CRCs of A and of B and the length of B.

    Digests as `Hasher.digest` gives them, big-endian. Raises ValueError for a hash that cannot be combined.
    """
    if name not in _POLYNOMIALS:
        raise ValueError(f"digests of {name!r} cannot be combined; those of {', '.join(sorted(COMBINABLE))} can")
    bits, polynomial = _POLYNOMIALS[name]
    moved = _multiply(int.from_bytes(first, "big"), _shift(name, second_bytes), bits, polynomial)
    return (moved ^ int.from_bytes(second, "big")).to_bytes(bits // 8, "big")


def combine_all(name: str, runs: Iterable[tuple[bytes, int]]) -> bytes:
    """The CRC of runs that follow each other, from (CRC, length in bytes) of each; of nothing, that of no bytes."""
    bits, _ = _POLYNOMIALS[name]
    whole = bytes(bits // 8)
    for digest, size_bytes in runs:
        whole = combine(name, whole, digest, size_bytes)
    return whole


@lru_cache(maxsize=4096)  # chunks of a model have few sizes; each costs some 30 multiplications
def _shift(name: str, size_bytes: int) -> int:
    """x^(8 * size_bytes), by squaring."""
    bits, polynomial = _POLYNOMIALS[name]
    power, square = 1 << (bits - 1), 1 << (bits - 1 - 8)  # x^0, x^8
    while size_bytes:
        if size_bytes & 1:
            power = _multiply(power, square, bits, polynomial)
        square = _multiply(square, square, bits, polynomial)
        size_bytes >>= 1
    return power


def _multiply(left: int, right: int, bits: int, polynomial: int) -> int:
    """The product of two polynomials modulo the third."""
    product = 0
    for place in range(bits - 1, -1, -1):
        if left >> place & 1:
            product ^= right
        right = right >> 1 ^ polynomial if right & 1 else right >> 1
    return product
