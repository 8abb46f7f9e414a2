"""Runs of a box in a row-major tensor."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.layouts.region import BoxRuns, CutsInsideByte, element_bits, find_runs


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    spans = []  # (full, first, end) of each dimension
    for _ in range(draw(st.integers(0, 4))):
        full = draw(st.integers(1, 5))
        first, end = sorted(draw(st.tuples(st.integers(0, full), st.integers(0, full))))
        spans.append(draw(st.sampled_from([(full, 0, full), (full, first, end), (0, 0, 0)][: 2 + (full == 5)])))
    return (
        tuple(full for full, _, _ in spans),
        tuple(first for _, first, _ in spans),
        tuple(end - first for _, first, end in spans),
    )


def enumerate_bytes(runs: BoxRuns) -> list[int]:
    steps = itertools.product(*(range(0, count * stride, stride) for count, stride, _ in runs.repeats))
    return [runs.start_bytes + sum(step) + byte for step in steps for byte in range(runs.run_bytes)]


@given(boxes(), st.sampled_from([1, 2, 8]))
def test_runs_are_the_bytes_that_slicing_selects_in_order(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], item_bytes: int
) -> None:
    shape, offsets, sizes = box
    places = np.arange(math.prod(shape) * item_bytes).reshape(*shape, item_bytes)
    cut = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    runs = find_runs(shape, offsets, sizes, item_bytes * 8)
    assert enumerate_bytes(runs) == places[cut].ravel().tolist()


@given(boxes())
def test_runs_are_as_long_as_possible(box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
    runs = find_runs(*box, 8)
    selected = enumerate_bytes(runs)
    breaks = sum(1 for before, after in itertools.pairwise(selected) if after != before + 1)
    assert runs.count == (breaks + 1 if selected else 1)
    assert all(count > 1 for count, _, _ in runs.repeats)
    assert sum(size < full for size, full in zip(box[2], box[0], strict=True)) >= len(runs.repeats)


def test_a_box_may_be_cut_in_two_dimensions() -> None:
    assert find_runs((3, 6), (0, 2), (3, 2), 16) == BoxRuns(4, 0, 4, ((3, 12, 4),))
    assert find_runs((4, 6), (2, 3), (2, 3), 8) == BoxRuns(15, 0, 3, ((2, 6, 3),))
    assert find_runs((), (), (), 32) == BoxRuns(0, 0, 4, ())
    assert find_runs((2, 3, 6), (0, 0, 1), (2, 3, 2), 8) == BoxRuns(1, 0, 2, ((6, 6, 2),))
    assert find_runs((2, 3, 6), (0, 1, 1), (2, 2, 2), 8) == BoxRuns(7, 0, 2, ((2, 18, 4), (2, 6, 2)))


def test_a_box_can_be_copied_into_a_larger_tensor() -> None:
    # Rows 1..3 of a (4, 2) tensor, to rows 4..6 of an (8, 2) one: one run.
    assert find_runs((4, 2), (1, 0), (2, 2), 8, (8, 2), (4, 0)) == BoxRuns(2, 8, 4, ())
    assert find_runs((2, 4, 2), (0, 1, 0), (2, 2, 2), 8, (2, 8, 2), (0, 4, 0)) == BoxRuns(2, 8, 4, ((2, 8, 16),))
    assert find_runs((4, 2), (0, 1), (4, 1), 8, (4, 3), (0, 2)) == BoxRuns(1, 2, 1, ((4, 2, 3),))


def test_half_byte_elements_are_cut_at_whole_bytes_only() -> None:
    assert find_runs((3, 6), (0, 2), (3, 2), 4) == BoxRuns(1, 0, 1, ((3, 3, 1),))
    for offsets, sizes in [((0, 1), (3, 2)), ((0, 2), (3, 3))]:
        with pytest.raises(CutsInsideByte):
            find_runs((3, 6), offsets, sizes, 4)
    with pytest.raises(CutsInsideByte):  # every second row begins inside a byte
        find_runs((2, 3), (0, 0), (2, 2), 4)


def test_element_bits_follow_from_shape_and_bytes() -> None:
    assert element_bits((3, 4), 24) == 16
    assert element_bits((3, 4), 6) == 4
    assert element_bits((4,), 3) == 6
    assert element_bits((), 4) == 32
    assert element_bits((0, 1 << 62), 0) == 8
    assert element_bits((0,), 1) is None
    assert element_bits((3,), 4) is None
    assert element_bits((3,), 0) is None
