"""Tensors of a source cut, unstacked and joined: the pieces point at the same numbers as numpy's views."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.converting.reshaping import cut, join, unstack
from cluster.converting.source import SourceTensor, StoredPiece
from tests.support.trainer_checkpoints import assemble


@st.composite
def stored(draw: st.DrawFn) -> tuple[bytes, SourceTensor, np.ndarray]:
    """A file, a tensor that it has in pieces, some of them transposed or with gaps, and its values."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    whole = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    bounds = []
    for size in shape:
        inner = draw(st.lists(st.integers(1, size), max_size=2, unique=True))
        bounds.append(sorted({0, size, *inner}))
    content, pieces = bytearray(b"\xff" * draw(st.integers(0, 5))), []
    for corner in product(*(range(len(one) - 1) for one in bounds)):
        start = tuple(one[index] for one, index in zip(bounds, corner, strict=True))
        end = tuple(one[index + 1] for one, index in zip(bounds, corner, strict=True))
        part = whole[tuple(map(slice, start, end))]
        order = draw(st.permutations(range(len(shape))))
        kept = np.ascontiguousarray(part.transpose(order))
        strides = [0] * len(shape)
        for axis, stride in zip(order, kept.strides, strict=True):
            strides[axis] = stride // 2
        plain = None if np.ascontiguousarray(part).strides == tuple(2 * one for one in strides) else tuple(strides)
        pieces.append(StoredPiece("file", len(content), start, part.shape, plain))
        content += kept.tobytes()
    return bytes(content), SourceTensor("w", "BF16", shape, tuple(pieces)), whole


@given(case=stored(), data=st.data())
def test_parts_are_numpys(tmp_path_factory: pytest.TempPathFactory, case: tuple, data: st.DataObject) -> None:
    content, tensor, whole = case
    folder = tmp_path_factory.getbasetemp()
    (folder / "file").write_bytes(content)
    axis = data.draw(st.integers(0, whole.ndim - 1))
    start = data.draw(st.integers(0, whole.shape[axis]))
    end = data.draw(st.integers(start, whole.shape[axis]))
    part = cut(tensor, axis, start, end)
    assert np.array_equal(assemble(folder, part), whole.take(range(start, end), axis))
    for one, row in zip(unstack(tensor), whole, strict=True):
        assert one.name == "w"
        assert np.array_equal(assemble(folder, one), row)
    middle = data.draw(st.integers(0, whole.shape[0]))
    turned = join("new", [cut(tensor, 0, middle, whole.shape[0]), cut(tensor, 0, 0, middle)])
    assert np.array_equal(assemble(folder, turned), np.roll(whole, -middle, 0))
    assert turned.shape == whole.shape


def test_dense_parts_need_no_strides() -> None:
    tensor = SourceTensor("w", "F32", (4, 6), (StoredPiece("f", 100, (0, 0), (4, 6)),))
    (rows,) = cut(tensor, 0, 1, 3).pieces
    assert rows == StoredPiece("f", 100 + 24, (0, 0), (2, 6))
    (columns,) = cut(tensor, 1, 2, 4).pieces
    assert columns == StoredPiece("f", 100 + 8, (0, 0), (4, 2), (6, 1))
