"""Chunk bounds tile the file, never exceed the requested size, and respect tensors and rows."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.checkpoints.model_index import CUT_ALIGN_BYTES, chunk_bounds, fixed_bounds, row_step_bytes
from storage.checkpoints.safetensors_header import Header, atom_bytes, encode_header, parse_header, tensor_bytes
from tests.support.checkpoints import TensorSpec, tensor_specs

pytestmark = pytest.mark.slow

MIB = 1 << 20


def header_of(specs: list[TensorSpec]) -> tuple[Header, int]:
    data = encode_header(specs)
    size = len(data) + sum(tensor_bytes(dtype, shape) for _, dtype, shape in specs)
    return parse_header(data, size), size


shards = tensor_specs(max_side=40, max_tensors=12).map(header_of)


@settings(max_examples=300)
@given(shards, st.integers(1, 5000))
def test_chunks_tile_the_file_and_are_never_too_large(shard: tuple[Header, int], chunk_bytes: int) -> None:
    header, size = shard
    ends = chunk_bounds(header, size, chunk_bytes)
    starts = [0, *ends[:-1]]
    assert ends[-1] == size
    assert all(0 < end - start <= chunk_bytes for start, end in zip(starts, ends, strict=True))


@given(shards, st.integers(1, 5000))
def test_the_header_has_its_own_chunks(shard: tuple[Header, int], chunk_bytes: int) -> None:
    header, size = shard
    assert header.data_start in chunk_bounds(header, size, chunk_bytes)


@settings(max_examples=300)
@given(shards, st.integers(1, 5000))
def test_only_the_end_of_small_tensors_is_a_small_chunk(shard: tuple[Header, int], chunk_bytes: int) -> None:
    header, size = shard
    ends = [end for end in chunk_bounds(header, size, chunk_bytes) if end >= header.data_start]
    for start, end in pairwise(ends):
        if 4 * (end - start) < chunk_bytes:
            filled = [t for t in header.tensors if t.end > t.start]
            assert all(4 * (t.end - t.start) < chunk_bytes for t in filled if t.start < end and t.end > start)
            assert all(4 * (t.end - t.start) >= chunk_bytes for t in filled if t.start == end)


@settings(max_examples=300)
@given(shards, shards, st.integers(1, 5000))
def test_large_tensors_are_cut_alike_in_any_file(
    shard: tuple[Header, int], other: tuple[Header, int], chunk_bytes: int
) -> None:
    """A tensor is put into another file, and its chunks begin at the same bytes of it."""
    for tensor in shard[0].tensors:
        if 4 * (tensor.end - tensor.start) < chunk_bytes:
            continue
        specs = [(f"other {t.name}", t.dtype, t.shape) for t in other[0].tensors]
        place = len(specs) // 2
        moved, size = header_of([*specs[:place], (tensor.name, tensor.dtype, tensor.shape), *specs[place:]])
        (again,) = (t for t in moved.tensors if t.name == tensor.name)
        before, after = (
            [end - t.start for end in chunk_bounds(header, size, chunk_bytes) if t.start <= end <= t.end]
            for header, size, t in ((*shard, tensor), (moved, size, again))
        )
        assert before == after


@settings(max_examples=300)
@given(shards, st.integers(64, 5000))
def test_cuts_fall_between_rows_unless_rows_are_large(shard: tuple[Header, int], chunk_bytes: int) -> None:
    header, size = shard
    for end in chunk_bounds(header, size, chunk_bytes):
        cut = [t for t in header.tensors if t.start < end < t.end]
        for tensor in cut:
            row = row_step_bytes(tensor)
            between_rows = row and (end - tensor.start) % row == 0
            assert between_rows or row == 0 or 2 * row > chunk_bytes


def test_rows_of_a_llama_matrix_are_never_split() -> None:
    header, size = header_of([("norm", "BF16", (4096,)), ("w", "BF16", (14336, 4096))])
    ends = chunk_bounds(header, size, 8 * MIB)
    rows = [(end - header.tensors[1].start) % 8192 for end in ends[1:]]
    assert rows == [0] * len(rows)
    assert len(ends) == 1 + 1 + 14  # header, 8 KiB of norm, 112 MiB of rows


def test_many_small_tensors_share_a_chunk() -> None:
    header, size = header_of([(f"t{i}", "F32", (100,)) for i in range(10_000)])
    assert len(chunk_bounds(header, size, 8 * MIB)) == 2
    assert len(chunk_bounds(header, size, MIB)) == 1 + 4


def test_a_row_larger_than_a_chunk_is_cut_on_aligned_elements() -> None:
    header, size = header_of([("lead", "U8", (3,)), ("long", "F6_E2M3", (2, 4 * MIB))])
    tensor = header.tensors[1]
    ends = chunk_bounds(header, size, MIB)
    for end in ends:
        if tensor.start < end < tensor.end:
            assert (end - tensor.start) % (CUT_ALIGN_BYTES * atom_bytes("F6_E2M3")) == 0


def test_rows_of_packed_types_are_cut_at_whole_bytes() -> None:
    header, _ = header_of([("f4", "F4", (8, 3)), ("scalar", "F32", ()), ("none", "F32", (0, 2))])
    steps = {t.name: row_step_bytes(t) for t in header.tensors}
    assert steps == {"f4": 3, "scalar": 0, "none": 0}


def test_a_file_without_tensor_bytes_is_one_chunk() -> None:
    header, size = header_of([("none", "F32", (0,))])
    assert chunk_bounds(header, size, MIB) == [size]


def test_a_chunk_size_of_zero_is_refused() -> None:
    header, size = header_of([])
    with pytest.raises(ValueError, match="positive"):
        chunk_bounds(header, size, 0)


@given(st.integers(0, 100), st.integers(1, 20))
def test_fixed_bounds_tile(size_bytes: int, chunk_bytes: int) -> None:
    ends = fixed_bounds(size_bytes, chunk_bytes)
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []
    assert sum(sizes) == size_bytes
    assert all(0 < size <= chunk_bytes for size in sizes)
