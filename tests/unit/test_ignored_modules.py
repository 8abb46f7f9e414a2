"""The ignore list of a quantized checkpoint names exactly the modules left unquantized, for each reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.utils.match import is_match
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from cluster.layouts.mesh import Layout
from cluster.layouts.rules import parse_rules
from cluster.planning.make_plan import build_load_plan
from cluster.precision.recipes import Precision
from cluster.precision.written_quantization import find_ignored, quantization_config
from storage.checkpoints.checkpoint import open_model
from storage.stores.local import LocalStore
from tests.support.hf_models import DENSE_SIZES, FAMILIES, TinyFamily, make_model, save_model
from tests.support.reference_quantized import quantized, restored
from tests.unit.test_quantized_checkpoints import write_quantized

pytestmark = pytest.mark.slow

TOKENS = torch.tensor([[1, 5, 9, 33, 60]])
_TIED = DENSE_SIZES | {"tie_word_embeddings": True}
_CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
OTHERS = {
    "llama_tied": TinyFamily("LlamaConfig", "LlamaForCausalLM", _TIED),
    "cohere2": TinyFamily("Cohere2Config", "Cohere2ForCausalLM", _TIED),
    "opt": TinyFamily(
        "OPTConfig", "OPTForCausalLM", _TIED | {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_attention_heads": 4}
    ),
    "falcon": TinyFamily("FalconConfig", "FalconForCausalLM", _TIED),
    "llava": TinyFamily(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **_CLIP},
            "image_token_id": 95,
        },
        DENSE_SIZES | {"model_type": "llama"},
    ),
}
MODELS = {**FAMILIES, **OTHERS}
SEEING = ("gemma3", "glm4v", "qwen2_vl", "qwen2_5_vl", "llava")
SKIPS: tuple[tuple[str, ...], ...] = (
    ("default",),
    (),
    ("default", "**.layers.1.mlp.down_proj.weight"),
    ("**.1.mlp.fc1.weight", "**.layers.0.*.*.weight", "**.blocks.1.*.*.weight"),  # parts of the tower as well
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a model's name to its checkpoint, with the names of the hub."""
    made: dict[str, Path] = {}

    def folder_of(model: str) -> Path:
        if model not in made:
            made[model] = save_model(MODELS[model], tmp_path_factory.mktemp(model) / "source")
        return made[model]

    return folder_of


@pytest.mark.parametrize("model", MODELS)
def test_readers_find_exactly_the_quantized_linear_layers(model: str, folders: Any) -> None:
    """Values identify the layers, because names differ."""
    made = make_model(MODELS[model])
    linear = {name: module for name, module in made.named_modules() if isinstance(module, torch.nn.Linear)}
    weights = {module.weight.detach().view(torch.int16).numpy().tobytes(): name for name, module in linear.items()}
    index = open_model(LocalStore(str(folders(model))), chunk_bytes=1 << 20)
    stored = stored_tensors(folders(model))
    for skip in SKIPS:
        skipped = tuple(pattern for pattern in skip if pattern == "default" or names_some(pattern, stored))
        for scheme in ("fp8", "nf4"):
            plan = build_load_plan(index, Layout(), None, None, Precision("auto", scheme, skipped))
            held = {piece.name for piece in plan.ranks[0].slices}
            suffix = "_scale" if scheme == "fp8" else ".absmax"
            of_layers = (name for name in stored if f"{name}{suffix}" in held)
            values = (stored[name].view(torch.int16).numpy().tobytes() for name in of_layers)
            expected = {weights[value] for value in values if value in weights}
            config = quantization_config(plan.cut)
            assert config is not None
            if scheme == "fp8":
                found = {name for name, module in linear.items() if not is_match(name, module, config["ignore"])}
            else:
                found = {name for name in linear if should_convert_module(name, config["llm_int8_skip_modules"])}
            assert found == expected, (scheme, skip)


def names_some(pattern: str, stored: dict[str, torch.Tensor]) -> bool:
    """Tell whether a pattern names some tensor; those that do not are refused."""
    find = parse_rules({pattern: "replicate"}).finder()
    return any(find(name) for name in stored)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        *((model, "int8") for model in (*SEEING, "qwen3_moe", "llama_tied", "gemma2", "cohere2", "opt")),
        *((model, "fp8") for model in ("gemma3", "qwen2_vl", "mixtral", "falcon")),
    ],
)
def test_transformers_reads_the_quantized_checkpoint(model: str, scheme: str, folders: Any, tmp_path: Path) -> None:
    """The weights equal those that the library itself quantized and restored."""
    source = folders(model)
    written = write_quantized(source, tmp_path / "quantized", scheme)
    held = stored_tensors(written)
    weights = {
        name: restored(quantized(weight, scheme), scheme) if f"{name}_scale" in held else weight
        for name, weight in stored_tensors(source).items()
    }
    (tmp_path / "restored").mkdir()
    save_file(weights, tmp_path / "restored" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "restored" / "config.json").write_text((source / "config.json").read_text())
    assert len(weights) < len(held)
    logits = []
    for folder in (written, tmp_path / "restored"):
        model_class = getattr(transformers, MODELS[model].model_class)
        read, info = model_class.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            logits.append(read.eval()(input_ids=TOKENS).logits.float())
    assert logits[1].isfinite().all()
    close = 0.2 if scheme == "fp8" else 1e-6  # fp8 layers quantize their inputs as well
    assert (logits[0] - logits[1]).abs().max() <= close * logits[1].abs().max()


def test_no_pattern_matches_a_quantized_module() -> None:
    quantized_modules = ["language_model.model.layers.0.mlp.up", "vision_tower.layers.0.mlp.down"]
    left = [
        "language_model.model.layers.0.mlp.down",
        "vision_tower.vision_model.layers.1.mlp.up",
        "visual.a",
        "visual.b",
    ]
    found = find_ignored(left, quantized_modules)
    assert [(one.name, one.pattern) for one in found] == [
        (left[0], ""),  # the tower has a quantized one that ends so
        (left[1], r"(?:.*[.])?vision_tower[.](?:.*[.])?layers[.]1[.]mlp[.]up"),
        ("visual", r"(?:.*[.])?visual(?:[.].*)?"),
        ("lm_head", r"(?:.*[.])?lm_head"),
    ]


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_transformers_reads_a_model_with_stacked_experts(model: str, tmp_path: Path) -> None:
    """The experts are as they were stored."""
    source = save_model(MODELS[model], tmp_path / "source", hub_names=False)
    written = write_quantized(source, tmp_path / "quantized", "int8")
    model_class = getattr(transformers, MODELS[model].model_class)
    read, info = model_class.from_pretrained(written, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        found, expected = (each.eval()(input_ids=TOKENS).logits.float() for each in (read, make_model(MODELS[model])))
    assert (found - expected).norm() <= 0.05 * expected.norm()
