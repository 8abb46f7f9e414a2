"""Write on with a transformers model whose weights come straight from a store, without Ray.

    python examples/transformers_from_store.py s3://models/llama-8b --tokens 1 15043 3186
    torchrun --nproc-per-node 4 examples/transformers_from_store.py s3://models/llama-70b --tp 4 --tokens 1 15043 3186

With --tp each process reads the parts that transformers gives its rank, and the processes of a machine read each chunk
from the store once.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from engines.transformers import from_pretrained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model, or a folder with it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="ids of the prompt's tokens")
    parser.add_argument("--count", type=int, default=16, help="tokens to write")
    parser.add_argument("--device", help="a device of torch; without it transformers chooses")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, under torchrun")
    args = parser.parse_args()

    where: dict[str, Any] = {"device_map": args.device or "auto"}
    if args.tp > 1:
        from transformers.distributed import DistributedConfig

        where = {"distributed_config": DistributedConfig(tp_size=args.tp)}
    model = from_pretrained(args.model, dtype="auto", **where).eval()
    ids = torch.tensor([args.tokens], device=model.device)
    written = model.generate(ids, max_new_tokens=args.count, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    if os.environ.get("RANK", "0") == "0":
        print("written:", *written.tolist())


if __name__ == "__main__":
    main()
