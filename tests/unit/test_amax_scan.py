"""The largest absolute value of each row, found while a shard's bytes arrive, against numpy over whole arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.checkpoints.model_index import Tensor
from storage.checkpoints.safetensors_header import DTYPE_BITS
from storage.publishing import one_object
from storage.publishing.one_object import AmaxScan

FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
SHAPES = [(1, 33), (7, 40), (3, 5, 32), (2, 300), (5, 1000), (64, 32)]


def scanned(data: bytes, weights: list[Tensor], pieces: list[int]) -> dict[str, np.ndarray]:
    scan, at = AmaxScan(weights), 0
    for size in [*pieces, len(data)]:
        scan.add(memoryview(data)[at : at + size])
        at = min(at + size, len(data))
    return scan.rows()


def values_of(dtype: str, raw: bytes) -> np.ndarray:
    """Return the values as float64, which holds every value of the other types."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(raw, np.dtype(FLOATS[dtype]).newbyteorder("<")).astype(np.float64)


@given(
    st.lists(st.tuples(st.sampled_from(["BF16", "F16", "F32", "F64"]), st.sampled_from(SHAPES)), max_size=4),
    st.lists(st.integers(0, 700), max_size=30),
    st.integers(0, 9),
    st.integers(0, 1 << 30),
    st.sampled_from([64, 512, 128 << 10]),
)
@settings(max_examples=150, deadline=None)
def test_pieces_of_any_length_give_the_same_maxima(
    kinds: list[tuple[str, tuple[int, ...]]], pieces: list[int], gap: int, seed: int, block_bytes: int
) -> None:
    """Random bits include NaNs, infinities, subnormal numbers and both zeros; weights begin at any offset."""
    random = np.random.default_rng(seed)
    data, weights, expected = b"", [], {}
    for number, (dtype, shape) in enumerate(kinds):
        data += random.bytes(gap)
        raw = random.bytes(int(np.prod(shape)) * DTYPE_BITS[dtype] // 8)
        weights.append(Tensor(f"{number}.weight", dtype, shape, 0, len(data), len(data) + len(raw)))
        data += raw
        with np.errstate(over="ignore", invalid="ignore"):
            most = np.abs(values_of(dtype, raw)).reshape(shape).max(axis=-1).astype(np.float32)
        expected[f"{number}.weight"] = most
    before, one_object.BLOCK_BYTES = one_object.BLOCK_BYTES, block_bytes
    try:
        found = scanned(data + random.bytes(gap), weights, pieces)
    finally:
        one_object.BLOCK_BYTES = before
    assert found.keys() == expected.keys()
    for name, most in expected.items():
        assert found[name].dtype == np.float32
        assert found[name].shape == most.shape
        np.testing.assert_array_equal(found[name], most)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_rows_with_nan_or_infinity_record_nan_or_infinity(dtype: str) -> None:
    width = DTYPE_BITS[dtype] // 8
    nan, infinity = b"\xff" * width, {"F16": 0xFC00, "BF16": 0xFF80, "F32": 0xFF800000, "F64": 0xFFF << 52}[dtype]
    zero = b"\0" * width
    rows = [nan + zero * 31, infinity.to_bytes(width, "little") + zero * 31, zero * 32]
    data = b"".join(rows)
    found = scanned(data, [Tensor("weight", dtype, (3, 32), 0, 0, len(data))], [])["weight"]
    assert found.tobytes() == np.array([np.nan, np.inf, 0], np.float32).tobytes()


def test_a_double_beyond_the_float_range_is_infinite() -> None:
    data = np.full((1, 32), -1e300).tobytes()
    assert scanned(data, [Tensor("weight", "F64", (1, 32), 0, 0, len(data))], [5])["weight"].tolist() == [np.inf]
