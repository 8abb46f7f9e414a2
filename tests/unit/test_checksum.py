"""Digests equal the published test vectors, and do not depend on how the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checksum import (
    DIGEST_SIZES,
    HASH_NAMES,
    MANIFEST_HASH_NAMES,
    digest_of,
    new_hasher,
)

# "123456789" is the check input of the CRC catalogues; the others are the algorithms' own.
VECTORS = [
    ("crc32", b"123456789", "cbf43926"),
    ("crc32c", b"123456789", "e3069283"),
    ("crc64nvme", b"123456789", "ae8b14860a799888"),
    ("md5", b"abc", "900150983cd24fb0d6963f7d28e17f72"),
    ("sha256", b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    ("blake3", b"", "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    ("xxh3_128", b"", "99aa06d3014798d86001c324468d497f"),
]


@pytest.mark.parametrize(("name", "data", "expected"), VECTORS)
def test_digests_equal_the_published_vectors(name: str, data: bytes, expected: str) -> None:
    assert digest_of(name, data).hex() == expected


def test_every_name_has_a_vector() -> None:
    assert {name for name, _, _ in VECTORS} == HASH_NAMES
    assert MANIFEST_HASH_NAMES < HASH_NAMES


@pytest.mark.parametrize("name", sorted(HASH_NAMES))
@given(pieces=st.lists(st.binary(max_size=200), max_size=6))
def test_digests_do_not_depend_on_the_pieces(name: str, pieces: list[bytes]) -> None:
    hasher = new_hasher(name)
    for piece in pieces:
        hasher.update(memoryview(bytearray(piece)))
    assert hasher.digest() == digest_of(name, b"".join(pieces))
    assert hasher.hexdigest() == hasher.digest().hex()
    assert len(hasher.digest()) == hasher.digest_size == DIGEST_SIZES[name]


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown hash 'sha1'"):
        new_hasher("sha1")
