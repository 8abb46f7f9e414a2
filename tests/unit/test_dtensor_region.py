"""Parts of a tensor by place in a mesh, against torch's own placements and the slices of a layout's ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from cluster.layouts.mesh import Layout
from cluster.layouts.region import MeshCut, Region, dtensor_region, same_part
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan
from tests.support.planned_models import carry_out, store_arrays

shapes = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)


def held(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the elements of a region, picked one dimension after the other."""
    for dim, ranges in enumerate(region.ranges):
        indices = list(itertools.chain.from_iterable(range(start, end) for start, end in ranges))
        tensor = tensor.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return tensor


@given(shapes, st.data())
def test_parts_equal_those_of_torchs_placements(shape: tuple[int, ...], data: st.DataObject) -> None:
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), label="mesh")
    here = [data.draw(st.integers(0, size - 1)) for size in mesh]
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in mesh]
    groups = [data.draw(st.sampled_from([1, 1, 2, 3])) for _ in mesh]
    whole = torch.arange(math.prod(shape)).reshape(shape)
    local = whole
    placements = [
        Shard(dim) if count == 1 else _StridedShard(dim, split_factor=count)
        for dim, count in zip(dims, groups, strict=True)
    ]
    for placement, size, part in zip(placements, mesh, here, strict=True):
        pieces, _ = placement._split_tensor(local, size, with_padding=False, contiguous=True)
        local = pieces[part]
    cuts = [MeshCut(dim, size, part, count) for dim, size, part, count in zip(dims, mesh, here, groups, strict=True)]
    region = dtensor_region(shape, cuts)
    assert region.filled == tuple(local.shape)
    assert torch.equal(held(whole, region), local)
    size, offset = _compute_local_shape_and_global_offset(shape, mesh, here, placements)
    assert tuple(size) == region.filled
    if 0 not in size:
        assert tuple(offset) == region.offsets


@given(shapes, st.integers(1, 8))
def test_fully_sharded_slices_equal_dtensors_local_shards(shape: tuple[int, ...], ranks: int) -> None:
    """This includes uneven last ranks and empty ones, compared byte by byte."""
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    model = store_arrays({"w": ("I32", array)}, chunk_bytes=40)
    plan = build_load_plan(model.index, Layout(fsdp_size=ranks))
    chunks = torch.from_numpy(array).chunk(ranks)
    for rank in range(ranks):
        (piece,) = plan.ranks[rank].slices
        region = dtensor_region(shape, [MeshCut(0, ranks, rank)])
        assert same_part(region, piece.region)
        size, _ = _compute_local_shape_and_global_offset(shape, (ranks,), [rank], [Shard(0)])
        assert tuple(size) == piece.sizes
        expected = chunks[rank] if rank < len(chunks) else torch.from_numpy(array)[:0]
        assert carry_out(plan, plan.ranks[rank], model.files)[0]["w"].tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize(
    ("rule", "shape", "fully_sharded"),
    [
        ("column", (12, 5), _StridedShard(0, split_factor=2)),  # what fully_shard makes of a tensor cut in dim 0
        ("row", (7, 12), Shard(0)),
        ("gate_up", (24, 5), None),
        ("replicate", (5, 3), Shard(0)),
    ],
)
def test_tensor_parallel_and_fully_sharded_combine(
    rule: str, shape: tuple[int, ...], fully_sharded: Shard | None
) -> None:
    """The mesh of (fsdp, tp) processes counts ranks in Longshore's order."""
    tp, fsdp = 2, 3
    array = np.zeros(shape, np.uint16)
    plan = build_load_plan(store_arrays({"w": ("BF16", array)}).index, Layout(tp, fsdp), parse_rules({"w": rule}))
    for rank in range(tp * fsdp):
        here = divmod(rank, tp)
        (piece,) = plan.ranks[rank].slices
        if rule == "gate_up":  # fully_shard cannot do these; the part of each matrix is what counts
            assert same_part(
                dtensor_region(shape, [MeshCut(0, tp, here[1], groups=2), MeshCut(0, fsdp, here[0])]), piece.region
            )
            continue
        cuts = [MeshCut(0, fsdp, here[0], getattr(fully_sharded, "split_factor", 1))]
        if rule != "replicate":
            cuts.append(MeshCut(0 if rule == "column" else 1, tp, here[1]))
        assert same_part(dtensor_region(shape, cuts), piece.region), rank


def test_equal_regions_are_recognised_in_any_form() -> None:
    assert same_part(Region((((0, 2), (2, 4)),)), Region((((0, 4),),)))
    assert same_part(Region((((0, 2),),), padding=3), Region((((0, 2),),)))
    assert not same_part(Region((((0, 2), (4, 6)),)), Region((((0, 4),),)))
    assert not same_part(Region((((2, 4), (0, 2)),)), Region((((0, 4),),)))
    assert same_part(Region((((4, 4),), ((0, 3),))), Region(((), ((0, 3),))))
    assert not same_part(Region((((4, 4),), ((0, 3),))), Region(((), ((0, 2),))))
