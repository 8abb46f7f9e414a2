"""Models of transformers: their own names for tensors, stacked experts, rotary buffers. Forward passes of every family
are in tests/integration/test_families_forward.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import ModuleMismatch
from tests.support.hf_models import FAMILIES, save_tiny
from tests.support.shards import shards_of


def model_of(family: str, folder: Path, **options: Any) -> Any:
    """Make the model, on a real device unless the caller says otherwise."""
    import transformers

    tiny = FAMILIES[family]
    config = getattr(transformers, tiny.config_class).from_pretrained(folder)
    return getattr(transformers, tiny.model_class)._from_config(config, **options)


def on_meta(family: str, folder: Path, **options: Any) -> Any:
    with torch.device("meta"):
        return model_of(family, folder, **options)


def test_only_rotary_buffers_are_made(tmp_path: Path) -> None:
    (mine,) = shards_of(save_tiny("llama", tmp_path))
    model = on_meta("llama", tmp_path)
    before = {name: tensor.clone() for name, tensor in mine.items()}
    mine.into(model)
    made = model_of("llama", tmp_path).model.rotary_emb
    assert torch.equal(model.model.rotary_emb.inv_freq, made.inv_freq)
    assert torch.equal(model.model.rotary_emb.original_inv_freq, made.original_inv_freq)
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.items())
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_buffers_that_are_there_are_kept(tmp_path: Path) -> None:
    from accelerate import init_empty_weights

    (mine,) = shards_of(save_tiny("llama", tmp_path))
    with init_empty_weights(include_buffers=False):
        model = model_of("llama", tmp_path)
    there = model.model.rotary_emb.inv_freq
    mine.into(model)
    assert model.model.rotary_emb.inv_freq is there


def test_the_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    (mine,) = shards_of(save_tiny("llama", tmp_path))
    model = on_meta("llama", tmp_path, dtype=torch.float32)
    with pytest.raises(
        ModuleMismatch, match=r"39 tensors differ.* and 19 more .*dtype of the checkpoint \(torch.bfloat16\)"
    ):
        mine.into(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_stacked_experts_need_to_be_asked_for(tmp_path: Path) -> None:
    (mine,) = shards_of(save_tiny("mixtral", tmp_path))
    model = on_meta("mixtral", tmp_path)
    with pytest.raises(ModuleMismatch, match=r"experts\.gate_up_proj.*experts\.0\.w1\.weight.*convert=True"):
        mine.into(model)
    done = mine.into(model, convert=True)
    assert set(done.copied) == {f"model.layers.{n}.mlp.experts.{w}_proj" for n in range(4) for w in ("gate_up", "down")}
    first = mine["model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj[0, : len(first)], first)
    router = mine["model.layers.0.block_sparse_moe.gate.weight"]
    assert model.model.layers[0].mlp.gate.weight.data_ptr() == router.data_ptr()


def test_stacked_tensors_are_not_copied(tmp_path: Path) -> None:
    (mine,) = shards_of(save_tiny("qwen3_moe", tmp_path, hub_names=False))
    done = mine.into(on_meta("qwen3_moe", tmp_path))
    assert done.copied == ()


def test_names_by_hand_and_by_transformers(tmp_path: Path) -> None:
    (mine,) = shards_of(save_tiny("qwen2_vl", tmp_path))
    assert "visual.patch_embed.proj.weight" in mine
    by_hand, converted = on_meta("qwen2_vl", tmp_path), on_meta("qwen2_vl", tmp_path)
    mine.into(by_hand, rename={"model": "model.language_model", "visual": "model.visual"})
    assert mine.into(converted, convert=True).copied == ()
    there = dict(converted.named_parameters())
    for name, parameter in by_hand.named_parameters():
        assert parameter.data_ptr() == there[name].data_ptr()


def test_ignored_names_are_not_reported(tmp_path: Path) -> None:
    """Early checkpoints have a rotary buffer for each layer."""
    from safetensors.torch import save_file

    save_tiny("llama", tmp_path)
    save_file({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "old.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    (mine,) = shards_of(tmp_path)
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" in mine
    assert mine.into(on_meta("llama", tmp_path)).unexpected == ()


def test_modules_that_a_model_keeps_in_float32(tmp_path: Path) -> None:
    """Checkpoints have it so; the module is made in bfloat16 all over."""
    from safetensors.torch import load_file, save_file

    save_tiny("deepseek_v3", tmp_path, hub_names=False)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        biases = {name: tensor.float() for name, tensor in tensors.items() if name.endswith("correction_bias")}
        save_file({**tensors, **biases}, file)
    (mine,) = shards_of(tmp_path)
    model = on_meta("deepseek_v3", tmp_path)
    assert mine.into(model).copied == ()
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
