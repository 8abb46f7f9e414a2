"""Decoders with experts: Mixtral, Qwen3-MoE, DeepSeek-V3.

Checkpoints have either a tensor for each expert and matrix, which is what the hub has, or all experts of a layer in
one 3-D tensor, which is how the modules of transformers 5 hold them. Routers are replicated, experts that every token
passes ("shared") are cut like any other layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.layouts.families.parts import (
    ATTENTION,
    ATTENTION_OUTPUT,
    EMBEDDING,
    HEAD_NORMS,
    NORMS,
    ROTARY,
    mlp,
    table,
)
from cluster.layouts.rule import Rows, Rule


def own_tensors(experts: str, gate: str, up: str, down: str) -> Rows:
    """One tensor per expert and matrix; `experts` is where a layer keeps them."""
    return (
        (f"layers.*.{experts}.*.{gate}.weight", Rule.EXPERT_COLUMN),
        (f"layers.*.{experts}.*.{up}.weight", Rule.EXPERT_COLUMN),
        (f"layers.*.{experts}.*.{down}.weight", Rule.EXPERT_ROW),
    )


# All experts of a layer: (expert, gate and up, in) and (expert, out, in).
STACKED: Rows = (
    ("layers.*.mlp.experts.gate_up_proj", Rule.EXPERTS_GATE_UP),
    ("layers.*.mlp.experts.down_proj", Rule.EXPERTS_ROW),
)
ROUTER: Rows = (("layers.*.mlp.gate.weight", Rule.REPLICATE),)
QWEN_EXPERTS: Rows = (*own_tensors("mlp.experts", "gate_proj", "up_proj", "down_proj"), *STACKED, *ROUTER)
MIXTRAL_EXPERTS: Rows = (
    *own_tensors("block_sparse_moe.experts", "w1", "w3", "w2"),
    ("layers.*.block_sparse_moe.gate.weight", Rule.REPLICATE),
    *STACKED,
    *ROUTER,
)

# Multi-head latent attention, as vLLM cuts it. What makes the short latent vectors is small, has no heads and is
# needed whole by every head: replicated. What makes heads of them is cut by heads (of two lengths: a part with and one
# without position, or keys and values; every head's rows are together).
LATENT_ATTENTION: Rows = (
    ("layers.*.self_attn.q_a_proj.weight", Rule.REPLICATE),
    ("layers.*.self_attn.q_a_proj.bias", Rule.REPLICATE),
    ("layers.*.self_attn.q_a_layernorm.weight", Rule.REPLICATE),
    ("layers.*.self_attn.q_b_proj.weight", Rule.HEADS),
    ("layers.*.self_attn.q_proj.weight", Rule.HEADS),  # models that do not compress queries
    ("layers.*.self_attn.kv_a_proj_with_mqa.weight", Rule.REPLICATE),
    ("layers.*.self_attn.kv_a_proj_with_mqa.bias", Rule.REPLICATE),
    ("layers.*.self_attn.kv_a_layernorm.weight", Rule.REPLICATE),
    ("layers.*.self_attn.kv_b_proj.weight", Rule.HEADS),
    *ATTENTION_OUTPUT,
)
# Layers after the last that guess further tokens: each is a decoder layer with an embedding and a head of its own
# (copies of the model's), and a projection of both inputs that needs all of them.
GUESSING_LAYERS: Rows = (
    ("layers.*.embed_tokens.weight", Rule.VOCABULARY),
    ("layers.*.shared_head.head.weight", Rule.VOCABULARY),
    ("layers.*.shared_head.norm.weight", Rule.REPLICATE),
    ("layers.*.enorm.weight", Rule.REPLICATE),
    ("layers.*.hnorm.weight", Rule.REPLICATE),
    ("layers.*.eh_proj.weight", Rule.REPLICATE),
)

EXPERTS: Mapping[str, Rows] = {
    "mixtral": table(EMBEDDING, ATTENTION, MIXTRAL_EXPERTS, NORMS, ROTARY),
    "qwen3_moe": table(EMBEDDING, ATTENTION, HEAD_NORMS, mlp(), QWEN_EXPERTS, NORMS),
    "deepseek_v3": table(
        EMBEDDING,
        LATENT_ATTENTION,
        mlp(),
        QWEN_EXPERTS,
        (("layers.*.mlp.gate.e_score_correction_bias", Rule.REPLICATE),),
        mlp("mlp.shared_experts"),
        NORMS,
        GUESSING_LAYERS,
        ROTARY,
    ),
}
