"""A training step of an FSDP2 model whose parameters are the slices that Longshore loads, one rank in each process.

    ray start --head                                                        # and on every other node: ray start
    torchrun --nproc-per-node 2 examples/fsdp2.py s3://models/llama-8b --config /data/llama-8b --device cuda

No process reads more of the model than its own share; the chunks that ranks of a node have in common are fetched once.
"""

from __future__ import annotations

import argparse
import os

# Each process sees one GPU, its own: Longshore loads to the first that is visible. Before torch looks at them.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("LOCAL_RANK", "0"))

import ray
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from cluster import host_rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI or folder of the checkpoint")
    parser.add_argument("--config", help="folder with config.json, when the model's is not on this machine")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("nccl" if given.device == "cuda" else "gloo")
    ray.init(address="auto", log_to_driver=False)

    # On the meta device: nothing is allocated, neither the whole model nor a share of it.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given.config or given.model))
    mesh = init_device_mesh(given.device, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    group = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)  # the same in all processes of this torchrun
    with host_rank(given.model, rank, fsdp_size=ranks, device=given.device, group=group) as shard:
        shard.into(model)  # the parameters are the rank's tensors now, and keep their memory after the block

    ids = torch.arange(1, 33, device=given.device)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    torch.distributed.destroy_process_group()
    ray.shutdown()


if __name__ == "__main__":
    main()
