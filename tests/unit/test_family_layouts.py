"""Every model family in every layout, with checkpoints that transformers wrote.

The ranks' tensors together are the model again. Each rank has the part that its tensor-parallel layer computes with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.layouts.mesh import Layout
from cluster.layouts.rules import FAMILIES as TABLES
from cluster.layouts.rules import Rule
from tests.support.family_checkpoints import NAMINGS, SavedFamily, needs_transformers, reassemble
from tests.support.hf_models import FAMILIES, MOE_FAMILIES, save_tiny

pytestmark = [needs_transformers, pytest.mark.slow]

Array = NDArray[np.uint16]
Saved = dict[tuple[str, str], SavedFamily]

# docs/layouts.md shows these.
LAYOUTS = {
    "TP 1": Layout(),
    "TP 2": Layout(2),
    "TP 4": Layout(4),
    "PP 2": Layout(pipeline_parallel_size=2),
    "TP 2 x PP 2": Layout(2, pipeline_parallel_size=2),
    "FSDP 2": Layout(fsdp_size=2),
    "FSDP 3": Layout(fsdp_size=3),
    "TP 2 x FSDP 2": Layout(2, 2),
    "TP 2 x DP 2": Layout(2, data_parallel_size=2),
}
EXPERT_LAYOUTS = {
    "EP 2 (TP 2)": Layout(2, expert_parallel_size=2),
    "EP 2 (TP 4)": Layout(4, expert_parallel_size=2),
    "EP 4 (TP 2 x DP 2)": Layout(2, data_parallel_size=2, expert_parallel_size=4),
    "EP 2 (TP 2 x PP 2)": Layout(2, pipeline_parallel_size=2, expert_parallel_size=2),
}
CASES = [
    *((family, name) for family in FAMILIES for name in LAYOUTS),
    *((family, name) for family in MOE_FAMILIES for name in EXPERT_LAYOUTS),
]


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_family_loads_in_a_layout(family: str, name: str, naming: str, saved_families: Saved) -> None:
    layout = {**LAYOUTS, **EXPERT_LAYOUTS}[name]
    saved = saved_families[family, naming]
    plan, loaded = saved.load(layout)
    whole = reassemble(plan, loaded)
    stored = saved.stored()
    assert whole.keys() == stored.keys()
    assert not [tensor for tensor in stored if not np.array_equal(whole[tensor], stored[tensor])]
    sizes = {rank.coords.stage: set[int]() for rank in plan.ranks}
    for rank in plan.ranks:
        sizes[rank.coords.stage].add(rank.size_bytes)
    assert layout.fsdp_size > 1 or all(len(of_stage) == 1 for of_stage in sizes.values())
    cut_bytes = sum(array.nbytes for tensor, array in stored.items() if not _in_tower(tensor))
    for arrays in loaded if layout.tensor_parallel_size > 1 else ():  # the layout saves bytes
        assert sum(array.nbytes for tensor, array in arrays.items() if not _in_tower(tensor)) < 0.7 * cut_bytes


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_named_by_a_rule(family: str, naming: str, saved_families: Saved) -> None:
    saved = saved_families[family, naming]
    assert saved.config.model_type == family
    rule_for = saved.rules.finder()
    assert not [name for name in saved.stored() if rule_for(name) is None]


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_tensors_equal_those_of_from_pretrained(family: str, saved_families: Saved) -> None:
    """A load that returns the stored tensors therefore returns those of the model."""
    import transformers

    model_class = getattr(transformers, FAMILIES[family].model_class)
    states = {}
    for naming in NAMINGS:
        model = model_class.from_pretrained(saved_families[family, naming].folder, dtype="auto", local_files_only=True)
        states[naming] = {name: _bits(tensor) for name, tensor in model.state_dict().items()}
    stored = saved_families[family, "modules"].stored()
    tied = states["modules"].keys() - stored.keys()
    assert tied <= {"lm_head.weight"}
    for name, array in stored.items():
        assert np.array_equal(array, states["modules"][name])
        assert np.array_equal(array, states["hub"][name])


@pytest.mark.parametrize("family", FAMILIES)
def test_reassembled_tensors_make_the_same_model(family: str, saved_families: Saved, tmp_path: Path) -> None:
    """Transformers reads the same model after the tensors are saved again."""
    import torch
    import transformers
    from safetensors.torch import save_file

    saved = saved_families[family, "hub"]
    whole = reassemble(*saved.load(Layout(2, pipeline_parallel_size=2)))
    tensors = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in whole.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((saved.folder / "config.json").read_bytes())
    model_class = getattr(transformers, FAMILIES[family].model_class)
    first, again = (
        model_class.from_pretrained(folder, dtype="auto", local_files_only=True).state_dict()
        for folder in (saved.folder, tmp_path)
    )
    assert first.keys() == again.keys()
    assert not [name for name in first if not torch.equal(first[name], again[name])]


def _in_tower(name: str) -> bool:
    return any(part in name.split(".") for part in ("visual", "vision_tower", "multi_modal_projector"))


def _bits(tensor: Any) -> Array:
    import torch

    # transformers makes float32 of a router's correction: the same values, wider.
    bits: Array = tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return bits


# The part that a rank of a tensor-parallel layer computes with, in plain numpy without rules, regions and cuts.
def _dim_0(array: Array, rank: int, ranks: int) -> Array:
    return np.split(array, ranks)[rank]


def _dim_1(array: Array, rank: int, ranks: int) -> Array:
    return np.split(array, ranks, axis=1)[rank]


def _two_heads(array: Array, rank: int, ranks: int) -> Array:
    heads = np.split(array, 2)
    return heads[rank] if ranks == 2 else heads[rank // 2]


def _halves(array: Array, rank: int, ranks: int) -> Array:
    return np.concatenate([_dim_0(half, rank, ranks) for half in np.split(array, 2)])


def _phi3_qkv(array: Array, rank: int, ranks: int) -> Array:
    query, key, value = np.split(array, [64, 80])
    return np.concatenate([_dim_0(query, rank, ranks), _two_heads(key, rank, ranks), _two_heads(value, rank, ranks)])


def _expert_halves(array: Array, rank: int, ranks: int) -> Array:
    return np.stack([_halves(expert, rank, ranks) for expert in array])


def _expert_dim_1(array: Array, rank: int, ranks: int) -> Array:
    return np.stack([_dim_1(expert, rank, ranks) for expert in array])


PARTS: dict[str, Callable[[Array, int, int], Array]] = {
    ".q_proj.weight": _dim_0,
    ".q_proj.bias": _dim_0,
    ".k_proj.weight": _two_heads,
    ".k_proj.bias": _two_heads,
    ".v_proj.weight": _two_heads,
    ".v_proj.bias": _two_heads,
    ".qkv_proj.weight": _phi3_qkv,
    ".o_proj.weight": _dim_1,
    ".gate_proj.weight": _dim_0,
    ".up_proj.weight": _dim_0,
    ".mlp.gate_up_proj.weight": _halves,
    ".down_proj.weight": _dim_1,
    ".w1.weight": _dim_0,
    ".w3.weight": _dim_0,
    ".w2.weight": _dim_1,
    ".experts.gate_up_proj": _expert_halves,
    ".experts.down_proj": _expert_dim_1,
    ".q_b_proj.weight": _dim_0,  # heads one after the other
    ".kv_b_proj.weight": _dim_0,
    "embed_tokens.weight": _dim_0,
    "lm_head.weight": _dim_0,
}


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_has_the_part_its_layer_computes_with(
    family: str, ranks: int, naming: str, saved_families: Saved
) -> None:
    saved = saved_families[family, naming]
    _, loaded = saved.load(Layout(ranks))
    for name, array in saved.stored().items():
        part_of = next((part for end, part in PARTS.items() if name.endswith(end) and not _in_tower(name)), None)
        for rank in range(ranks):
            expected = array if part_of is None else part_of(array, rank, ranks)
            assert np.array_equal(loaded[rank][name], expected), f"{name} of rank {rank}"


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_are_whole_on_the_ranks_that_have_them(family: str, naming: str, saved_families: Saved) -> None:
    saved = saved_families[family, naming]
    _, loaded = saved.load(Layout(2, expert_parallel_size=2))
    stored = saved.stored()
    seen = 0
    for name, array in stored.items():
        parts = name.split(".")
        if "experts" not in parts:
            continue
        seen += 1
        after = parts[parts.index("experts") + 1]
        if after.isdecimal():
            home = int(after) // 4
            assert np.array_equal(loaded[home][name], array)
            assert name not in loaded[1 - home]
        else:
            for rank in range(2):
                assert np.array_equal(loaded[rank][name], array[4 * rank : 4 * rank + 4])
    assert seen > 0


def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path) -> None:
    saved = SavedFamily.open(save_tiny("llama", tmp_path, vocab_size=98))
    plan, loaded = saved.load(Layout(4, vocabulary_multiple=8))
    assert {arrays["lm_head.weight"].shape for arrays in loaded} == {(26, 64)}
    stored = saved.stored()
    assert all(np.array_equal(array, stored[name]) for name, array in reassemble(plan, loaded).items())


def test_tied_heads_put_the_embedding_on_both_end_stages(tmp_path: Path) -> None:
    saved = SavedFamily.open(save_tiny("qwen2", tmp_path, tie_word_embeddings=True))
    assert "lm_head.weight" not in saved.stored()
    _, (first, last) = saved.load(Layout(pipeline_parallel_size=2))
    assert np.array_equal(first["model.embed_tokens.weight"], last["model.embed_tokens.weight"])
    assert first.keys() & last.keys() == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gemma3"])
def test_families_that_tie_their_head_are_recognised(family: str, naming: str, saved_families: Saved) -> None:
    _, (first, last) = saved_families[family, naming].load(Layout(pipeline_parallel_size=2))
    (embedding,) = (name for name in first if name.endswith("embed_tokens.weight"))
    assert first.keys() & last.keys() == {embedding}


# The last layers of DeepSeek's checkpoints, which transformers does not load.
GUESSING_LAYER = {
    "enorm.weight": Rule.REPLICATE,
    "hnorm.weight": Rule.REPLICATE,
    "eh_proj.weight": Rule.REPLICATE,
    "embed_tokens.weight": Rule.VOCABULARY,
    "shared_head.norm.weight": Rule.REPLICATE,
    "shared_head.head.weight": Rule.VOCABULARY,
    "self_attn.q_b_proj.weight": Rule.HEADS,
    "mlp.experts.255.down_proj.weight": Rule.EXPERT_ROW,
    "mlp.shared_experts.up_proj.weight": Rule.COLUMN,
}


@pytest.mark.parametrize("name", GUESSING_LAYER)
def test_multi_token_prediction_layers_have_rules(name: str) -> None:
    assert TABLES["deepseek_v3"].rule_for(f"model.layers.61.{name}") is GUESSING_LAYER[name]


# Prefixes that checkpoints of these families have had, whatever transformers writes today.
@pytest.mark.parametrize("family", ["gemma3", "glm4v", "qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", "model.", ""])
def test_prefixes_of_inner_language_models_are_recognised(family: str, prefix: str) -> None:
    rules = TABLES[family]
    assert rules.rule_for(f"{prefix}layers.3.self_attn.q_proj.weight") is Rule.HEADS
    assert rules.rule_for(f"{prefix}embed_tokens.weight") is Rule.VOCABULARY
    for tower in ("visual.blocks.0.attn.qkv.weight", "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"):
        assert rules.rule_for(tower) is rules.rule_for(f"model.{tower}") is Rule.REPLICATE
