"""Tiny transformers models of each family, with random weights: made from a config, nothing is downloaded.

Sizes are such that four ranks can share every dimension that is cut, with two key/value heads: with four ranks those
are copied. Every weight of a family is there that its checkpoints have: biases, norms of heads, experts, a tower.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the library is imported: nothing here asks a server

SHARD_BYTES = 160_000  # some three to ten files


@dataclass(frozen=True)
class TinyFamily:
    """Names of classes in transformers, and the sizes of a model of four layers."""

    config_class: str
    model_class: str
    sizes: Mapping[str, Any]
    text_sizes: Mapping[str, Any] = field(default_factory=dict)  # of the language model inside a multimodal one


# fmt: off
DENSE_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_HEADS_OF_16 = {"head_dim": 16}  # more rows than the model is wide: only the config knows
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_GLM_VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 64, "image_size": 28,
    "patch_size": 14, "in_channels": 3, "spatial_merge_size": 2,
}
_QWEN2_VISION = {  # hidden_size: of the language model, for which the merger makes it
    "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
}
_QWEN2_5_VISION = {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
    "fullatt_block_indexes": [1],
}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}
_DEEPSEEK = {
    "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# fmt: on


def _text(name: str, **sizes: Any) -> TinyFamily:
    return TinyFamily(f"{name}Config", f"{name}ForCausalLM", DENSE_SIZES | sizes)


def _multimodal(name: str, vision: Mapping[str, Any], text_sizes: Mapping[str, Any], **sizes: Any) -> TinyFamily:
    sizes = {"vision_config": vision, "tie_word_embeddings": False} | sizes
    return TinyFamily(f"{name}Config", f"{name}ForConditionalGeneration", sizes, DENSE_SIZES | text_sizes)


# gemma3_text is the language model of gemma3 on its own.
FAMILIES: Mapping[str, TinyFamily] = MappingProxyType(
    {
        "llama": _text("Llama"),
        "mistral": _text("Mistral", **_HEADS_OF_16),
        "qwen2": _text("Qwen2"),
        "qwen3": _text("Qwen3", **_HEADS_OF_16),
        "qwen3_moe": _text(
            "Qwen3Moe", **_EXPERTS, **_HEADS_OF_16, num_experts=8, decoder_sparse_step=1, mlp_only_layers=[1]
        ),
        "mixtral": _text("Mixtral", num_local_experts=8, num_experts_per_tok=2),
        "gemma2": _text("Gemma2", **_HEADS_OF_16, **_TIED),
        "gemma3_text": TinyFamily("Gemma3TextConfig", "Gemma3ForCausalLM", DENSE_SIZES | _HEADS_OF_16 | _TIED),
        "gemma3": _multimodal("Gemma3", _SIGLIP, _HEADS_OF_16 | _TIED, mm_tokens_per_image=4, **_TIED),
        "phi3": _text("Phi3"),
        "glm4": _text("Glm4", **_HEADS_OF_16, attention_bias=True),
        "glm4v": _multimodal(
            "Glm4v",
            _GLM_VISION,
            {"num_attention_heads": 4, "rope_parameters": _MROPE | {"partial_rotary_factor": 0.5}},
        ),
        "deepseek_v3": _text("DeepseekV3", **(_EXPERTS | _DEEPSEEK)),
        "qwen2_vl": _multimodal("Qwen2VL", _QWEN2_VISION, {"rope_parameters": _MROPE}),
        "qwen2_5_vl": _multimodal("Qwen2_5_VL", _QWEN2_5_VISION, {"rope_parameters": _MROPE}),
    }
)

MOE_FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


def make_tiny(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of the family in bfloat16; `changes` go into its config (the language model's, in a multimodal one)."""
    return make_model(FAMILIES[family], seed=seed, **changes)


def make_model(tiny: TinyFamily, *, seed: int = 0, **changes: Any) -> Any:
    """The same for a family that is not listed here."""
    import torch
    import transformers

    if tiny.text_sizes:
        config = getattr(transformers, tiny.config_class)(**tiny.sizes, text_config={**tiny.text_sizes, **changes})
    else:
        config = getattr(transformers, tiny.config_class)(**{**tiny.sizes, **changes})
    model_class = getattr(transformers, tiny.model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.bfloat16)
        with torch.no_grad():
            # Biases are zero and norms one when a model is made: as such they could be mixed up unseen.
            for tensor in [*model.parameters(), *_saved_buffers(model)]:
                tensor.copy_(torch.randn(tensor.shape) * 0.05)
    return model.eval()


def save_tiny(family: str, folder: Path, *, seed: int = 0, hub_names: bool = True, **changes: Any) -> Path:
    """Save `make_tiny`'s model as several safetensors files, index and config. Returns the folder.

    `hub_names`: tensors are named and stored as the family's checkpoints on the hub are (one tensor for each expert,
    older prefixes), which transformers does unless told not to. Otherwise as its modules are: stacked experts.
    """
    return save_model(FAMILIES[family], folder, seed=seed, hub_names=hub_names, **changes)


def save_model(tiny: TinyFamily, folder: Path, *, seed: int = 0, hub_names: bool = True, **changes: Any) -> Path:
    """The same for a family that is not listed here."""
    model = make_model(tiny, seed=seed, **changes)
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES, save_original_format=hub_names)
    return folder


def _saved_buffers(model: Any) -> list[Any]:
    saved = model.state_dict()
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]
