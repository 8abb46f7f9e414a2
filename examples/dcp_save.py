"""Save an FSDP2 model with torch.distributed.checkpoint, as a published checkpoint of safetensors files.

    torchrun --nproc-per-node 8 examples/dcp_save.py ./llama-8b s3://models/run-7 --device cuda

Each rank writes a part of it, and `longshore.load` and all engines read the result.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from engines.dcp import LongshoreWriter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with a model")
    parser.add_argument("to", help="URI to save it at")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (torch.distributed.get_world_size(),))

    model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Train here.

    writer = LongshoreWriter(args.to, extra_files=[os.path.join(args.model, "config.json")])
    dcp.save(model.state_dict(), storage_writer=writer)
    if torch.distributed.get_rank() == 0:
        print(f"saved {writer.report.revision}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
