"""The demo's model: a Llama of about a given size, of random values; for `longshore demo`, and to keep (`--write`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.reports.rank_report import Jsonable
from cluster.sample_checkpoint import llama_tensors, write_llama_checkpoint
from storage.checkpoints.safetensors_header import tensor_bytes

DEFAULT_SIZE_BYTES = 1_000_000_000
LEAST_SIZE_BYTES = 20_000_000
SHARDS = 4


@dataclass(frozen=True, slots=True)
class WrittenModel(Jsonable):
    """A checkpoint that was written."""

    folder: str
    size_bytes: int  # of its tensors
    shards: int
    write_s: float


def write_demo_model(folder: str | Path, size_bytes: int | None = None) -> WrittenModel:
    """Write the checkpoint into `folder`, which is made. Raises ConfigError when something is in it, or below 20 MB."""
    shape = shape_for(size_bytes or DEFAULT_SIZE_BYTES)
    where = Path(folder)
    try:
        taken = where.exists() and any(where.iterdir())
    except OSError as error:
        raise ConfigError(f"the model cannot be written there: {error}", folder=str(folder)) from error
    if taken:
        raise ConfigError("the folder for the model is not empty", hint="name a new one", folder=str(folder))
    begun_s = time.monotonic()
    try:
        write_llama_checkpoint(where, **shape, shards=SHARDS, seed=0)
    except OSError as error:
        raise ConfigError(f"the model cannot be written there: {error}", folder=str(folder)) from error
    return WrittenModel(str(folder), model_bytes(shape), SHARDS, time.monotonic() - begun_s)


def model_bytes(shape: dict[str, Any]) -> int:
    """Of all tensors."""
    return sum(tensor_bytes(dtype, dims) for _, dtype, dims in llama_tensors(**shape))


def shape_for(size_bytes: int) -> dict[str, Any]:
    """A Llama of about that size: layers of one width, as many as it takes. Raises ConfigError below 20 MB."""
    if size_bytes < LEAST_SIZE_BYTES:
        raise ConfigError("the demo's model must have at least 20 MB", size_bytes=size_bytes)
    large = size_bytes >= 400_000_000
    shape: dict[str, Any] = {
        "hidden": 2048 if large else 512,
        "intermediate": 5632 if large else 1408,
        "heads": 16,
        "kv_heads": 8,
        "vocab": 32000 if large else 8000,
    }
    one, two = (model_bytes({**shape, "layers": layers}) for layers in (1, 2))
    return {**shape, "layers": max(1, round((size_bytes - one) / (two - one)) + 1)}
