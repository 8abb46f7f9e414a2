"""Tensors as views into segments: where they lie, and what their padding holds."""

from __future__ import annotations

import torch

from actors.devices.convert import tensor_views
from cluster.layouts.region import Region
from cluster.planning.plan import TensorSlice


def test_padding_is_zero_whatever_the_memory_held() -> None:
    segment = torch.full((768,), 7, dtype=torch.uint8)
    padded = TensorSlice("embed", "U8", (5, 3), Region((((3, 5),), ((0, 3),)), padding=2), 0, 0, 0, 256, 12, 6)
    whole = TensorSlice("norm", "U8", (4,), Region((((0, 4),),)), 0, 0, 0, 512, 4, 4)
    views = tensor_views([segment], (padded, whole))
    assert views["embed"].tolist() == [[7, 7, 7], [7, 7, 7], [0, 0, 0], [0, 0, 0]]
    assert views["norm"].tolist() == [7, 7, 7, 7]
    assert segment[256 + 12 : 512].eq(7).all()  # what is beside it stays
    assert views["embed"].data_ptr() == segment.data_ptr() + 256
