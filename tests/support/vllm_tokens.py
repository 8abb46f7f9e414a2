"""Tokens that vLLM writes with several models: `python -m tests.support.vllm_tokens JOBS`.

JOBS: a JSON list of arguments of `vllm.LLM`. Prints a line of JSON for each: the tokens, or the text of an error. Runs
in vLLM's environment. Each model has a process, forked when vLLM is imported, which takes long.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm  # noqa: F401

    for options in json.loads(sys.argv[1]):
        child = os.fork()
        if not child:
            print(f"answer: {json.dumps(answer(options))}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def answer(options: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens by a model.

    `reload`: whether its weights are loaded a second time before. `update`: a URI of which it is to take the weights
    before; "refused" is then the text of the error, or "".
    """
    from vllm import LLM, SamplingParams

    again, revision = options.pop("reload", False), options.pop("update", "")
    refused: dict[str, str] = {}
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    try:
        llm = LLM(skip_tokenizer_init=True, **options)
        if again:
            llm.collective_rpc("reload_weights")
        if revision:
            from engines.vllm_updates import update

            try:
                update(llm, revision)
                refused["refused"] = ""
            except Exception as error:
                refused["refused"] = f"{type(error).__name__}: {error}"
        (found,) = llm.generate([{"prompt_token_ids": [1, 5, 7, 9]}], sampling)
        return {"tokens": list(found.outputs[0].token_ids), **refused}
    except Exception as error:  # told to whoever asked
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
