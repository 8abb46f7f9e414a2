"""Copies from chunks to segments: the drawing of the module, and borders that cut anywhere."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.layouts.region import Region
from cluster.planning.plan import TensorSlice
from cluster.planning.read_items import expand_read_items
from storage.checkpoints.model_index import ChunkTable
from tests.support.planned_models import cut_into_chunks


def make_slice(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    start: int = 0,
    place: int = 0,
    shard: int = 0,
) -> TensorSlice:
    """A slice of one-byte elements."""
    region = Region(tuple(((offset, offset + size),) for offset, size in zip(offsets, sizes, strict=True)))
    size_bytes = int(np.prod(sizes))
    return TensorSlice("t", "U8", shape, region, shard, start, 0, place, size_bytes, size_bytes)


def rows(slices: list[TensorSlice], chunks: ChunkTable) -> list[tuple[int, ...]]:
    items = expand_read_items(slices, chunks)
    columns = (items.chunk, items.src_offset, items.dest_offset, items.run_bytes, items.count)
    return [tuple(int(column[row]) for column in columns) for row in range(len(items))]


def test_read_items_match_the_documented_drawing() -> None:
    columns = make_slice((4, 10), (0, 2), (4, 4))
    items = rows([columns], cut_into_chunks([40], [[4, 33]]))
    assert items == [(0, 2, 0, 2, 1), (1, 0, 2, 2, 1), (1, 8, 4, 4, 2), (1, 28, 12, 1, 1), (2, 0, 13, 3, 1)]
    # chunk:                      the third item is the two whole rows, 10 bytes apart
    strided = expand_read_items([columns], cut_into_chunks([40], [[4, 33]]))
    assert (strided.src_stride[2], strided.dest_stride[2]) == (10, 4)
    assert (strided.src_stride[0], strided.dest_stride[0]) == (2, 2)


def test_a_contiguous_box_is_one_run_per_chunk() -> None:
    piece = make_slice((8, 10), (2, 0), (4, 10), start=100, place=512)
    chunks = cut_into_chunks([200], [[110, 130, 150]])
    assert rows([piece], chunks) == [(1, 10, 512, 10, 1), (2, 0, 522, 20, 1), (3, 0, 542, 10, 1)]


def test_a_chunk_between_two_runs_is_not_needed() -> None:
    piece = make_slice((3, 100), (0, 0), (3, 2))
    assert [row[0] for row in rows([piece], cut_into_chunks([300], [range(10, 300, 10)]))] == [0, 10, 20]


def test_a_three_dimensional_box_keeps_the_level_with_most_runs() -> None:
    chunks = cut_into_chunks([120], [[]])
    items = expand_read_items([make_slice((2, 5, 12), (0, 1, 3), (2, 3, 4))], chunks)
    assert rows([make_slice((2, 5, 12), (0, 1, 3), (2, 3, 4))], chunks) == [(0, 15, 0, 4, 3), (0, 75, 12, 4, 3)]
    assert items.dest_stride.tolist() == [4, 4]
    items = expand_read_items([make_slice((4, 3, 10), (0, 1, 3), (4, 2, 4))], chunks)
    assert (items.count.tolist(), items.src_offset.tolist()) == ([4, 4], [13, 23])
    assert (items.src_stride.tolist(), items.dest_stride.tolist()) == ([30, 30], [8, 8])
    assert items.dest_offset.tolist() == [0, 4]


def test_for_chunk_and_empty_inputs() -> None:
    chunks = cut_into_chunks([40], [[4, 20]])
    items = expand_read_items([make_slice((4, 10), (2, 0), (2, 10))], chunks)
    assert items.chunk_ids().tolist() == [2]
    assert items.for_chunk(2) == slice(0, 1)
    assert items.for_chunk(0).start == items.for_chunk(0).stop
    assert items.for_chunk(99).start == items.for_chunk(99).stop
    for nothing in (
        expand_read_items([], chunks),
        expand_read_items([make_slice((4, 0), (0, 0), (4, 0))], chunks),
        expand_read_items([make_slice((4,), (0,), (4,))], cut_into_chunks([], [])),
    ):
        assert len(nothing) == 0
        assert nothing.size_bytes == 0
        assert nothing.for_chunk(0) == slice(0, 0)


def test_bytes_outside_every_chunk_get_no_item() -> None:
    beyond = make_slice((4,), (0,), (4,), start=38)
    other_shard = make_slice((4,), (0,), (4,), shard=1)
    chunks = cut_into_chunks([40], [[]])
    assert rows([beyond, other_shard], chunks) == [(0, 38, 0, 2, 1)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[TensorSlice], ChunkTable, int]:
    pieces = []
    start = draw(st.integers(0, 9))
    place = 0
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.integers(1, 5)) for _ in range(draw(st.integers(0, 4))))
        spans = [sorted(draw(st.tuples(st.integers(0, full), st.integers(0, full)))) for full in shape]
        offsets = tuple(first for first, _ in spans)
        sizes = tuple(end - first for first, end in spans)
        pieces.append(make_slice(shape, offsets, sizes, start, place))
        start += int(np.prod(shape)) + draw(st.integers(0, 3))
        place += pieces[-1].size_bytes
    chunks = cut_into_chunks([start], [draw(st.lists(st.integers(1, start or 1), max_size=12))])
    return pieces, chunks, start


@given(cases())
def test_any_box_and_any_chunks(case: tuple[list[TensorSlice], ChunkTable, int]) -> None:
    """Boxes cut in up to four dimensions, chunks cut anywhere: each byte once, from the right place."""
    pieces, chunks, size = case
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    expected = [
        source[p.start : p.start + int(np.prod(p.shape))].reshape(p.shape)[
            tuple(slice(o, o + s) for o, s in zip(p.offsets, p.sizes, strict=True))
        ]
        for p in pieces
    ]
    wanted = np.concatenate([part.ravel() for part in expected])
    found = np.zeros(len(wanted), np.uint8)
    written = np.zeros(len(wanted), int)
    items = expand_read_items(pieces, chunks)
    for row in range(len(items)):
        chunk = chunks.byte_range(int(items.chunk[row]))
        for number in range(int(items.count[row])):
            src = int(items.src_offset[row] + number * items.src_stride[row])
            dest = int(items.dest_offset[row] + number * items.dest_stride[row])
            run = int(items.run_bytes[row])
            assert run > 0
            assert 0 <= src <= src + run <= chunk.size_bytes
            found[dest : dest + run] = source[chunk.start + src : chunk.start + src + run]
            written[dest : dest + run] += 1
    assert (written == 1).all()
    assert (found == wanted).all()
    order = list(zip(items.chunk.tolist(), items.src_offset.tolist(), strict=True))
    assert order == sorted(order)


@given(
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(0, 11),
    st.integers(1, 12),
    st.lists(st.integers(1, 240)),
)
def test_a_cut_in_one_dimension_has_at_most_three_items_a_chunk(
    rows_: int, columns: int, first: int, width: int, ends: list[int]
) -> None:
    first = min(first, columns - 1)
    piece = make_slice((rows_, columns), (0, first), (rows_, min(width, columns - first)))
    items = expand_read_items([piece], cut_into_chunks([rows_ * columns], [ends]))
    assert np.bincount(items.chunk).max() <= 3
    assert items.size_bytes == piece.size_bytes
