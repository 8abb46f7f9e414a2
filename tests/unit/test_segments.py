"""The memory map of a rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planning.read_items import ALIGNMENT_BYTES, SEGMENT_BYTES, layer_of, place_in_segments

names = st.builds(
    lambda layer, part: f"model.layers.{layer}.{part}" if layer < 3 else part,
    st.integers(0, 4),
    st.sampled_from(["a.weight", "b.weight", "norm"]),
)
slices = st.lists(st.tuples(names, st.integers(0, 3000)), max_size=40)


@given(slices, st.sampled_from([256, 1024, 4096]))
def test_map_laws(pieces: list[tuple[str, int]], limit: int) -> None:
    places = place_in_segments(pieces, limit)
    assert places == place_in_segments(list(pieces), limit)
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for (name, size), segment, offset in zip(pieces, places.segment, places.offset, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset + size <= places.segment_bytes[segment]
        if size:
            taken.setdefault(segment, []).append((offset, offset + size, name))
    for segment, spans in taken.items():
        spans.sort()
        for (_, end, _), (start, _, _) in pairwise(spans):
            assert end <= start
        assert len({layer_of(name) for _, _, name in spans}) == 1
        assert len(spans) == 1 or places.segment_bytes[segment] <= limit
    padded = sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for _, size in pieces)
    assert sum(places.segment_bytes) == padded
    assert len(places.segment_bytes) == max(len(taken), 1 if pieces else 0)


def test_one_segment_per_layer_and_large_tensors_alone() -> None:
    places = place_in_segments(
        [
            ("model.embed_tokens.weight", SEGMENT_BYTES + 1),
            ("model.layers.0.a.weight", 300),
            ("model.layers.1.a.weight", 100),
            ("model.layers.0.b.weight", 100),
            ("model.norm.weight", 0),
            ("model.layers.0.c.weight", SEGMENT_BYTES),
            ("model.layers.0.d.weight", 1),
        ]
    )
    assert places.segment == (0, 1, 2, 1, 0, 3, 1)
    assert places.offset == (0, 0, 0, 512, 0, 0, 768)
    assert places.segment_bytes == (SEGMENT_BYTES + 256, 1024, 256, SEGMENT_BYTES)


def test_only_empty_slices() -> None:
    assert place_in_segments([]).segment_bytes == ()
    places = place_in_segments([("a", 0), ("b", 0)])
    assert (places.segment, places.offset, places.segment_bytes) == ((0, 0), (0, 0), (0,))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.17.mlp.experts.3.w1.weight", "model.layers.17"),
        ("transformer.h.0.ln_1.bias", "transformer.h.0"),
        ("layers.4", "layers.4"),
        ("0.weight", "0"),
        ("model.embed_tokens.weight", ""),
        ("block1.weight", ""),
        ("model.2a.b", ""),
        ("a\nb.3.c", "a\nb.3"),
    ],
)
def test_layer_of(name: str, layer: str) -> None:
    assert layer_of(name) == layer
