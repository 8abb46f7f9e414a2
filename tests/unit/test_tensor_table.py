"""The manifest's tensors of a shard are compared with those of the shard's own header."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints.manifest import NOTHING, table_differences
from storage.checkpoints.model_index import Tensor
from storage.checkpoints.safetensors_header import Header, HeaderBytes, parse_header
from storage.errors import InvalidHeader
from tests.support.checkpoints import TensorSpec, safetensors_bytes, tensor_specs


def published(header: Header) -> list[Tensor]:
    return [
        Tensor(name=t.name, dtype=t.dtype, shape=t.shape, shard=0, start=t.start, end=t.end) for t in header.tensors
    ]


@given(tensor_specs(), st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_the_header_is_found_however_the_shard_is_cut(specs: list[TensorSpec], steps: list[int]) -> None:
    data = safetensors_bytes(specs)
    head, at = HeaderBytes(len(data)), 0
    for step in [*steps, len(data)]:
        head.add(memoryview(data)[at : at + step])
        at += step
    header = parse_header(data, len(data))
    assert head.parse() == header
    assert head.end == header.data_start
    assert list(table_differences("s", published(header), header, set())) == []


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 9, b"\x02" + bytes(7) + b"[]", bytes(8)])
def test_invalid_headers_are_reported(data: bytes) -> None:
    head = HeaderBytes(len(data))
    head.add(memoryview(data))
    with pytest.raises(InvalidHeader):
        head.parse()


def test_a_tensor_that_only_one_side_has_is_reported() -> None:
    data = safetensors_bytes([("a", "U8", (3,)), ("b", "U8", (2,))])
    header = parse_header(data, len(data))
    a, b = published(header)
    (bad,) = table_differences("s", [a], header, {"a"})
    assert (bad.key, bad.name, bad.published, bad.stored) == ("s", "b", NOTHING, f"U8 (2) at [{b.start}, {b.end})")
    assert list(table_differences("s", [a], header, {"a", "b"})) == []  # a copy the index did not pick
    (bad,) = table_differences("s", [a, b, replace(b, name="c")], header, set())
    assert (bad.name, bad.stored) == ("c", NOTHING)
