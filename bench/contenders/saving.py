"""Programs that make one Hugging Face checkpoint out of the parts that the ranks of a trainer have.

A program runs in each of `RANKS` processes, or in one. It gets a `Part`, prepares, calls `part.start()`, and writes
to `part.target`. The last programs write the files that mergers read: those of Accelerate and DeepSpeed with these
packages, and those of verl with `torch.save`, as verl does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.contender import NotRunnable
from bench.harness.rounds import REPOSITORY

RANKS = 4
ACCELERATE = "pytorch_model_fsdp_0"  # Accelerate's name for the folder of the model


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one process in a program."""

    rank: int
    shape: Mapping[str, Any]  # of the Llama, as `bench.harness.models.llama_shape` returns it
    source: Path  # files of a trainer, for mergers
    target: Path  # an empty folder, for the result
    start: Callable[[], None]  # waits until all processes are ready: the clock starts


def llama_config(shape: Mapping[str, Any]) -> Any:
    """Return the config of the Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        intermediate_size=shape["intermediate"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def sharded_llama(part: Part) -> Any:
    """Return the Llama in bf16, cut by FSDP2 over all ranks. No rank ever has the whole."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    store = f"file://{part.target}.rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=part.rank, world_size=RANKS)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(llama_config(part.shape)).bfloat16()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        numbers = torch.Generator().manual_seed(RANKS * number + part.rank)
        parameter.detach().to_local().view(torch.int16).random_(generator=numbers)  # any bits will do
    return model


# -- the ranks hold the model --------------------------------------------------------------------------------------


def save_longshore(part: Part) -> None:
    """Call `cluster.save`."""
    from cluster import save

    model = sharded_llama(part)
    part.start()
    save(model.state_dict(), part.target, model=model)


def save_dcp(part: Part) -> None:
    """Write shards with torch's DCP, which rank 0 consolidates."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    model = sharded_llama(part)
    part.start()
    writer = dcp.HuggingFaceStorageWriter(str(part.target), save_distributed=True, enable_consolidation=True)
    dcp.save(model.state_dict(), storage_writer=writer)


def save_dcp_by_all(part: Part) -> None:
    """Write shards with torch's DCP, which all ranks consolidate, a file each."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank

    model = sharded_llama(part)
    part.start()
    state = model.state_dict()
    shards = str(part.target / "sharded")
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(shards, save_distributed=True))
    files = {name: 1 + number * RANKS // len(state) for number, name in enumerate(state)}
    consolidate_safetensors_files_on_every_rank(shards, str(part.target), files)


def save_gathered(part: Part) -> None:
    """Gather all tensors on rank 0, which calls `save_pretrained`."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = sharded_llama(part)
    part.start()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if part.rank == 0:
        model.save_pretrained(part.target, state_dict=whole)
    dist.barrier()


# -- the ranks have left files -------------------------------------------------------------------------------------


def convert_unread(part: Part) -> None:
    """Call `cluster.convert`, which is `longshore convert`, without a second reading of what it wrote."""
    from cluster import convert

    part.start()
    convert(part.source, part.target, verify=False, progress=False)


def convert_verified(part: Part) -> None:
    """Call `cluster.convert` with defaults: it reads the result back and compares the digests."""
    from cluster import convert

    part.start()
    convert(part.source, part.target, progress=False)


def merge_as_verl(part: Part) -> None:
    """Do what verl's merger does with FSDP files: load those of all ranks, concatenate, call `save_pretrained`."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    part.start()
    paths = [part.source / f"model_world_size_{RANKS}_rank_{rank}.pt" for rank in range(RANKS)]

    def load(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        return found

    with ThreadPoolExecutor() as pool:
        shards = list(pool.map(load, paths))
    pieces = {name: [shard.pop(name).to_local().bfloat16() for shard in shards] for name in list(shards[0])}
    whole = {name: torch.cat(pieces.pop(name)) for name in list(pieces)}
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.from_pretrained(part.source), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.save_pretrained(part.target, state_dict=whole)


def merge_accelerate(part: Part) -> None:
    """Call Accelerate's `merge_fsdp_weights`."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate.utils import merge_fsdp_weights

    part.start()
    merge_fsdp_weights(str(part.source / ACCELERATE), str(part.target))


def merge_deepspeed(part: Part) -> None:
    """Call DeepSpeed's script `zero_to_fp32`, with safetensors as its output."""
    _import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    part.start()
    convert_zero_checkpoint_to_fp32_state_dict(str(part.source), str(part.target), safe_serialization=True)


# -- the files of trainers -----------------------------------------------------------------------------------------


def write_verl(part: Part) -> None:
    """Write a file of each rank, as verl does."""
    import torch

    model = sharded_llama(part)
    part.start()
    torch.save(dict(model.state_dict()), part.target / f"model_world_size_{RANKS}_rank_{part.rank}.pt")
    model.config.save_pretrained(part.target)


def write_accelerate(part: Part) -> None:
    """Call the function by which `save_state` of Accelerate writes a sharded model."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model

    model = sharded_llama(part)
    PartialState(cpu=True)  # its log needs it
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    part.start()
    save_fsdp_model(plugin, None, model, str(part.target))


def write_deepspeed(part: Part) -> None:
    """Write a checkpoint of ZeRO-3 in fp32. Its optimizer has no state, so that the files have the model's size."""
    deepspeed = _import_deepspeed()
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    store = f"file://{part.target}.rendezvous"
    os.environ |= {"RANK": str(part.rank), "LOCAL_RANK": str(part.rank), "WORLD_SIZE": str(RANKS)}
    torch.distributed.init_process_group("gloo", init_method=store, rank=part.rank, world_size=RANKS)
    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model: Any = LlamaForCausalLM(llama_config(part.shape))
        model.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    part.start()
    engine.save_checkpoint(str(part.target), tag="step")


def _import_deepspeed() -> Any:
    """Import DeepSpeed out of the environment of the trainers, which is on top of this one. Raises NotRunnable."""
    environment = REPOSITORY / ".venv-trainers"
    if not (environment / ".made").exists():  # make.sh writes it last
        raise NotRunnable("there is no .venv-trainers: tests/engine_environments/make.sh trainers")
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"}
    sys.path += map(str, environment.glob("lib/python3*/site-packages"))
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first
    return deepspeed
