"""Modules of DTensors, filled as each rank of a mesh. Torch's fake process group stands in for the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from actors.shard import RankShard
from cluster.errors import ConfigError, ModuleMismatch
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan
from tests.support.planned_models import store_arrays
from tests.support.shards import shard_of

NUMBERS = itertools.count()
ROWS, WIDTH = 7, 6  # 7 rows are uneven over 2, 3 and 4; the fourth of 4 has one, the fifth of 5 none
ARRAYS = {
    "up.weight": np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32),
    "up.bias": np.random.default_rng(2).standard_normal(ROWS).astype(np.float32),
    "norm.weight": np.random.default_rng(3).standard_normal(WIDTH).astype(np.float32),
}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, ROWS)


@contextmanager
def as_rank(rank: int, *sizes: int) -> Iterator[DeviceMesh]:
    """Run this process as that rank of a mesh without other processes."""
    world = int(np.prod(sizes))
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # Torch caches meshes, and with them this process's rank, for later equal meshes; these are never equal.
        names = tuple(f"mesh {next(NUMBERS)}" for _ in sizes)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def shard(layout: Layout, rank: int, rules: dict[str, str] | None = None) -> RankShard:
    model = store_arrays({name: ("F32", array) for name, array in ARRAYS.items()})
    return shard_of(build_load_plan(model.index, layout, parse_rules(rules)), rank, list(model.files))


def part_on_meta() -> Part:
    with torch.device("meta"):
        return Part()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_fully_sharded_modules_take_the_slices_unchanged(ranks: int) -> None:
    for rank in range(ranks):
        with as_rank(rank, ranks) as mesh:
            module = part_on_meta()
            fully_shard(module, mesh=mesh)
            mine = shard(Layout(fsdp_size=ranks), rank)
            mine.into(module)
            for name, parameter in module.named_parameters():
                assert isinstance(parameter, nn.Parameter)
                assert isinstance(parameter, DTensor)
                assert tuple(parameter.shape) == ARRAYS[name].shape
                local = parameter.to_local()
                chunks = torch.from_numpy(ARRAYS[name]).chunk(ranks)
                assert torch.equal(local, chunks[rank] if rank < len(chunks) else torch.from_numpy(ARRAYS[name])[:0])
                assert local.data_ptr() == mine[name].data_ptr()
                assert parameter.requires_grad


def test_a_rank_at_another_place_of_the_mesh_is_refused() -> None:
    """Shapes alone would match."""
    with as_rank(0, 2) as mesh:
        module = nn.Module()
        module.norm = nn.Module()
        weight = torch.empty(WIDTH, device="meta")
        module.norm.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
        here = shard(Layout(fsdp_size=2), 0)
        assert here.into(module, prefix="norm", rename={"weight": "norm.weight"}).filled == 1
        other = shard(Layout(fsdp_size=2), 1)
        with pytest.raises(
            ModuleMismatch, match=r"norm\.weight: this process's place.*\(0, 3\).*the rank has.*\(3, 6\)"
        ):
            other.into(module, prefix="norm", rename={"weight": "norm.weight"})
        with pytest.raises(ModuleMismatch, match="place in the mesh"):
            other.dtensor("norm.weight", mesh)


def test_a_slice_cut_differently_from_the_module_is_refused() -> None:
    with as_rank(0, 2) as mesh:
        module = part_on_meta()
        fully_shard(module, mesh=mesh)
        differs = r"3 tensors differ.*expected torch.float32 \(3,\) as this process's part of a DTensor"
        with pytest.raises(ModuleMismatch, match=differs):
            shard(Layout(), 0).into(module)
        assert all(parameter.is_meta for parameter in module.parameters())


def test_single_tensors_become_dtensors() -> None:
    with as_rank(1, 2) as mesh:
        mine = shard(Layout(fsdp_size=2), 1)
        made = mine.dtensor("up.weight", mesh)
        assert made.placements == (Shard(0),)
        assert tuple(made.shape) == (ROWS, WIDTH)
        assert made.to_local().data_ptr() == mine["up.weight"].data_ptr()
        whole = shard(Layout(), 0).dtensor("up.weight", mesh, [Replicate()])
        assert torch.equal(whole.to_local(), torch.from_numpy(ARRAYS["up.weight"]))
        with pytest.raises(ConfigError, match="cannot be filled by parts"):
            mine.dtensor("up.weight", mesh, [Partial()])
        with pytest.raises(ConfigError, match="2 placements do not fit a mesh of 1"):
            mine.dtensor("up.weight", mesh, [Shard(0), Shard(1)])


def test_tensor_parallel_and_fully_sharded_on_one_mesh() -> None:
    """A mesh of (fsdp, tp) counts ranks in Longshore's order."""
    rules = {"up.weight": "row", "up.bias": "replicate", "norm.weight": "column"}
    for rank in range(4):
        with as_rank(rank, 2, 2) as mesh:
            mine = shard(Layout(2, 2), rank, rules)
            weight = mine.dtensor("up.weight", mesh, [Shard(0), Shard(1)])
            fsdp, tensor = divmod(rank, 2)
            expected = torch.from_numpy(ARRAYS["up.weight"]).chunk(2, dim=1)[tensor].chunk(2)[fsdp]
            assert torch.equal(weight.to_local(), expected)
            mine.dtensor("up.bias", mesh, [Shard(0), Replicate()])


def test_a_dtensor_excludes_the_padding_of_a_vocabulary() -> None:
    for rank in range(2):
        with as_rank(rank, 2) as mesh:
            mine = shard(Layout(2), rank, {"up.**": "vocabulary", "**": "replicate"})
            assert mine["up.weight"].shape == (4, WIDTH)
            made = mine.dtensor("up.weight", mesh, [Shard(0)])
            assert torch.equal(made.to_local(), torch.from_numpy(ARRAYS["up.weight"]).chunk(2)[rank])
            assert made.to_local().data_ptr() == mine["up.weight"].data_ptr()


@pytest.mark.parametrize("placements", [5, Shard(0), [0], "0"])
def test_a_bad_mesh_or_bad_placements_are_refused(placements: Any) -> None:
    held = shard(Layout(fsdp_size=2), 0)
    for mesh in (None, 5):
        with pytest.raises(ConfigError, match="must be a DeviceMesh"):
            held.dtensor("up.weight", mesh)  # type: ignore[arg-type]
    with as_rank(0, 2) as mesh, pytest.raises(ConfigError, match="placements must be"):
        held.dtensor("up.weight", mesh, placements)
