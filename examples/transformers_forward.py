"""Write on with a transformers model whose weights Longshore has put into the workers of a Ray cluster.

    python examples/transformers_forward.py s3://models/llama-8b --config /data/llama-8b --tokens 1 15043 3186
    python examples/transformers_forward.py s3://models/llama-70b --config /data/llama-70b --tp 4

The weights never come here: a function goes to them, makes the model on the meta device and fills it with the tensors
that are there already. With --tp it is transformers' own tensor-parallel model: each worker has its part, and they talk
among themselves. `--config` is a folder with the model's config.json, for what transformers reads itself.
"""

from __future__ import annotations

import argparse
from typing import Any

import cluster


def meeting_place(shard: Any) -> str:
    """Runs on rank 0: where the ranks find each other."""
    import socket

    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def build(shard: Any, config: Any, ranks: int, meet: str) -> Any:
    """Runs inside a worker, where transformers must be installed too: a model of the worker's tensors."""
    import os

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh
    from transformers.initialization import no_tie_weights

    with torch.device("meta"), no_tie_weights():  # names that are tied share one tensor when they are filled
        model = AutoModelForCausalLM.from_config(config)
    if ranks > 1:
        os.environ |= {"RANK": str(shard.rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}  # a worker sees one GPU
        backend = "nccl" if shard.device.startswith("cuda") else "gloo"
        torch.distributed.init_process_group(backend, init_method=meet, rank=shard.rank, world_size=ranks)
        parallel = DistributedConfig(tp_size=ranks)
        _, mesh = initialize_distributed_mesh(parallel)
        model = type(model).maybe_distribute_model(model, parallel, mesh)
    shard.into(model.eval(), convert=True)
    return model


def write_on(shard: Any, config: Any, ranks: int, meet: str, tokens: list[int], count: int) -> list[int]:
    """Runs inside every worker: the tokens that the model finds likeliest."""
    import torch

    if "model" not in shard.kept:  # for later calls; given up with the model, as nothing in a global would be
        shard.kept["model"] = build(shard, config, ranks, meet)
    ids = torch.tensor([tokens], device=shard.device)
    with torch.inference_mode():
        for _ in range(count):
            logits = shard.kept["model"](input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    written: list[int] = ids[0, len(tokens) :].tolist()
    return written


def part(shard: Any) -> None:
    """Runs inside every worker: they stop talking to each other."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI or folder of the checkpoint")
    parser.add_argument("--config", help="folder with config.json, when the model's is not on this machine")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--count", type=int, default=8)
    given = parser.parse_args()
    config = AutoConfig.from_pretrained(given.config or given.model)
    with cluster.load(given.model, tensor_parallel_size=given.tp, device=given.device) as model:
        (meet,) = model.call(meeting_place, ranks=[0])
        written = model.call(write_on, config, given.tp, meet, given.tokens, given.count)
        model.call(part)
    print("written:", *written[0])


if __name__ == "__main__":
    main()
