"""Ranks of a training job that save models of every family: `python -m tests.support.family_saves FOLDER`.

FOLDER has a folder for each model, with its safetensors files and config.json. Four gloo ranks hold its tensors as a
training job would, in each of `WAYS`, and save them with `cluster.save` to FOLDER/MODEL/WAY.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WORLD_SIZE = 4
# Endings of names of weights whose inputs tensor parallelism divides
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight", "w2.weight", "out_proj.weight", "proj.weight", "fc2.weight")


def _fsdp(name: str, tensor: Any, meshes: Mapping[str, Any]) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, meshes["line"], [Shard(0)]) if tensor.dim() else tensor


def _columns(name: str, tensor: Any, meshes: Mapping[str, Any]) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, meshes["line"], [Shard(tensor.dim() - 1)]) if tensor.dim() else tensor


def _hsdp(name: str, tensor: Any, meshes: Mapping[str, Any]) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(tensor, meshes["grid"], [Replicate(), Shard(0)]) if tensor.dim() else tensor


def _fsdp_tp(name: str, tensor: Any, meshes: Mapping[str, Any]) -> Any:
    """Cut as `fully_shard` cuts what tensor parallelism has cut: in the same dimension, by a `_StridedShard`."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    grid = meshes["grid"]
    if tensor.dim() == 2 and name.endswith(ROW_PARALLEL):
        return distribute_tensor(tensor, grid, [Shard(0), Shard(1)])
    if not tensor.dim() or "norm" in name:
        return _hsdp(name, tensor, meshes)
    fsdp, tp = grid.get_coordinate()
    of_tp = (*tensor.chunk(2), tensor[:0])[tp]
    local = (*of_tp.chunk(2), of_tp[:0])[fsdp].clone()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(local, grid, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _whole(name: str, tensor: Any, meshes: Mapping[str, Any]) -> Any:
    return tensor


WAYS: Mapping[str, Callable[[str, Any, Mapping[str, Any]], Any]] = {
    "whole": _whole,
    "fsdp": _fsdp,
    "columns": _columns,
    "hsdp": _hsdp,
    "fsdp-tp": _fsdp_tp,
}


def save_all(rank: int, folder: Path, port: int) -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh

    import cluster

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    meshes = {
        "line": init_device_mesh("cpu", (WORLD_SIZE,)),
        "grid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")),
    }
    for model in sorted(one for one in folder.iterdir() if one.is_dir()):
        tensors: dict[str, Any] = {}
        for file in sorted(model.glob("*.safetensors")):
            tensors |= load_file(file)
        for way, cut in WAYS.items():
            state = {name: cut(name, tensor, meshes) for name, tensor in tensors.items()}
            cluster.save(state, model / way, extra_files=[model / "config.json"], max_shard_bytes=16 << 20)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    from tests.support.free_ports import free_ports

    mp.spawn(save_all, args=(Path(sys.argv[1]), free_ports(1)[0]), nprocs=WORLD_SIZE)
