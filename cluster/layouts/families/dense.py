"""Decoders whose layers have q, k, v, o and gate, up, down as tensors of their own."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.layouts.families.parts import ATTENTION, EMBEDDING, HEAD_NORMS, NORMS, ROTARY, mlp, norms, table
from cluster.layouts.rule import Rows

LLAMA: Rows = table(EMBEDDING, ATTENTION, mlp(), NORMS, ROTARY)
QWEN3: Rows = table(EMBEDDING, ATTENTION, HEAD_NORMS, mlp(), NORMS)

# Gemma has four norms to a layer, and ties its head to its embedding.
GEMMA_NORMS: Rows = (*NORMS, *norms("pre_feedforward_layernorm", "post_feedforward_layernorm"))
GEMMA2: Rows = table(EMBEDDING, ATTENTION, mlp(), GEMMA_NORMS)
GEMMA3_PARTS = (EMBEDDING, ATTENTION, HEAD_NORMS, mlp(), GEMMA_NORMS)

DENSE: Mapping[str, Rows] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": table(*GEMMA3_PARTS),
}
