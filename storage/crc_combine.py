"""CRCs of two runs of bytes as the CRC of both in a row, without the bytes: arithmetic with polynomials over GF(2).

    crc(A + B) = crc(A) * x^(8 * len(B))  xor  crc(B)      modulo the CRC's polynomial

This holds for CRCs that begin with all ones and end inverted, as all of S3's do. Numbers are reflected here, as the
algorithms give them: the highest bit is the coefficient of x^0. So chunks can be hashed by different processes, in any
order, and what comes out is compared with the checksum that a store keeps of the whole object.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

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
