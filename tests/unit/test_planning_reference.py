"""Plans of Llama-shaped models against references: plain slicing for TP, torch.chunk for fully sharded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.planning.make_plan import build_load_plan
from tests.support.plan_oracle import check_plan
from tests.support.planned_models import as_bf16, carry_out, llama_shapes, random_arrays, store_arrays

HEADS, KV_HEADS, HIDDEN, INNER, VOCABULARY = 8, 2, 64, 88, 100
CONFIG = ModelConfig(model_type="llama", num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HIDDEN)
SHAPES = {
    **llama_shapes(3, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY),
    **{
        f"model.layers.{n}.self_attn.{p}_proj.bias": (rows,)
        for n in range(3)
        for p, rows in (("q", HIDDEN), ("k", 16), ("o", HIDDEN))
    },
    "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
}


def reference_part(name: str, array: NDArray[np.uint16], tp_size: int, rank: int) -> NDArray[np.uint16]:
    """Return what a tensor-parallel engine keeps, written apart from Longshore's rules."""
    module = name.rsplit(".", 2)[-2]
    if module in ("k_proj", "v_proj"):
        heads = np.split(array, KV_HEADS)
        if tp_size > KV_HEADS:
            return heads[rank // (tp_size // KV_HEADS)]
        return np.split(array, tp_size)[rank]
    if module in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return np.split(array, tp_size)[rank]
    if module in ("o_proj", "down_proj") and name.endswith("weight"):
        return np.split(array, tp_size, axis=1)[rank]
    return array


def torch_share(array: NDArray[np.uint16], parts: int, rank: int) -> NDArray[np.uint16]:
    """The share of dim 0 that torch.chunk gives a rank; no rows for ranks beyond."""
    chunks = torch.from_numpy(array.view(np.int16).copy()).chunk(parts, dim=0)
    if rank >= len(chunks):
        return array[:0]
    return chunks[rank].numpy().view(np.uint16)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("fsdp_size", [1, 2, 3, 4])
def test_llama_against_slicing_and_torch_chunk(tp_size: int, fsdp_size: int) -> None:
    arrays = random_arrays(SHAPES, seed=tp_size * 10 + fsdp_size)
    model = store_arrays(as_bf16(arrays), shards=3, chunk_bytes=4097)
    layout = Layout(tp_size, fsdp_size)
    plan = build_load_plan(model.index, layout, None, CONFIG)
    assert check_plan(plan) == []
    for rank in plan.ranks:
        tensors, _ = carry_out(plan, rank, model.files)
        sizes = {piece.name: piece.sizes for piece in rank.slices}
        for name, array in arrays.items():
            part = reference_part(name, array, tp_size, rank.coords.tensor)
            expected = torch_share(part, fsdp_size, rank.coords.fsdp)
            assert sizes[name] == expected.shape
            assert tensors[name].tobytes() == expected.tobytes()


def test_odd_shapes_against_torch_chunk() -> None:
    shapes = {"scalar": (), "empty": (0, 3), "one": (1, 5), "five": (5,), "deep": (7, 2, 3), "hollow": (4, 0)}
    arrays = random_arrays(shapes)
    model = store_arrays(as_bf16(arrays), chunk_bytes=7)
    plan = build_load_plan(model.index, Layout(1, 4))
    for rank in plan.ranks:
        tensors, _ = carry_out(plan, rank, model.files)
        sizes = {piece.name: piece.sizes for piece in rank.slices}
        assert tensors["scalar"].tobytes() == arrays["scalar"].tobytes()
        for name, array in arrays.items():
            if name != "scalar":
                expected = torch_share(array, 4, rank.coords.fsdp)
                assert sizes[name] == expected.shape
                assert tensors[name].tobytes() == expected.tobytes()
