"""A vLLM engine that is told what to do: `python -m tests.support.vllm_session OPTIONS`, in vLLM's environment.

OPTIONS: arguments of `vllm.LLM` as JSON. Each line on stdin is a list in JSON, and each is answered by a line that
begins with "answer: ":

    ["tokens", prompt]          the tokens that the model writes, and how many of the prompt's the cache had
    ["update", URI, options]    "" or the text of the error
    ["report"]                  what the last update that was taken has read and taken
    ["reload"]                  each worker loads what its folder names
    ["pointers"]                for each worker, addresses of parameters that are never packed
    ["fail"]                    the last worker raises an error in the exchange of the next update
    ["die", class, method]      the last worker is to die when the next update calls this of `resident_weights`
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any


def pointers(worker: Any) -> list[int]:
    model = worker.model_runner.model
    return [parameter.data_ptr() for name, parameter in model.named_parameters() if "norm" in name or "embed" in name]


def die(worker: Any, kind: str, method: str) -> None:
    from engines import resident_weights

    if worker.rank:
        setattr(getattr(resident_weights, kind), method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def fail(worker: Any) -> None:
    from engines.resident_weights import Update

    original = Update.exchange

    def exchange(update: Update) -> None:
        Update.exchange = original  # type: ignore[method-assign]
        raise RuntimeError("no kernel")

    if worker.rank:
        Update.exchange = exchange  # type: ignore[method-assign]


def main() -> None:
    from vllm import LLM, SamplingParams

    from engines.vllm_updates import update

    report = None
    llm = LLM(skip_tokenizer_init=True, **json.loads(sys.argv[1]))
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)

    def answer(kind: str, *told: Any) -> Any:
        nonlocal report
        if kind == "report":
            return report and asdict(report)
        if kind == "tokens":
            (found,) = llm.generate([{"prompt_token_ids": told[0]}], sampling)
            return list(found.outputs[0].token_ids), found.num_cached_tokens
        if kind == "pointers":
            return llm.collective_rpc(pointers)
        if kind == "reload":
            return llm.collective_rpc("reload_weights")
        if kind == "fail":
            return llm.collective_rpc(fail)
        if kind == "die":
            return llm.collective_rpc(die, args=told)
        try:
            report = update(llm, told[0], **told[1])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    print("answer: ready", flush=True)
    for line in sys.stdin:
        print(f"answer: {json.dumps(answer(*json.loads(line)))}", flush=True)


if __name__ == "__main__":
    main()
