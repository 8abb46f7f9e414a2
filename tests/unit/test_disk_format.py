"""A file of the disk tier returns the chunk that was written, or is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checksum import MANIFEST_HASH_NAMES, digest_of
from storage.disk.files import HEADER_BYTES, KEY_BYTES, ChunkHeader, open_plain, pack_header, read_chunk, unpack_header
from storage.errors import DiskChunkUnusable

KEY = bytes(range(KEY_BYTES))
CONTENT = b"weights " * 300


def header_of(content: bytes = CONTENT, key: bytes = KEY, hash_name: str = "blake3") -> bytes:
    return pack_header(ChunkHeader(key, len(content), hash_name, digest_of(hash_name, content)))


def read_back(path: Path, size_bytes: int = len(CONTENT), published: tuple[str, bytes] | None = None) -> bytes:
    buffer = bytearray(size_bytes)
    file = os.open(path, os.O_RDONLY)
    try:
        half = size_bytes // 3
        read_chunk(file, KEY, [memoryview(buffer)[:half], memoryview(buffer)[half:]], published)
    finally:
        os.close(file)
    return bytes(buffer)


@given(
    key=st.binary(min_size=32, max_size=32), length=st.integers(0, 2**40), name=st.sampled_from([*MANIFEST_HASH_NAMES])
)
def test_a_header_survives_a_round_trip(key: bytes, length: int, name: str) -> None:
    header = ChunkHeader(key, length, name, digest_of(name, key))
    assert len(pack_header(header)) == HEADER_BYTES
    assert unpack_header(pack_header(header)) == header


@pytest.mark.parametrize(
    "header",
    [
        ChunkHeader(b"short", 1, "blake3", bytes(32)),
        ChunkHeader(KEY, 1, "md5", bytes(16)),
        ChunkHeader(KEY, 1, "xxh3_128", bytes(32)),
    ],
)
def test_impossible_headers_are_refused(header: ChunkHeader) -> None:
    with pytest.raises(ValueError, match=r"header|digest"):
        pack_header(header)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_never_a_header(data: bytes) -> None:
    with pytest.raises(DiskChunkUnusable):
        unpack_header(data)


@pytest.mark.parametrize("published", [None, ("blake3", digest_of("blake3", CONTENT))])
def test_a_written_chunk_is_read_back(tmp_path: Path, published: tuple[str, bytes] | None) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(header_of() + CONTENT)
    assert read_back(path, published=published) == CONTENT


@given(at=st.integers(0, HEADER_BYTES + len(CONTENT) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped"
    data = bytearray(header_of() + CONTENT)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    if 100 <= at < HEADER_BYTES:  # padding, which has no meaning
        assert read_back(path) == CONTENT
        return
    with pytest.raises(DiskChunkUnusable):
        read_back(path)


@given(size_bytes=st.integers(0, HEADER_BYTES + len(CONTENT) - 1), full_size=st.booleans())
def test_a_torn_file_is_refused(tmp_path_factory: pytest.TempPathFactory, size_bytes: int, full_size: bool) -> None:
    """A loss of power leaves a part of the bytes, in a file of any length."""
    path = tmp_path_factory.getbasetemp() / "torn"
    path.write_bytes((header_of() + CONTENT)[:size_bytes])
    if full_size:
        os.truncate(path, HEADER_BYTES + len(CONTENT))
    with pytest.raises(DiskChunkUnusable):
        read_back(path)


def test_the_published_digest_overrides_the_files_own(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    forged = b"another " * 300
    path.write_bytes(header_of(forged) + forged)
    assert read_back(path) == forged
    with pytest.raises(DiskChunkUnusable, match="digest"):
        read_back(path, published=("blake3", digest_of("blake3", CONTENT)))


def test_another_chunk_under_the_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    path.write_bytes(header_of(key=KEY[::-1]) + CONTENT)
    with pytest.raises(DiskChunkUnusable, match="another chunk"):
        read_back(path)
    with pytest.raises(DiskChunkUnusable, match="wrong size"):
        read_back(path, size_bytes=len(CONTENT) + 1)


def test_links_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"of somebody else")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in ("link", "folder", "pipe"):
            with pytest.raises(DiskChunkUnusable):
                open_plain(name, folder)
        with pytest.raises(FileNotFoundError):
            open_plain("nothing", folder)
        os.close(open_plain("secret", folder))
    finally:
        os.close(folder)
