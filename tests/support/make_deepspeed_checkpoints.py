"""Write real DeepSpeed checkpoints: ZeRO 1, 2 and 3, and what DeepSpeed's own merge makes of each.

Runs in an environment that has DeepSpeed: `python make_deepspeed_checkpoints.py FOLDER WORLD_SIZE`. A checkpoint is in
`FOLDER/NAME/`, its merged weights in `FOLDER/NAME.safetensors`, its universal form in `FOLDER/NAME-universal/`.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", DS_IGNORE_CUDA_DETECTION="1", OMP_NUM_THREADS="1")

import torch
import torch.multiprocessing as mp
from torch import nn

CASES = (  # name, world size, stage, dtype of training, other settings of `zero_optimization`
    ("zero1-bf16", 2, 1, "bf16", {}),
    ("zero1-fp32", 2, 1, "fp32", {}),
    ("zero1-accumulating", 2, 1, "bf16-accumulating", {}),
    ("zero2-bf16", 4, 2, "bf16", {"round_robin_gradients": True}),
    ("zero3-bf16", 4, 3, "bf16", {"sub_group_size": 150}),
    ("zero3-fp32", 2, 3, "fp32", {}),
)


class Tiny(nn.Module):
    """A model with what makes checkpoints hard: odd sizes, a frozen weight, tied weights, buffers, scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.last = nn.Linear(5, 6, bias=True)
        self.scale = nn.Parameter(torch.rand(1))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([3, 5]))
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.last(self.frozen(torch.tanh(self.first(self.embed(tokens))))) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens.flatten())


def settings(stage: int, dtype: str, zero: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype.startswith("bf16"):
        found["bf16"] = {"enabled": True}
    if dtype == "bf16-accumulating":
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def train(rank: int, world_size: int, folder: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first
    deepspeed.init_distributed("gloo")
    for name, needed, stage, dtype, zero in CASES:
        if needed != world_size:
            continue
        torch.manual_seed(7)
        model = Tiny()
        model.universal_checkpoint_info = {"universal_checkpoint_version": 0.4}
        weights = [one for one in model.parameters() if one.requires_grad]
        groups = [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage, dtype, zero))
        for step in range(2):
            engine.backward(engine((torch.arange(4) + 5 * step + rank)[None] % 13))
            engine.step()
        engine.save_checkpoint(str(Path(folder, name)), tag="global_step2")
        engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def merge(folder: Path, world_size: int) -> None:
    """Write the weights that DeepSpeed's own scripts make of each checkpoint, and its universal form."""
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    for name, needed, *_ in CASES:
        if needed != world_size:
            continue
        if name != "zero1-accumulating":  # the script does not know the files of this optimizer
            merged = get_fp32_state_dict_from_zero_checkpoint(str(folder / name))
            whole = {key: value.contiguous().clone() for key, value in merged.items()}
            save_file(whole, folder / f"{name}.safetensors")
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder / name / "global_step2"),
                output_folder=str(folder / f"{name}-universal" / "global_step2_universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


if __name__ == "__main__":
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    target, ranks = Path(sys.argv[1]), int(sys.argv[2])
    mp.spawn(train, args=(ranks, str(target), free_port), nprocs=ranks)
    merge(target, ranks)
