"""What the families' tables are made of: rows below the decoder's own prefix, and the prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.layouts.rule import Rows, Rule

# The bias of a row-parallel layer is replicated on purpose: it is added once, after the partial sums of all ranks;
# an engine adds it on one rank only. Which biases there are differs even inside a family, so every one is named.
EMBEDDING: Rows = (("embed_tokens.weight", Rule.VOCABULARY),)
HEAD: Rows = (("lm_head.weight", Rule.VOCABULARY),)
QUERY_KEY_VALUE: Rows = (
    ("layers.*.self_attn.q_proj.weight", Rule.HEADS),
    ("layers.*.self_attn.q_proj.bias", Rule.HEADS),
    ("layers.*.self_attn.k_proj.weight", Rule.KV_HEADS),
    ("layers.*.self_attn.k_proj.bias", Rule.KV_HEADS),
    ("layers.*.self_attn.v_proj.weight", Rule.KV_HEADS),
    ("layers.*.self_attn.v_proj.bias", Rule.KV_HEADS),
)
ATTENTION_OUTPUT: Rows = (
    ("layers.*.self_attn.o_proj.weight", Rule.ROW),
    ("layers.*.self_attn.o_proj.bias", Rule.REPLICATE),
)
ATTENTION: Rows = (*QUERY_KEY_VALUE, *ATTENTION_OUTPUT)
# One norm for all heads of q, or of k: as long as one head.
HEAD_NORMS: Rows = (
    ("layers.*.self_attn.q_norm.weight", Rule.REPLICATE),
    ("layers.*.self_attn.k_norm.weight", Rule.REPLICATE),
)
NORMS: Rows = (
    ("layers.*.input_layernorm.weight", Rule.REPLICATE),
    ("layers.*.post_attention_layernorm.weight", Rule.REPLICATE),
    ("norm.weight", Rule.REPLICATE),
)
# Buffers that early checkpoints kept, per layer or once.
ROTARY: Rows = (
    ("layers.*.self_attn.rotary_emb.inv_freq", Rule.REPLICATE),
    ("layers.*.self_attn.rotary_emb.cos_cached", Rule.REPLICATE),
    ("layers.*.self_attn.rotary_emb.sin_cached", Rule.REPLICATE),
    ("rotary_emb.inv_freq", Rule.REPLICATE),
)

TEXT_PREFIXES = ("model.", "")  # with a head, and a bare base model
# A language model inside another one: as transformers names it now, as LLaVA-like checkpoints do, the bare base model,
# and as early checkpoints of Qwen2-VL do.
NESTED_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", *TEXT_PREFIXES)


def mlp(parent: str = "mlp") -> Rows:
    """Gate, up and down of the layers' module `parent`, in three tensors."""
    return (
        (f"layers.*.{parent}.gate_proj.weight", Rule.COLUMN),
        (f"layers.*.{parent}.gate_proj.bias", Rule.COLUMN),
        (f"layers.*.{parent}.up_proj.weight", Rule.COLUMN),
        (f"layers.*.{parent}.up_proj.bias", Rule.COLUMN),
        (f"layers.*.{parent}.down_proj.weight", Rule.ROW),
        (f"layers.*.{parent}.down_proj.bias", Rule.REPLICATE),
    )


# Gate and up in one tensor: each half is cut, so that a rank has matching rows of both.
FUSED_MLP: Rows = (
    ("layers.*.mlp.gate_up_proj.weight", Rule.GATE_UP),
    ("layers.*.mlp.gate_up_proj.bias", Rule.GATE_UP),
    ("layers.*.mlp.down_proj.weight", Rule.ROW),
    ("layers.*.mlp.down_proj.bias", Rule.REPLICATE),
)


def norms(*names: str) -> Rows:
    """Further norms of every layer."""
    return tuple((f"layers.*.{name}.weight", Rule.REPLICATE) for name in names)


def table(*parts: Rows, prefixes: Iterable[str] = TEXT_PREFIXES, head: Rows = HEAD) -> Rows:
    """All parts below every prefix, then the head."""
    rows = tuple(row for part in parts for row in part)
    return (*((f"{prefix}{name}", rule) for prefix in prefixes for name, rule in rows), *head)
