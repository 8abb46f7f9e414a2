"""Decoders that keep several matrices in one tensor: q, k and v (Phi-3), gate and up (Phi-3, GLM-4)."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.layouts.families.parts import (
    ATTENTION,
    ATTENTION_OUTPUT,
    EMBEDDING,
    FUSED_MLP,
    NORMS,
    ROTARY,
    norms,
    table,
)
from cluster.layouts.rule import Rows, Rule

FUSED_ATTENTION: Rows = (
    ("layers.*.self_attn.qkv_proj.weight", Rule.QKV),
    ("layers.*.self_attn.qkv_proj.bias", Rule.QKV),
    *ATTENTION_OUTPUT,
)
GLM4_PARTS = (EMBEDDING, ATTENTION, FUSED_MLP, NORMS, norms("post_self_attn_layernorm", "post_mlp_layernorm"))

FUSED: Mapping[str, Rows] = {
    "phi3": table(EMBEDDING, FUSED_ATTENTION, FUSED_MLP, NORMS, ROTARY),
    "glm4": table(*GLM4_PARTS),
    "glm4v_text": table(*GLM4_PARTS),
}
