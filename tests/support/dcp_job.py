"""Ranks of a job that load a checkpoint with torch.distributed.checkpoint, by Longshore's reader and by torch's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.free_ports import free_ports
from tests.support.ray_clusters import REPOSITORY

WORLD = 4


def stored_tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of the checkpoint: some that four ranks cannot share evenly, of several dtypes."""
    random = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    return {
        "whole": make(300, 1200),
        "rows": make(2049, 1101),
        "columns": make(700, 1999, dtype=torch.bfloat16),
        "both": make(1023, 1301),
        "strided": make(1027, 700),
        "few_rows": make(2, 3),
        "experts": make(5, 130, 1030, dtype=torch.float16),
        "replicated": make(50, 60, dtype=torch.bfloat16),
        "fp8": make(64, 64).to(torch.float8_e4m3fn),
        "counts": torch.arange(100),
        "scalar": make(),
        "unused": make(1000, 1000),
    }


def make_state(rank: int) -> dict[str, Any]:
    """Return one rank's state dict, without "unused". Casts: float32 <-> bfloat16, fp8 and integers to float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
    from torch.distributed.tensor.placement_types import _StridedShard

    full = stored_tensors()
    line = init_device_mesh("cpu", (WORLD,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    state: dict[str, Any] = {
        "whole": torch.zeros(300, 1200),
        "fp8": torch.zeros(64, 64),
        "counts": torch.zeros(100),
        "scalar": torch.zeros(()),
        "few_rows": torch.zeros(3, 2).t(),  # not contiguous
    }
    for name, mesh, placements in (
        ("rows", line, [Shard(0)]),
        ("columns", line, [Shard(1)]),
        ("both", grid, [Shard(0), Shard(1)]),
        ("experts", grid, [Shard(0), Shard(2)]),
        ("replicated", grid, [Replicate(), Shard(0)]),
    ):
        dtype = {"both": torch.bfloat16, "replicated": torch.float32}.get(name, full[name].dtype)
        state[name] = zeros(*full[name].shape, dtype=dtype, device_mesh=mesh, placements=placements)
    local = torch.zeros_like(full["strided"].chunk(2)[rank % 2].chunk(2)[rank // 2])
    state["strided"] = DTensor.from_local(  # as fully_shard makes of a tensor that is cut in dim 0 already
        local,
        grid,
        [_StridedShard(0, split_factor=2), Shard(0)],
        run_check=False,
        shape=full["strided"].shape,
        stride=full["strided"].stride(),
    )
    return state


def local_bytes(value: Any) -> bytes:
    local = value.to_local() if hasattr(value, "to_local") else value
    return bytes(local.contiguous().reshape(-1).view(torch.uint8).numpy())


def settings() -> Any:
    from cluster.config import Config

    return Config.model_validate(json.loads(os.environ["SETTINGS"]))


def make_reader() -> Any:
    from engines.dcp import LongshoreReader

    return LongshoreReader(
        os.environ["URI"], endpoint_url=os.environ["ENDPOINT"], region=os.environ["REGION"], settings=settings()
    )


def main(case: str) -> dict[str, Any]:
    """Run one rank. "all": every rank loads. "alone": only the last one loads its rows, while the others wait.

    "save" and "save in the background": `save_and_load`.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, zeros

    rank = dist.get_rank()
    reader = make_reader()
    if case.startswith("save"):
        return save_and_load(background=case != "save")
    if case == "alone":
        rows = {"rows": make_state(rank)["rows"]}
        if rank == WORLD - 1:
            dcp.load(rows, storage_reader=reader, no_dist=True)
        dist.barrier()
        wrong = [] if rank < WORLD - 1 or local_bytes(rows["rows"]) == expected_rows() else ["rows"]
        return {"wrong": wrong, "report": reader.report}
    ours, theirs = make_state(rank), make_state(rank)
    some = DeviceMesh("cpu", [1, 3])
    for state in (ours, theirs):
        state["whole"] = zeros(300, 1200, device_mesh=some, placements=[Shard(0)])
    dcp.load(ours, storage_reader=reader)
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(os.environ["FOLDER"]))
    wrong = [name for name, value in ours.items() if local_bytes(value) != local_bytes(theirs[name])]
    wrong += [name for name, value in ours.items() if len(local_bytes(value)) and not any(local_bytes(value))]
    return {"wrong": wrong, "report": reader.report, "bytes": sum(len(local_bytes(each)) for each in ours.values())}


def save_and_load(*, background: bool) -> dict[str, Any]:
    """Save what torch's reader has loaded, and load it again into other placements.

    `background`: with `dcp.async_save`, while the tensors get other contents.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    from engines.dcp import LongshoreReader, LongshoreWriter

    state = make_state(dist.get_rank())
    dcp.load(state, storage_reader=HuggingFaceStorageReader(os.environ["FOLDER"]))
    expected = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for name, each in state.items()
    }
    group = dist.new_group(backend="gloo") if background else None
    writer = LongshoreWriter(os.environ["SAVED"], chunk_bytes=1 << 20, process_group=group)
    if background:
        saving = dcp.async_save(state, storage_writer=writer, process_group=group)
        for each in state.values():
            (each.to_local() if hasattr(each, "to_local") else each).zero_()
        dist.barrier()  # of the default group, while the save talks in its own
        saving.result(timeout=200)
    else:
        dcp.save(state, storage_writer=writer)
    mesh = init_device_mesh("cpu", (WORLD,))
    again = {
        name: zeros(*each.shape, dtype=each.dtype, device_mesh=mesh, placements=[Shard(0)])
        for name, each in state.items()
        if each.dim() == 2
    }
    dcp.load(again, storage_reader=LongshoreReader(writer.report.uri, settings=settings()))
    wrong = []
    for name, value in again.items():
        if not torch.equal(value.full_tensor(), expected[name]):
            wrong.append(name)
    return {"wrong": wrong, "revision": writer.report.revision}


def expected_rows() -> bytes:
    return local_bytes(stored_tensors()["rows"].chunk(WORLD)[-1])


def run_job(case: str, folder: Path, variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what each rank found. The ranks are processes of their own."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.dcp_job", case, str(folder / f"{case}.{rank}.json")],
            env={**os.environ, **common, **variables, "RANK": str(rank)},
            cwd=REPOSITORY,
        )
        for rank in range(WORLD)
    ]
    try:
        codes = [one.wait(timeout=240) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert codes == [0] * WORLD
    return [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(WORLD)]


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    answer = main(sys.argv[1])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    Path(sys.argv[2]).write_text(json.dumps(answer))
