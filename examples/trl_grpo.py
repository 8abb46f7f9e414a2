"""Train a published model with TRL's GRPO, and save each step as a new revision that every engine loads.

    python examples/trl_grpo.py s3://models/llama-8b s3://models/policy

Run it where TRL and Longshore are installed. The weights come from the store without a download, and go back to it
without a file between. The reward here means nothing: in its place stands your own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import longshore
from engines.transformers import from_pretrained


class SaveToStore(TrainerCallback):
    """Publishes the policy after each step. TRL calls it on every rank, as `longshore.save` wants it."""

    def __init__(self, uri: str, small_files: list[str]) -> None:
        self.uri, self.small_files = uri, small_files

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None:
        report = longshore.save(model.state_dict(), self.uri, extra_files=self.small_files)
        if state.is_world_process_zero:
            print(f"step {state.global_step}: saved revision {report.revision}", flush=True)


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the mean of each completion's token ids."""
    return [sum(ids) / len(ids) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="URI of a published model with its tokenizer")
    parser.add_argument("policy", help="URI for the trained model")
    parser.add_argument("--prompts", nargs="+", default=["Count to seven."])
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of trl.GRPOConfig, as JSON")
    args = parser.parse_args()

    folder = Path(longshore.config_folder(args.model))
    small_files = [str(path) for path in folder.iterdir() if not path.name.startswith("longshore")]
    trainer = GRPOTrainer(
        model=from_pretrained(args.model, dtype="auto"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": args.prompts * 8}),
        args=GRPOConfig(**{"save_strategy": "no", "report_to": "none", **args.options}),
        callbacks=[SaveToStore(args.policy, small_files)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
