"""Estimates from config.json alone: against the checkpoints that transformers writes for the same configs."""

from __future__ import annotations

import json
from collections import Counter
from importlib import machinery
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ModelConfigError, PlanError
from cluster.layouts.mesh import Layout
from cluster.planning import meta_estimate
from cluster.planning.make_plan import build_load_plan
from cluster.planning.meta_estimate import MAX_COUNT, estimate_index, index_of
from cluster.planning.preview import plan
from storage.checkpoints.checkpoint import open_model
from storage.stores.local import LocalStore
from tests.support.hf_models import FAMILIES, save_tiny
from tests.support.plan_oracle import check_plan

pytest.importorskip("transformers")
MIB = 1 << 20
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def config_bytes(**changes: Any) -> bytes:
    return json.dumps({**LLAMA_70B, "num_hidden_layers": 2, **changes}).encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_bytes_as_the_checkpoint_has(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    stored = open_model(LocalStore(str(folder)), chunk_bytes=MIB)
    estimated = estimate_index((folder / "config.json").read_bytes(), MIB)
    assert estimated.size_bytes == stored.size_bytes
    assert {tensor.dtype for tensor in estimated.tensors} == {"BF16"}


def test_shapes_of_a_dense_model_are_those_that_are_stored(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    stored = open_model(LocalStore(str(folder)), chunk_bytes=MIB)
    estimated = estimate_index((folder / "config.json").read_bytes(), MIB)
    assert {t.name: t.shape for t in estimated.tensors} == {t.name: t.shape for t in stored.tensors}
    built = build_load_plan(estimated, Layout(fsdp_size=2))
    assert check_plan(built) == []
    assert sum(rank.size_bytes for rank in built.ranks) == stored.size_bytes


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_are_counted_one_by_one(family: str, tmp_path: Path) -> None:
    """Experts are converted one at a time, as in the checkpoint."""
    folder = save_tiny(family, tmp_path / "model")
    expert = {t.name: t.shape for t in open_model(LocalStore(str(folder)), chunk_bytes=MIB).tensors}
    estimated = estimate_index((folder / "config.json").read_bytes(), MIB)
    found = {t.name: t.shape for t in estimated.tensors if ".experts." in t.name}
    assert found
    assert found == {name: shape for name, shape in expert.items() if ".experts." in name}
    assert "one tensor per expert" in estimated.notes[0]
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_bytes((folder / "config.json").read_bytes())
    sizes = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "quantization": "fp8"}
    there, guessed = plan(folder, **sizes), plan(tmp_path / "alone", **sizes)
    assert there.ranks[0].device_bytes == guessed.ranks[0].device_bytes


def test_experts_of_a_family_that_is_not_known_stay_stacked() -> None:
    shapes = [("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 6)), ("norm.weight", (6,))]
    found, said = meta_estimate.one_by_one(shapes, "other_moe")
    assert found == shapes
    assert "all experts of a layer in one tensor" in said


def test_will_a_70b_fit_on_four_times_24_gb(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    asked = plan(tmp_path, memory="4x24GB")
    assert asked.estimated
    assert asked.stored_bytes == 2 * 70_553_706_496  # weights, as the model's card counts them
    assert asked.layout == Layout(4)  # it was spread over all of them
    assert asked.fit is not None
    assert asked.fit.fits is False
    assert asked.fit.offers[0].what == 'quantization="fp8"'
    taken = plan(tmp_path / "config.json", memory=["24GB"] * 4, fit="auto")
    assert taken.fit is not None
    assert taken.fit.fits
    assert taken.precision.startswith("fp8")
    assert all(rank.device_bytes < 24e9 for rank in taken.ranks)


def test_a_config_without_a_dtype_is_reported() -> None:
    made = estimate_index(config_bytes(torch_dtype=None), MIB)
    assert "it names no dtype" in made.notes[0]
    assert {tensor.dtype for tensor in estimate_index(config_bytes(dtype="float32"), MIB).tensors} == {"F32"}


def test_tied_weights_count_once() -> None:
    untied, tied = (estimate_index(config_bytes(tie_word_embeddings=tie), MIB).size_bytes for tie in (False, True))
    assert untied - tied == 128256 * 8192 * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "no_such_family"}, "does not know the model type"),
        ({"model_type": "../x"}, "does not know the model type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"num_hidden_layers": MAX_COUNT + 1}, "at most"),
        ({"text_config": {"num_experts": 10**9}}, "at most"),
        ({"vision_config": {"depths": [2, 10**9]}}, "at most"),
        ({"num_labels": 10**9}, "at most"),
        ({"vocab_size": 10**10}, "TB are estimated"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "quantized"),
        ({"compression_config": {"format": "pack-quantized"}}, "quantized"),
        ({"backbone": "somebody/something"}, "names its backbone"),
        ({"vision_config": {"architecture": "hf-hub:somebody/something"}}, "names its architecture"),
        ({"torch_dtype": "complex64"}, "dtype"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_attention_heads": 3}, "transformers cannot make a model from config.json: .*heads"),
        ({"architectures": ["os", "AutoConfig", 5]}, ""),
    ],
)
def test_models_that_cannot_be_estimated_are_one_clear_error(changes: dict[str, Any], said: str) -> None:
    if not said:  # a name that is no model class is passed over, and nothing of it runs
        assert estimate_index(config_bytes(**changes), MIB).tensors
        return
    with pytest.raises((ModelConfigError, PlanError), match=said):
        estimate_index(config_bytes(**changes), MIB)


@pytest.mark.parametrize("where", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_code_named_by_a_config_is_not_fetched(where: str) -> None:
    """transformers fetches kernels of that name."""
    plain = estimate_index(config_bytes(), MIB)
    assert estimate_index(config_bytes(**{where: "somebody/kernels"}), MIB).tensors == plain.tensors


def test_an_invalid_text_config_is_one_clear_error() -> None:
    with pytest.raises(ModelConfigError, match="transformers cannot make a model"):
        estimate_index(config_bytes(torch_dtype=None, text_config="text"), MIB)


def test_a_config_that_is_nested_without_end_is_refused() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a": [deep]}
    with pytest.raises(ModelConfigError, match="nested"):
        estimate_index(config_bytes(a=deep), MIB)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> machinery.ModuleSpec | None:
        return None

    monkeypatch.setattr(meta_estimate, "find_spec", missing)
    with pytest.raises(PlanError, match="needs transformers and torch"):
        estimate_index(config_bytes(), MIB)


def test_the_index_is_whole() -> None:
    made = index_of([("a", (3, 5)), ("b", ()), ("c", (0, 4))], "BF16", 8, 10, "note")
    assert [(t.start, t.end) for t in made.tensors] == [(0, 30), (30, 32), (32, 32)]
    assert Counter(made.chunks.sizes_bytes().tolist()) == {8: 4}
    assert made.source == "config"
