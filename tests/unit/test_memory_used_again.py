"""Memory that another model has left in the process is never seen through: every byte of every tensor is written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import save

from actors.devices.cpu_device import PROCESS_MEMORY
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import rules_for
from cluster.planning.make_plan import build_load_plan
from cluster.precision.recipes import SCHEMES, Precision
from storage.checkpoints.checkpoint import open_model
from storage.stores.object_store import MemoryStore
from tests.support.shards import shard_of

CONFIG = ModelConfig(model_type="llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64)
RANKS = 4
WEIGHTS = {name: torch.randn(60, 128).to(torch.bfloat16) for name in ("lm_head.weight", "model.embed_tokens.weight")}
FILE = save(WEIGHTS)


@pytest.fixture(autouse=True)
def warm() -> Iterator[None]:
    PROCESS_MEMORY.keep(True)
    yield
    PROCESS_MEMORY.keep(False)


def leave_behind(byte: int) -> None:
    """Fill the memory that the next load's segments reuse, as an earlier load would."""
    segments = PROCESS_MEMORY.take([1 << 16] * 8)
    for segment in segments:
        segment.data[:] = byte
    segments.clear()
    del segment
    assert PROCESS_MEMORY.kept_bytes == 8 << 16


@pytest.mark.parametrize(
    "precision",
    [
        Precision(),
        Precision("float16"),
        *(Precision(quantization=scheme, skip=("**.embed_tokens.weight",)) for scheme in SCHEMES),
    ],
    ids=str,
)
def test_tensors_are_the_same_whatever_was_there(precision: Precision) -> None:
    """With a padded vocabulary: the last rank has rows that are in no file."""
    index = open_model(MemoryStore({"model.safetensors": FILE}), chunk_bytes=1000)
    layout = Layout(RANKS, vocabulary_multiple=64)
    plan = build_load_plan(index, layout, rules_for(CONFIG, None), CONFIG, precision)
    assert any(piece.region.padding for piece in plan.ranks[-1].slices)
    found = []
    for byte in (0x00, 0xFF, 0x5A):
        held = []
        for rank in range(RANKS):
            leave_behind(byte)
            shard = shard_of(plan, rank, [np.frombuffer(FILE, np.uint8)])
            held.append({name: bytes(each.reshape(-1).view(torch.uint8).numpy()) for name, each in shard.items()})
            del shard
        found.append(held)
    assert found[0] == found[1] == found[2]
