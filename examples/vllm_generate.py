"""Write on with vLLM and a model in a store, without a download of its weights.

    python examples/vllm_generate.py s3://models/llama-8b --tokens 1 15043 3186
    python examples/vllm_generate.py s3://models/llama-70b --tokens 1 15043 3186 --options '{"tensor_parallel_size": 4}'

Run it where vLLM and Longshore are installed. Config and tokenizer go to a local folder; each worker of vLLM reads its
part of the weights from the store.
"""

from __future__ import annotations

import argparse
import json
import os

import longshore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of the model, or a folder that `longshore config-folder` has made")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="ids of the prompt's tokens")
    parser.add_argument("--count", type=int, default=16, help="tokens to write")
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    folder = args.model if os.path.isdir(args.model) else longshore.config_folder(args.model)
    llm = LLM(**{"model": folder, "load_format": "longshore", "skip_tokenizer_init": True, **args.options})
    sampling = SamplingParams(max_tokens=args.count, temperature=0, ignore_eos=True, detokenize=False)
    (found,) = llm.generate([{"prompt_token_ids": args.tokens}], sampling)
    print("written:", *found.outputs[0].token_ids)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
