"""A checksum that a store keeps of an object: asking for it, and comparing it with chunks that were read.

    whole object    crc(chunk) ... crc(chunk) --combine--> digest
    composite       crc(chunk) ... --combine--> digest of each part --> digest of the parts' digests in a row

A *span* is a run of bytes with its digest. A chunk is one span, or several when the end of a part lies inside of it.
Digests other than CRCs cannot be combined: they need a span that is the whole object, or the whole part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from storage.checksum import COMBINABLE, DIGEST_SIZES, Buffer, combine_all, digest_of, new_hasher
from storage.errors import AccessDenied, StoreError, UnsupportedStore
from storage.stores.object_store import ByteRange, KeepsParts, ObjectInfo, ObjectStore
from storage.stores.retrying import RetryPolicy, with_retries

Span = tuple[int, int, bytes]  # first byte, first byte after, digest


@dataclass(frozen=True, slots=True)
class StoreChecksum:
    """What the store says of an object's bytes."""

    hash_name: str  # see `storage.checksum`
    digest: bytes  # of the bytes, or, when there are parts, of the digests of the parts in a row
    part_ends: tuple[int, ...] = ()  # of a composite checksum: where its parts end, the last one the object
    certain: bool = True  # False: an ETag, which is the MD5 of the bytes on most servers and is promised by none
    known: tuple[Span, ...] = ()  # read while the load was planned: the header

    @property
    def combines(self) -> bool:
        """Whether it can be put together from chunks."""
        return self.hash_name in COMBINABLE

    def knowing(self, data: bytes) -> StoreChecksum:
        """The same, with the digests of `data`, the first bytes of the object."""
        hasher = SpanHasher(self, ByteRange(0, len(data)))
        hasher.update(data)
        return replace(self, known=hasher.spans())

    def found(self, size_bytes: int, spans: Iterable[Span]) -> bytes | None:
        """What `digest` should be of an object with these spans; None unless they are all of its bytes, once each."""
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
    """The digests of the spans of a range, from its bytes in order."""

    def __init__(self, checksum: StoreChecksum, byte_range: ByteRange) -> None:
        ends = checksum.part_ends
        inside = ends[bisect_right(ends, byte_range.start) : bisect_left(ends, byte_range.end)]
        self._name = checksum.hash_name
        self._edges = (byte_range.start, *inside, byte_range.end)
        self._hashers = [new_hasher(self._name) for _ in self._edges[1:]]
        self._at = byte_range.start
        self._now = 0  # index of the span that `_at` is in

    def update(self, data: Buffer, /) -> None:
        """More bytes. Raises ValueError for more than the range has."""
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
        """In order. Raises ValueError before all bytes have come."""
        if self._at != self._edges[-1]:
            raise ValueError(f"{self._edges[-1] - self._at} bytes of the range are still to come")
        edges = zip(pairwise(self._edges), self._hashers, strict=True)
        return tuple((start, end, hasher.digest()) for (start, end), hasher in edges)


NO_CHECKSUM = "the store keeps no checksum of it"
NOT_COMBINABLE = "the store keeps no checksum of it that chunks can be combined to"
_COMBINABLE = ("crc64nvme", "crc32c", "crc32")  # in order of preference: the widest, then the cheapest
_WHOLE_ONLY = ("sha256", "md5", "etag_md5")  # computed over one chunk that is the whole object


@dataclass(frozen=True, slots=True)
class AskedChecksum:
    """What came of asking."""

    checksum: StoreChecksum | None
    reason: str = ""  # why there is none

    def knowing(self, head: bytes) -> AskedChecksum:
        """With the digest of the object's first bytes, which no rank will read, where chunks can be combined to it."""
        if self.checksum is None or not self.checksum.combines:
            return self
        return AskedChecksum(self.checksum.knowing(head))


def ask_checksum(store: ObjectStore, info: ObjectInfo, chunk_bytes: int, policy: RetryPolicy) -> AskedChecksum:
    """The checksum by which a load in chunks of `chunk_bytes` can check the object. Two requests at most.

    A store that refuses to tell is no error: then the object is not checked.
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
    """The bytes of a digest in hex; None for what is none. A store's word is not to be trusted."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_SIZES[hash_name] else None
