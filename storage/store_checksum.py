"""A checksum that a store keeps of one object, and what it takes to compare it with bytes that were read in chunks.

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

from storage.checksum import Buffer, digest_of, new_hasher
from storage.crc_combine import COMBINABLE, combine_all
from storage.ranges import ByteRange

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
