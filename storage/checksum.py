"""Digests of bytes by name, and the checksums that object stores keep of whole objects.

    blake3       32 bytes   the default of a manifest: cryptographic, about 3.5 GB/s on one core
    xxh3_128     16 bytes   faster, but detects accidents only: a forgery with the same digest takes microseconds
    sha256, md5, crc32, crc32c, crc64nvme        checksums that a store keeps of its objects (ObjectInfo.checksums)

Digests are bytes in the order of the algorithm's hex form (CRCs: big-endian, as in S3). Hashing releases the GIL for
buffers of a few KiB and more. One hasher belongs to one thread.

The CRC of two neighbouring runs of bytes follows from their CRCs, by arithmetic with polynomials over GF(2):

    crc(A + B) = crc(A) * x^(8 * len(B))  xor  crc(B)      modulo the CRC's polynomial

This holds for CRCs that begin with all ones and end inverted, as all of S3's do. Numbers are reflected here, as the
algorithms return them: the highest bit is the coefficient of x^0. So different processes can hash chunks in any order,
and the result is compared with the checksum that a store keeps of the object:

    whole object    crc(chunk) ... crc(chunk) --combine--> digest
    composite       crc(chunk) ... --combine--> digest of each part --> digest over the parts' digests in order

A *span* is a run of bytes with its digest. A chunk is one span, or several if the end of a part lies inside it. Digests
other than CRCs cannot be combined. They need a span that is the whole object, or the whole part.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import xxhash
from blake3 import blake3

from storage.errors import AccessDenied, StoreError, UnsupportedStore
from storage.stores.object_store import ByteRange, KeepsParts, ObjectInfo, ObjectStore
from storage.stores.requests import RetryPolicy, with_retries

Buffer = bytes | bytearray | memoryview


class Hasher(Protocol):
    """A running digest. Feeding a buffer in pieces gives the same digest as feeding it whole."""

    @property
    def digest_size(self) -> int:
        """Return the length of `digest()` in bytes."""
        ...

    def update(self, data: Buffer, /) -> object: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


class _Crc:
    """A CRC from awscrt with the interface of hashlib's objects."""

    def __init__(self, name: str) -> None:
        from awscrt import checksums  # not at the top: it takes 40 ms of each worker, and few loads need a CRC

        self.digest_size = DIGEST_SIZES[name]
        self._function: Callable[..., int] = getattr(checksums, name)
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
    "crc32": lambda: _Crc("crc32"),
    "crc32c": lambda: _Crc("crc32c"),
    "crc64nvme": lambda: _Crc("crc64nvme"),
}

HASH_NAMES: frozenset[str] = frozenset(_NEW)  # every name that new_hasher accepts
MANIFEST_HASH_NAMES: frozenset[str] = frozenset({"blake3", "xxh3_128"})  # the names that a manifest may use
COLLISION_RESISTANT: frozenset[str] = frozenset({"blake3"})  # those that signatures and shared caches may rely on
DIGEST_SIZES: dict[str, int] = {  # bytes, by name
    "blake3": 32,
    "xxh3_128": 16,
    "sha256": 32,
    "md5": 16,
    "crc32": 4,
    "crc32c": 4,
    "crc64nvme": 8,
}


def new_hasher(name: str) -> Hasher:
    """Return a new hasher. Raises ValueError for a name that is not in HASH_NAMES."""
    try:
        return _NEW[name]()
    except KeyError:
        raise ValueError(f"unknown hash {name!r}; known: {', '.join(sorted(HASH_NAMES))}") from None


def digest_of(name: str, data: Buffer) -> bytes:
    """Return the digest of one whole buffer. Raises ValueError for an unknown name."""
    hasher = new_hasher(name)
    hasher.update(data)
    return hasher.digest()


_POLYNOMIALS: dict[str, tuple[int, int]] = {  # bits, reflected polynomial
    "crc32": (32, 0xEDB88320),
    "crc32c": (32, 0x82F63B78),
    "crc64nvme": (64, 0x9A6C9329AC4BC9B5),
}

COMBINABLE: frozenset[str] = frozenset(_POLYNOMIALS)  # names of hashes that can be combined


def combine(name: str, first: bytes, second: bytes, second_bytes: int) -> bytes:
    """Return the CRC of A + B from the CRCs of A and of B and the length of B.

    Digests are big-endian, as `Hasher.digest` returns them. Raises ValueError for a hash that cannot be combined.
    """
    if name not in _POLYNOMIALS:
        raise ValueError(f"digests of {name!r} cannot be combined; those of {', '.join(sorted(COMBINABLE))} can")
    bits, polynomial = _POLYNOMIALS[name]
    moved = _multiply(int.from_bytes(first, "big"), _shift(name, second_bytes), bits, polynomial)
    return (moved ^ int.from_bytes(second, "big")).to_bytes(bits // 8, "big")


def combine_all(name: str, runs: Iterable[tuple[bytes, int]]) -> bytes:
    """Return the CRC of consecutive runs from the (CRC, length in bytes) of each; without runs, that of no bytes."""
    bits, _ = _POLYNOMIALS[name]
    whole = bytes(bits // 8)
    for digest, size_bytes in runs:
        whole = combine(name, whole, digest, size_bytes)
    return whole


@lru_cache(maxsize=4096)  # chunks of a model have few sizes, and each costs some 30 multiplications
def _shift(name: str, size_bytes: int) -> int:
    """Return x^(8 * size_bytes) modulo the polynomial, by squaring."""
    bits, polynomial = _POLYNOMIALS[name]
    power, square = 1 << (bits - 1), 1 << (bits - 1 - 8)  # x^0, x^8
    while size_bytes:
        if size_bytes & 1:
            power = _multiply(power, square, bits, polynomial)
        square = _multiply(square, square, bits, polynomial)
        size_bytes >>= 1
    return power


def _multiply(left: int, right: int, bits: int, polynomial: int) -> int:
    """Return the product of two polynomials modulo a third."""
    product = 0
    for place in range(bits - 1, -1, -1):
        if left >> place & 1:
            product ^= right
        right = right >> 1 ^ polynomial if right & 1 else right >> 1
    return product


Span = tuple[int, int, bytes]  # first byte, first byte after, digest


@dataclass(frozen=True, slots=True)
class StoreChecksum:
    """The checksum that a store keeps of an object."""

    hash_name: str  # one of HASH_NAMES
    digest: bytes  # of the object's bytes or, if there are parts, of the parts' digests in order
    part_ends: tuple[int, ...] = ()  # of a composite checksum: the end of each part, the last one the object's
    certain: bool = True  # False for an ETag, which is the MD5 of the bytes on most servers, but no server promises it
    known: tuple[Span, ...] = ()  # spans that were read during planning: the header

    @property
    def combines(self) -> bool:
        """Return whether digests of chunks can be combined to it."""
        return self.hash_name in COMBINABLE

    def knowing(self, data: bytes) -> StoreChecksum:
        """Return the same checksum with the digests of `data`, the first bytes of the object."""
        hasher = SpanHasher(self, ByteRange(0, len(data)))
        hasher.update(data)
        return replace(self, known=hasher.spans())

    def found(self, size_bytes: int, spans: Iterable[Span]) -> bytes | None:
        """Return the digest that an object with these spans has; None unless they cover all its bytes, once each."""
        ordered = sorted(spans)
        parts = []
        for start, end in pairwise((0, *(self.part_ends or (size_bytes,)))):
            low, high = bisect_left(ordered, (start,)), bisect_left(ordered, (end,))
            part = self._part(start, end, ordered[low:high])
            if part is None:
                return None
            parts.append(part)
        return digest_of(self.hash_name, b"".join(parts)) if self.part_ends else parts[0]

    def _part(self, start: int, end: int, spans: Sequence[Span]) -> bytes | None:
        edges = [start, *(span_end for _, span_end, _ in spans)]
        if edges[-1] != end or any(span[0] != edge for span, edge in zip(spans, edges, strict=False)):
            return None
        if self.combines:
            return combine_all(self.hash_name, ((digest, high - low) for low, high, digest in spans))
        return spans[0][2] if len(spans) == 1 else None


class SpanHasher:
    """A hasher for one range of an object that returns a digest for each of its spans."""

    def __init__(self, checksum: StoreChecksum, byte_range: ByteRange) -> None:
        ends = checksum.part_ends
        inside = ends[bisect_right(ends, byte_range.start) : bisect_left(ends, byte_range.end)]
        self._name = checksum.hash_name
        self._edges = (byte_range.start, *inside, byte_range.end)
        self._hashers = [new_hasher(self._name) for _ in self._edges[1:]]
        self._at = byte_range.start
        self._now = 0  # index of the span that contains `_at`

    def update(self, data: Buffer, /) -> None:
        """Take the next bytes. Raises ValueError for more than the range has."""
        view = memoryview(data)
        if self._at + len(view) > self._edges[-1]:
            raise ValueError("more bytes than the range has")
        while len(view):
            count = min(len(view), self._edges[self._now + 1] - self._at)
            self._hashers[self._now].update(view[:count])
            self._at += count
            self._now += self._at == self._edges[self._now + 1]
            view = view[count:]

    def spans(self) -> tuple[Span, ...]:
        """Return the spans in order. Raises ValueError before all bytes have been added."""
        if self._at != self._edges[-1]:
            raise ValueError(f"{self._edges[-1] - self._at} bytes of the range are missing")
        edges = zip(pairwise(self._edges), self._hashers, strict=True)
        return tuple((start, end, hasher.digest()) for (start, end), hasher in edges)


NO_CHECKSUM = "the store keeps no checksum of it"
NOT_COMBINABLE = "the store keeps no checksum of it that chunks can be combined to"
_COMBINABLE = ("crc64nvme", "crc32c", "crc32")  # in order of preference: the widest, then the cheapest
_WHOLE_ONLY = ("sha256", "md5", "etag_md5")  # usable only if one chunk is the whole object


@dataclass(frozen=True, slots=True)
class AskedChecksum:
    """The result of asking a store for a checksum."""

    checksum: StoreChecksum | None
    reason: str = ""  # why there is no checksum

    def knowing(self, head: bytes) -> AskedChecksum:
        """Add the digest of the object's first bytes, which no rank reads, if chunks can be combined."""
        if self.checksum is None or not self.checksum.combines:
            return self
        return AskedChecksum(self.checksum.knowing(head))


def ask_checksum(store: ObjectStore, info: ObjectInfo, chunk_bytes: int, policy: RetryPolicy) -> AskedChecksum:
    """Ask for the checksum by which a load in chunks of `chunk_bytes` can check the object. Sends two requests at most.

    It is no error if the store refuses. Then the object is not checked.
    """
    try:
        now = with_retries(lambda: store.stat(info.key), policy)
        if (now.etag, now.size_bytes) != (info.etag, info.size_bytes):
            return AskedChecksum(None, "it was replaced while the load was planned")  # and its reads will fail
        found = _whole(now, chunk_bytes) or _composite(store, now, policy)
    except (AccessDenied, UnsupportedStore):
        return AskedChecksum(None, "the store may not be asked for its checksum")
    except StoreError as error:
        return AskedChecksum(None, f"the store could not be asked for its checksum ({type(error).__name__})")
    if found is not None:
        return AskedChecksum(found)
    return AskedChecksum(None, NOT_COMBINABLE if now.checksums or now.composites else NO_CHECKSUM)


def _whole(info: ObjectInfo, chunk_bytes: int) -> StoreChecksum | None:
    usable = _COMBINABLE if info.size_bytes > chunk_bytes else (*_COMBINABLE, *_WHOLE_ONLY)
    for name in usable:
        hash_name = name.removeprefix("etag_")
        digest = _digest(hash_name, info.checksums.get(name, ""))
        if digest is not None:
            return StoreChecksum(hash_name, digest, certain=hash_name == name)
    return None


def _composite(store: ObjectStore, info: ObjectInfo, policy: RetryPolicy) -> StoreChecksum | None:
    name = next((name for name in _COMBINABLE if name in info.composites), None)
    digest = _digest(name, info.composites[name]) if name is not None else None
    if name is None or digest is None or not isinstance(store, KeepsParts):
        return None
    ends = with_retries(lambda: store.part_ends(info.key, info.etag), policy)
    return StoreChecksum(name, digest, ends) if ends else None


def _digest(hash_name: str, text: str) -> bytes | None:
    """Return the bytes of a digest in hex; None if it is invalid, because answers of a store are not trusted."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_SIZES[hash_name] else None
