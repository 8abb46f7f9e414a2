"""Load a published checkpoint into an FSDP2 model with torch.distributed.checkpoint.

    torchrun --nproc-per-node 8 examples/dcp_load.py s3://models/llama-70b --device cuda

Each rank reads the parts that it holds, verified, and the ranks of a machine read each chunk from the store once.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from cluster import config_folder
from engines.dcp import LongshoreReader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model, or a folder with it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (torch.distributed.get_world_size(),))

    config = AutoConfig.from_pretrained(config_folder(args.model))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=args.device)  # memory for the rank's part only

    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]  # it is not in the checkpoint
    reader = LongshoreReader(args.model)
    dcp.load(state, storage_reader=reader)
    model.tie_weights()
    # Buffers that no checkpoint has: `to_empty` has left them without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(args.device)

    ids = torch.arange(1, 33, device=args.device)[None]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    if torch.distributed.get_rank() == 0:
        print(f"loss {loss.item():.4f}, {reader.report['store_bytes']} bytes from the store", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
