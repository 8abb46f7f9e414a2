"""Train a tiny Llama for two steps with FSDP2, and save it as a checkpoint that every engine loads.

    torchrun --nproc-per-node 2 examples/train_save_serve.py /models/run-7
    longshore load /models/run-7 --tp 2 --device cpu --no-keep
    python examples/vllm_generate.py /models/run-7 --tokens 1 5 7 9 --options '{"dtype": "float32"}'

No rank gathers the model. In the place of the tiny one stands your own: only the call of `cluster.save` is needed.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", help="folder or URI for the checkpoint; a folder must be shared by all ranks")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).to(args.device)
    mesh = init_device_mesh(args.device, (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(1, 33, device=args.device)[None]
    rank = torch.distributed.get_rank()
    for step in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    report = cluster.save(model.state_dict(), args.uri, extra_files={"config.json": config.to_json_string().encode()})
    if rank == 0:
        print(f"saved revision {report.revision}: {report.size_bytes} bytes", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
