"""Tokens that vLLM writes with several models, one after the other: `python -m tests.support.vllm_tokens JOBS`.

JOBS: a JSON list of arguments of `vllm.LLM`. Prints a line of JSON for each: the tokens, or the text of an error. Runs
in vLLM's environment, and all models in this process.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    for options in json.loads(sys.argv[1]):
        again = options.pop("reload", False)
        try:
            llm = LLM(skip_tokenizer_init=True, **options)
            if again:
                llm.collective_rpc("reload_weights")
            (found,) = llm.generate([{"prompt_token_ids": [1, 5, 7, 9]}], sampling)
            answer = {"tokens": list(found.outputs[0].token_ids)}
            del llm
        except Exception as error:  # told to whoever asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        cleanup_dist_env_and_memory()
        print(f"answer: {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
