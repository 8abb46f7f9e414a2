"""Write on with a transformers model whose weights Longshore has put into the workers of a Ray cluster.

    python examples/transformers_forward.py s3://models/llama-8b --config /data/llama-8b --tokens 1 15043 3186

The weights never come here: the function goes to them, makes the model on the meta device and fills it with the tensors
that are there already. `--config` is a folder with the model's config.json, for what transformers reads itself.
"""

from __future__ import annotations

import argparse
from typing import Any

import cluster


def write_on(shard: Any, config: Any, tokens: list[int], count: int) -> list[int]:
    """Runs inside a worker, where transformers must be installed too. The tokens that the model finds likeliest."""
    import torch
    from transformers import AutoModelForCausalLM

    if "model" not in shard.kept:  # for later calls; given up with the model, as nothing in a global would be
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shard.into(model.eval(), convert=True)
        shard.kept["model"] = model
    ids = torch.tensor([tokens], device=shard.device)
    with torch.inference_mode():
        for _ in range(count):
            logits = shard.kept["model"](input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    written: list[int] = ids[0, len(tokens) :].tolist()
    return written


def main() -> None:
    from transformers import AutoConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI or folder of the checkpoint")
    parser.add_argument("--config", help="folder with config.json, when the model's is not on this machine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--count", type=int, default=8)
    given = parser.parse_args()
    config = AutoConfig.from_pretrained(given.config or given.model)
    with cluster.load(given.model, device=given.device) as model:
        (written,) = model.call(write_on, config, given.tokens, given.count)
    print("written:", *written)


if __name__ == "__main__":
    main()
