"""One of two processes that run models filled from Longshore's slices together, over Gloo.

python -m tests.support.gloo_rank RANK FOLDER: FOLDER/CASE is the checkpoint of each case; the logits that this process
got go to FOLDER/CASE-RANK.pt, with how many tensors share the shard's memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from actors.shard import RankShard
from cluster.layouts.mesh import Layout
from tests.support.hf_models import FAMILIES
from tests.support.shards import shards_of

RANKS = 2
IDS = torch.arange(3, 19)[None]
# case -> (way of sharing a model, family, changes of its config)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fsdp-llama": ("fsdp", "llama", {"vocab_size": 97}),  # rows that two cannot share evenly
    "fsdp-gemma2": ("fsdp", "gemma2", {}),  # tied
    "tp-llama": ("tp", "llama", {"vocab_size": 97}),
    "tp-gemma2": ("tp", "gemma2", {}),
    "tp-mixtral": ("tp", "mixtral", {}),  # experts that transformers stacks
    "ep-mixtral": ("ep", "mixtral", {}),  # whole ones, half of them on each rank; attention as with tp
    "ep-qwen3_moe": ("ep", "qwen3_moe", {}),
}


def model_on_meta(family: str, folder: Path) -> Any:
    import transformers
    from transformers.initialization import no_tie_weights

    tiny = FAMILIES[family]
    config = getattr(transformers, tiny.config_class).from_pretrained(folder)
    with torch.device("meta"), no_tie_weights():  # as transformers' loader: tied when filled
        return getattr(transformers, tiny.model_class)._from_config(config).eval()


def fully_sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Any, *, ep_size: int = 1) -> Any:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig(tp_size=RANKS, ep_size=ep_size)
    _, mesh = initialize_distributed_mesh(config)
    return type(model).maybe_distribute_model(model, config, mesh)


def shared(model: Any, shard: RankShard) -> int:
    """Parameters whose local part is in the shard's memory."""
    own = {tensor.untyped_storage().data_ptr() for tensor in shard.values()}
    local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return sum(tensor.untyped_storage().data_ptr() in own for tensor in local)


def run(rank: int, folder: Path, case: str) -> None:
    how, family, _ = CASES[case]
    model = model_on_meta(family, folder / case)
    if how == "fsdp":
        model, layout = fully_sharded(model), Layout(fsdp_size=RANKS)
    elif how == "tp":
        model, layout = tensor_parallel(model), Layout(tensor_parallel_size=RANKS)
    else:
        model = tensor_parallel(model, ep_size=RANKS)
        layout = Layout(tensor_parallel_size=RANKS, expert_parallel_size=RANKS)
    shard = shards_of(folder / case, layout)[rank]
    done = shard.into(model, convert=True)
    found = {"shared": shared(model, shard), "filled": done.filled, "copied": len(done.copied)}
    with torch.no_grad():
        torch.save({"logits": model(input_ids=IDS).logits, **found}, folder / f"{case}-{rank}.pt")


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    for case in CASES:
        run(rank, folder, case)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
