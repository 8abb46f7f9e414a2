"""Write real checkpoints of FSDP jobs with four gloo ranks: `python make_fsdp_checkpoints.py FOLDER`.

Each subfolder gets the files of one kind, and `FOLDER/KIND.expected.pt` what torch itself gathers from the same model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4


class Model(nn.Module):
    """A model whose rows do not divide by four, in two dtypes, with a buffer and a tensor smaller than the mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 90)
        self.down = nn.Linear(90, 33)
        self.low = nn.Linear(33, 7, dtype=torch.bfloat16)
        self.tiny = nn.Parameter(torch.randn(3))
        self.register_buffer("steps", torch.arange(5))


def gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return whole tensors, as torch puts them together."""
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step, so that the optimizer has state."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def save_with_accelerate(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Let Accelerate shard a model with FSDP2 and save it with `save_state`. Return its state dict.

    Accelerate sets the type FSDP only where it finds an accelerator. So it is set here.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    step(model, optimizer)
    accelerator.save_state(str(folder))
    return model.state_dict()


def run(rank: int, folder: Path, store: str) -> None:
    """Write all kinds, as one rank."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ.update(ranks, ACCELERATE_USE_CPU="true")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    flat = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def write(kind: str, model: nn.Module) -> None:
        state = model.state_dict()
        (folder / kind).mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / kind / f"model_world_size_{RANKS}_rank_{rank}.pt")
        expected = gathered(state)
        if rank == 0:
            torch.save(expected, folder / f"{kind}.expected.pt")

    def fresh() -> Model:
        torch.manual_seed(7)
        return Model()

    write("fsdp2", fully_shard(fresh(), mesh=flat))
    write("hsdp", fully_shard(fresh(), mesh=square))
    both = parallelize_module(fresh(), square["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    write("fsdp_tp", fully_shard(both, mesh=square["dp"]))
    write("tp", parallelize_module(fresh(), square["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}))

    trained = fully_shard(fresh(), mesh=flat)
    optimizer = torch.optim.AdamW(trained.parameters())
    step(trained, optimizer)
    dcp.save(
        {"model": trained.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, checkpoint_id=folder / "dcp"
    )
    titan = {**trained.state_dict(), "optimizer": optimizer.state_dict(), "train_state": {"step": torch.tensor(3)}}
    dcp.save(titan, checkpoint_id=folder / "titan")
    expected = gathered(trained.state_dict())
    accelerated = gathered(save_with_accelerate(fresh(), folder / "accelerate"))
    writer = dcp.HuggingFaceStorageWriter(str(folder / "hugging_face"), save_distributed=True)
    dcp.save(trained.state_dict(), storage_writer=writer)
    if rank == 0:
        for kind in ("dcp", "titan", "hugging_face"):
            torch.save(expected, folder / f"{kind}.expected.pt")
        torch.save(accelerated, folder / "accelerate.expected.pt")

    torch.manual_seed(7)
    old = FSDP1(nn.Sequential(nn.Linear(24, 90), nn.Linear(90, 33)), device_id=torch.device("cpu"))
    whole = {name: one.clone() for name, one in old.state_dict().items()}  # FULL_STATE_DICT, as torch gathers it
    with FSDP1.state_dict_type(old, StateDictType.SHARDED_STATE_DICT):
        (folder / "fsdp1").mkdir(exist_ok=True)
        torch.save(old.state_dict(), folder / "fsdp1" / f"model_rank{rank}.pt")
    if rank == 0:
        torch.save(whole, folder / "fsdp1.expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    mp.spawn(run, (target, str(target / "rendezvous")), RANKS)
    from accelerate.utils import merge_fsdp_weights
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    merge_fsdp_weights(str(target / "accelerate" / "pytorch_model_fsdp_0"), str(target / "accelerate_merged"))
    dcp_to_torch_save(target / "dcp", target / "dcp_merged.pt")
