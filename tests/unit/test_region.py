"""Ranges of a tensor: taken, shared and laid side by side as plain lists of indices would be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.layouts.region import Region, take, whole


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    bounds = sorted(draw(st.lists(st.integers(0, 30), min_size=0, max_size=4).map(lambda b: b[: len(b) // 2 * 2])))
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def indices(held: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for start, end in held for index in range(start, end)]


@given(ranges(), st.integers(0, 40), st.integers(0, 40))
def test_taking_is_slicing_the_list(held: tuple[tuple[int, int], ...], first: int, end: int) -> None:
    assert indices(take(held, first, end)) == indices(held)[first:end]


@given(ranges(), st.integers(0, 5), st.integers(1, 6))
def test_shares_are_chunks_of_the_list(held: tuple[tuple[int, int], ...], padding: int, parts: int) -> None:
    region = Region((held, ((0, 2),)), padding)
    rows = [*indices(held), *[-1] * padding]
    size = -(-len(rows) // parts)
    for part in range(parts):
        share = region.share(part, parts)
        expected = rows[part * size : (part + 1) * size]
        assert [*indices(share.ranges[0]), *[-1] * share.padding] == expected
        assert share.sizes == (len(expected), 2)
        assert share.filled == (sum(row >= 0 for row in expected), 2)


@given(ranges(), ranges())
def test_boxes_lie_side_by_side(rows: tuple[tuple[int, int], ...], columns: tuple[tuple[int, int], ...]) -> None:
    tensor = np.arange(30 * 30).reshape(30, 30)
    region = Region((rows, columns))
    own = np.full(region.sizes, -1)
    for ((row, column), (height, width)), (to_row, to_column) in region.boxes():
        own[to_row : to_row + height, to_column : to_column + width] = tensor[
            row : row + height, column : column + width
        ]
    assert own.tolist() == tensor[np.ix_(indices(rows), indices(columns))].tolist()
    assert region.elements == own.size


def test_a_scalar_is_whole() -> None:
    assert (whole(()).sizes, whole(()).elements, list(whole(()).boxes())) == ((), 1, [(((), ()), ())])
    assert whole((3, 4)).share(0, 1) == whole((3, 4))
