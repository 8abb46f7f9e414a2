"""Chunk digests in any order combine to the object's checksum; missing ones are never guessed."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checksum import COMBINABLE, Span, SpanHasher, StoreChecksum, digest_of
from storage.stores.object_store import ByteRange

NAMES = sorted(COMBINABLE)
CUTS = st.lists(st.integers(1, 999), max_size=6)


def _ends(cuts: list[int], size_bytes: int) -> tuple[int, ...]:
    return tuple(sorted({cut for cut in cuts if cut < size_bytes} | {size_bytes}))


def _checksum(name: str, data: bytes, parts: tuple[int, ...]) -> StoreChecksum:
    digests = [digest_of(name, data[start:end]) for start, end in pairwise((0, *parts))]
    return StoreChecksum(name, digest_of(name, b"".join(digests) if parts else data), parts)


def _spans(checksum: StoreChecksum, data: bytes, start: int, end: int, piece_bytes: int) -> tuple[Span, ...]:
    hasher = SpanHasher(checksum, ByteRange(start, end))
    for at in range(start, end, piece_bytes):
        hasher.update(memoryview(data)[at : min(at + piece_bytes, end)])
    return hasher.spans()


@pytest.mark.parametrize("name", NAMES)
@given(
    data=st.binary(min_size=1, max_size=1000),
    cuts=CUTS,
    parts=st.none() | CUTS,
    header=st.integers(0, 50),
    piece_bytes=st.integers(1, 400),
    seed=st.integers(0, 100),
)
def test_chunks_in_any_order_and_the_header_give_the_checksum(
    name: str, data: bytes, cuts: list[int], parts: list[int] | None, header: int, piece_bytes: int, seed: int
) -> None:
    header = min(header, len(data))
    part_ends = () if parts is None else _ends(parts, len(data))
    checksum = _checksum(name, data, part_ends).knowing(data[:header])
    ends = [end for end in _ends(cuts, len(data)) if end > header]
    chunks = [_spans(checksum, data, start, end, piece_bytes) for start, end in pairwise((header, *ends))]
    Random(seed).shuffle(chunks)
    spans = [span for chunk in chunks for span in chunk if span[0] < span[1]]
    known = [span for span in checksum.known if span[0] < span[1]]
    assert checksum.found(len(data), [*known, *spans]) == checksum.digest
    for missing in range(len(spans)):
        assert checksum.found(len(data), [*known, *spans[:missing], *spans[missing + 1 :]]) is None
    if spans:
        assert checksum.found(len(data), [*known, *spans, spans[0]]) is None  # read twice is not read once


@pytest.mark.parametrize("parts", [(), (40, 100)])
def test_a_changed_byte_changes_the_checksum(parts: tuple[int, ...]) -> None:
    data = bytes(range(100))
    checksum = _checksum("crc32c", data, parts)
    damaged = bytearray(data)
    damaged[70] ^= 16
    spans = [*_spans(checksum, bytes(damaged), 0, 60, 7), *_spans(checksum, bytes(damaged), 60, 100, 7)]
    found = checksum.found(100, spans)
    assert found is not None
    assert found != checksum.digest


def test_a_digest_that_does_not_combine_needs_one_whole_chunk() -> None:
    data = b"some bytes of an object"
    checksum = StoreChecksum("md5", digest_of("md5", data))
    whole = _spans(checksum, data, 0, len(data), 5)
    assert checksum.found(len(data), whole) == checksum.digest
    halves = [*_spans(checksum, data, 0, 9, 5), *_spans(checksum, data, 9, len(data), 5)]
    assert checksum.found(len(data), halves) is None


def test_chunks_must_have_exactly_the_bytes_of_the_range() -> None:
    hasher = SpanHasher(StoreChecksum("crc32c", bytes(4), (6, 20)), ByteRange(4, 9))
    hasher.update(b"abc")
    with pytest.raises(ValueError, match="2 bytes of the range are missing"):
        hasher.spans()
    with pytest.raises(ValueError, match="more bytes than the range has"):
        hasher.update(b"def")
    hasher.update(b"de")
    assert [(start, end) for start, end, _ in hasher.spans()] == [(4, 6), (6, 9)]
