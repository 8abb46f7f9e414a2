"""Give a running vLLM engine new weights, without a restart: what a rollout of reinforcement learning does.

    python examples/vllm_update.py s3://models/policy s3://models/step-100 s3://models/step-200 --tokens 1 5

Writes on with the model, then takes each further revision in place and writes on again. A trainer publishes the
revisions (`longshore publish`, `cluster.save`). Only what changed is read.
"""

from __future__ import annotations

import argparse
import json
import os

import longshore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model, or a folder that `longshore config-folder` has made")
    parser.add_argument("revisions", nargs="+", help="URIs of further revisions of the model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="ids of the prompt's tokens")
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    from engines.vllm_updates import update

    folder = args.model if os.path.isdir(args.model) else longshore.config_folder(args.model)
    ours = {"load_format": "longshore", "weight_transfer_config": {"backend": "longshore"}}
    llm = LLM(**{"model": folder, "skip_tokenizer_init": True, **ours, **args.options})
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)

    def write() -> None:
        (found,) = llm.generate([{"prompt_token_ids": args.tokens}], sampling)
        print("written:", *found.outputs[0].token_ids)

    write()
    for uri in args.revisions:
        update(llm, uri)
        write()


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
