"""CRCs of pieces, combined, are the CRC of the whole, however it was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checksum import COMBINABLE, combine, combine_all, digest_of

NAMES = sorted(COMBINABLE)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=4000), cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_any_cut_gives_the_crc_of_the_whole(name: str, data: bytes, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[start:end] for start, end in pairwise(ends)]
    assert combine_all(name, [(digest_of(name, piece), len(piece)) for piece in pieces]) == digest_of(name, data)


@pytest.mark.parametrize("name", NAMES)
@given(a=st.binary(max_size=300), b=st.binary(max_size=300), c=st.binary(max_size=300))
def test_pieces_can_be_joined_in_any_order(name: str, a: bytes, b: bytes, c: bytes) -> None:
    first, second, third = (digest_of(name, piece) for piece in (a, b, c))
    left = combine(name, combine(name, first, second, len(b)), third, len(c))
    right = combine(name, first, combine(name, second, third, len(c)), len(b) + len(c))
    assert left == right == digest_of(name, a + b + c)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(min_size=2, max_size=300), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_in_any_piece_is_seen(name: str, data: bytes, at: int, bit: int) -> None:
    damaged = bytearray(data)
    damaged[at % len(data)] ^= 1 << bit
    half = len(data) // 2
    runs = [(digest_of(name, bytes(piece)), len(piece)) for piece in (damaged[:half], damaged[half:])]
    assert combine_all(name, runs) != digest_of(name, data)


@pytest.mark.parametrize("name", NAMES)
def test_runs_larger_than_memory_combine_correctly(name: str) -> None:
    """Double 64 KiB of zeros thirty times: 64 TiB, computed in two ways."""
    size_bytes = 1 << 16
    run = digest_of(name, bytes(size_bytes))
    doubled, length_bytes = run, size_bytes
    for _ in range(30):
        doubled, length_bytes = combine(name, doubled, doubled, length_bytes), 2 * length_bytes
    half = length_bytes // 2
    three_quarters = combine_all(name, [(_zeros(name, run, size_bytes, half // 2), half // 2)] * 3)
    rest = _zeros(name, run, size_bytes, half // 2)
    assert combine(name, three_quarters, rest, half // 2) == doubled


def _zeros(name: str, run: bytes, size_bytes: int, wanted_bytes: int) -> bytes:
    while size_bytes < wanted_bytes:
        run, size_bytes = combine(name, run, run, size_bytes), 2 * size_bytes
    return run


def test_digests_that_cannot_be_combined_are_refused() -> None:
    with pytest.raises(ValueError, match="'blake3' cannot be combined"):
        combine("blake3", bytes(32), bytes(32), 1)
