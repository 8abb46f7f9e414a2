"""Tables of layout rules, one per model family. Data only; `cluster.layouts.rules` explains the patterns.

The tables agree with the tensor-parallel and expert-parallel plans that transformers ships for these families. Where
they differ on purpose, a test lists the row with its reason (tests/unit/test_transformers_plans.py). Some tensors are
in no plan of transformers. They are cut as engines such as vLLM do: embedding and head are cut by vocabulary, key/value
heads are copied when there are fewer of them than ranks, and fused matrices are cut in each of their parts.

*Module names.* Pipeline stages, device maps and precision recognize embeddings, heads, towers and routers by name. A
name is one part of a dotted tensor name.

*Experts* (Mixtral, Qwen3-MoE, DeepSeek-V3). Checkpoints on the hub have a tensor for each expert and matrix. Modules of
transformers 5 hold all experts of a layer in one 3-D tensor. Routers are replicated. Experts that process every
token ("shared") are cut like any other layer.

*Vision towers.* A multimodal model has a language model of a family, and a tower before it. The tower is replicated. It
is small (0.4 to 0.7 billion parameters), no plan of transformers cuts it, and its sizes often do not divide. For
example, the tower of Qwen2.5-VL has 3420 rows in its MLP, which eight ranks cannot share. Users who want it cut by its
own heads can pass rules; see docs/layouts.md.

*Config defaults.* Some published config.json files omit fields and rely on the defaults of the config classes in
transformers. The one of Gemma 3 4B has no number of heads. The tables here repeat those defaults for these families.
For other families a missing field is an error, never a guess.

*Other families.* `rows_of_plan` makes rules from the parallel plan of transformers. Pure; the plan is passed in.

    {"layers.*.mlp.c_fc": "colwise"}  -->  "model.layers.*.mlp.c_fc.weight": column, "...c_fc.bias": column

A plan names only the modules that are cut. Other modules get a rule if their name is known (norms, routers, embedding,
head). A tensor that neither names stays an error, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Rule(StrEnum):
    """The ways to cut one tensor. Dimensions are as stored; a linear weight is (out, in)."""

    COLUMN = "column"  # dim 0 (the outputs) in equal parts
    ROW = "row"  # dim 1 (the inputs) in equal parts
    VOCABULARY = "vocabulary"  # dim 0 (one row per token) in equal parts, the last ones padded with zeros
    HEADS = "heads"  # dim 0 in whole attention heads
    KV_HEADS = "kv_heads"  # dim 0 in whole key/value heads; fewer heads than ranks: neighbours share a head
    QKV = "qkv"  # dim 0 is the heads of q, of k and of v, one after the other; each is cut like q_proj, k_proj, v_proj
    EQUAL_HEADS = "equal_heads"  # QKV with equal numbers of q, k and v heads, as in vision towers
    GATE_UP = "gate_up"  # dim 0 is two matrices of one size, gate and up; each is cut like COLUMN
    REPLICATE = "replicate"  # every rank has all of it
    # One expert's own tensor; see `cluster.layouts.layout.expert_number` for the number of the expert.
    EXPERT = "expert"  # whole, on the ranks that hold the expert
    EXPERT_COLUMN = "expert_column"
    EXPERT_ROW = "expert_row"
    EXPERT_GATE_UP = "expert_gate_up"
    # All experts in one tensor, dim 0: (expert, out, in), and biases (expert, out).
    EXPERTS = "experts"
    EXPERTS_COLUMN = "experts_column"
    EXPERTS_ROW = "experts_row"
    EXPERTS_GATE_UP = "experts_gate_up"


Rows = tuple[tuple[str, Rule], ...]  # patterns of names in order of precedence, each with its rule


# One row per token. A head that is not stored is the same tensor as the embedding.
TOKEN_EMBEDDINGS = ("shared", "embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings")
OTHER_EMBEDDINGS = (
    *("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_embed"),
    *("embed_tokens_per_layer", "patch_embed", "patch_embedding"),
)
HEADS = ("lm_head", "embed_out", "score", "classifier")
ROUTERS = ("gate", "router", "shared_expert_gate")
# Modules for inputs other than tokens, and the projections of their outputs to the language model's width.
TOWERS = (
    *("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "mm_projector", "connector"),
    *("embed_vision", "embed_audio", "image_newline"),
)


# The bias of a row-parallel layer is replicated on purpose. It is added once, after the partial sums of all ranks, so
# an engine adds it on one rank only. Biases differ even inside a family, so the tables name every one.
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
# One norm for all heads of q, or of k. It has the length of one head.
HEAD_NORMS: Rows = (
    ("layers.*.self_attn.q_norm.weight", Rule.REPLICATE),
    ("layers.*.self_attn.k_norm.weight", Rule.REPLICATE),
)
NORMS: Rows = (
    ("layers.*.input_layernorm.weight", Rule.REPLICATE),
    ("layers.*.post_attention_layernorm.weight", Rule.REPLICATE),
    ("norm.weight", Rule.REPLICATE),
)
# Buffers that early checkpoints stored, per layer or once.
ROTARY: Rows = (
    ("layers.*.self_attn.rotary_emb.inv_freq", Rule.REPLICATE),
    ("layers.*.self_attn.rotary_emb.cos_cached", Rule.REPLICATE),
    ("layers.*.self_attn.rotary_emb.sin_cached", Rule.REPLICATE),
    ("rotary_emb.inv_freq", Rule.REPLICATE),
)

TEXT_PREFIXES = ("model.", "")  # of a model with a head, and of a bare base model
# Prefixes of a language model inside another model: as in transformers now, as in LLaVA-like checkpoints, as in the
# bare base model, and as in early checkpoints of Qwen2-VL.
NESTED_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", *TEXT_PREFIXES)


def mlp(parent: str = "mlp") -> Rows:
    """Return rows for gate, up and down of the layers' module `parent`, in three tensors."""
    return (
        (f"layers.*.{parent}.gate_proj.weight", Rule.COLUMN),
        (f"layers.*.{parent}.gate_proj.bias", Rule.COLUMN),
        (f"layers.*.{parent}.up_proj.weight", Rule.COLUMN),
        (f"layers.*.{parent}.up_proj.bias", Rule.COLUMN),
        (f"layers.*.{parent}.down_proj.weight", Rule.ROW),
        (f"layers.*.{parent}.down_proj.bias", Rule.REPLICATE),
    )


# Gate and up in one tensor. Each half is cut, so that a rank has matching rows of both.
FUSED_MLP: Rows = (
    ("layers.*.mlp.gate_up_proj.weight", Rule.GATE_UP),
    ("layers.*.mlp.gate_up_proj.bias", Rule.GATE_UP),
    ("layers.*.mlp.down_proj.weight", Rule.ROW),
    ("layers.*.mlp.down_proj.bias", Rule.REPLICATE),
)


def norms(*names: str) -> Rows:
    """Return rows for further norms of every layer."""
    return tuple((f"layers.*.{name}.weight", Rule.REPLICATE) for name in names)


def table(*parts: Rows, prefixes: Iterable[str] = TEXT_PREFIXES, head: Rows = HEAD) -> Rows:
    """Return the rows of all parts below every prefix, then those of the head."""
    rows = tuple(row for part in parts for row in part)
    return (*((f"{prefix}{name}", rule) for prefix in prefixes for name, rule in rows), *head)


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


def own_tensors(experts: str, gate: str, up: str, down: str) -> Rows:
    """Return rows for one tensor per expert and matrix. `experts` is their module in a layer."""
    return (
        (f"layers.*.{experts}.*.{gate}.weight", Rule.EXPERT_COLUMN),
        (f"layers.*.{experts}.*.{up}.weight", Rule.EXPERT_COLUMN),
        (f"layers.*.{experts}.*.{down}.weight", Rule.EXPERT_ROW),
    )


# All experts of a layer in one tensor: (expert, gate and up, in) and (expert, out, in).
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

# Multi-head latent attention, cut as vLLM cuts it. The matrices that make the short latent vectors are small and have
# no heads, and every head needs them whole, so they are replicated. The matrices that make heads from the latent
# vectors are cut by heads. A head has two parts (with and without position, or keys and values). The rows of a head
# are together.
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
# Layers after the last that predict further tokens. Each is a decoder layer with copies of the model's embedding and
# head, and a projection of both inputs. Every rank needs the whole projection.
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


TOWER: Rows = tuple((f"{prefix}{tower}.**", Rule.REPLICATE) for tower in TOWERS for prefix in ("model.", ""))
NESTED_HEAD: Rows = (*HEAD, ("language_model.lm_head.weight", Rule.VOCABULARY))

QWEN2_PARTS = (EMBEDDING, ATTENTION, mlp(), NORMS, ROTARY)


def _with_tower(*parts: Rows) -> Rows:
    return (*TOWER, *table(*parts, prefixes=NESTED_PREFIXES, head=NESTED_HEAD))


MULTIMODAL: Mapping[str, Rows] = {
    "gemma3": _with_tower(*GEMMA3_PARTS),
    "glm4v": _with_tower(*GLM4_PARTS),
    "qwen2_vl": _with_tower(*QWEN2_PARTS),
    "qwen2_vl_text": table(*QWEN2_PARTS),
    "qwen2_5_vl": _with_tower(*QWEN2_PARTS),
    "qwen2_5_vl_text": table(*QWEN2_PARTS),
}


# `model_type` of config.json -> rows. A new family is a new row.
TABLES: Mapping[str, Rows] = {**DENSE, **FUSED, **EXPERTS, **MULTIMODAL}


_GEMMA: Mapping[str, int] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}

# `model_type` of the language model
CONFIG_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
}


_STYLES: Mapping[str, tuple[Rule, Rule]] = {  # rules of the weight and of the bias
    "colwise": (Rule.COLUMN, Rule.COLUMN),
    "colwise_rep": (Rule.COLUMN, Rule.COLUMN),
    "colwise_gather_output": (Rule.COLUMN, Rule.COLUMN),
    "packed_colwise": (Rule.GATE_UP, Rule.GATE_UP),
    "rowwise": (Rule.ROW, Rule.REPLICATE),
    "rowwise_rep": (Rule.ROW, Rule.REPLICATE),
    "rowwise_split_input": (Rule.ROW, Rule.REPLICATE),
    "embedding_rowwise": (Rule.VOCABULARY, Rule.REPLICATE),
    "embedding_colwise": (Rule.ROW, Rule.REPLICATE),
    "replicate": (Rule.REPLICATE, Rule.REPLICATE),
    "replicated_with_grad_allreduce": (Rule.REPLICATE, Rule.REPLICATE),
    "sequence_parallel": (Rule.REPLICATE, Rule.REPLICATE),
    "mla_kv_a_proj": (Rule.REPLICATE, Rule.REPLICATE),
}
_STACKED: Mapping[str, Rule] = {  # rules of a parameter that has all experts
    "packed_colwise": Rule.EXPERTS_GATE_UP,
    "colwise": Rule.EXPERTS_COLUMN,
    "rowwise": Rule.EXPERTS_ROW,
}
# Cut in whole heads, and copied if there are fewer heads than ranks. A plan of transformers cannot express this.
_HEADS: Mapping[str, Rule] = {"q_proj": Rule.HEADS, "k_proj": Rule.KV_HEADS, "v_proj": Rule.KV_HEADS}

_KNOWN_NAMES: Rows = (
    *((f"{name}.weight", Rule.VOCABULARY) for name in ("embed_tokens", "embed_in", "wte", "word_embeddings")),
    *((f"**.{name}.{part}", Rule.REPLICATE) for name in ("*norm", "ln_*", "norm*") for part in ("weight", "bias")),
    *((f"**.{name}.{part}", Rule.REPLICATE) for name in ("gate", "router") for part in ("weight", "bias")),
    ("**.e_score_correction_bias", Rule.REPLICATE),
    ("**.rotary_emb.*", Rule.REPLICATE),
)
_HEADS_OF_MODELS: Rows = (("lm_head.bias", Rule.VOCABULARY), ("embed_out.weight", Rule.VOCABULARY))


def rows_of_plan(plan: Mapping[str, str], expert_plan: Mapping[str, str], *, nested: bool) -> Rows:
    """Return rules from `base_model_tp_plan` and `base_model_ep_plan`. `nested`: for a model inside another model.

    Unknown styles, and styles that do not determine how a tensor is stored, give no rule.
    """
    rows: list[tuple[str, Rule]] = []
    for module, style in {**dict.fromkeys(expert_plan, "grouped_gemm"), **plan}.items():
        rows += _rows_of_experts(module, style) if _is_stacked(module) else _rows_of_module(module, style)
    parts = (tuple(rows), LATENT_ATTENTION, _KNOWN_NAMES)
    if nested:
        return _once((*TOWER, *table(*parts, prefixes=NESTED_PREFIXES, head=(*NESTED_HEAD, *_HEADS_OF_MODELS))))
    return _once(table(*parts, prefixes=TEXT_PREFIXES, head=(*HEAD, *_HEADS_OF_MODELS)))


def nested_rows(rows: Rows) -> Rows:
    """Return a language model's table with the names of that model inside another one."""
    below = tuple((name.removeprefix("model."), rule) for name, rule in rows if name.startswith("model."))
    return _once((*TOWER, *table(below, prefixes=NESTED_PREFIXES, head=NESTED_HEAD)))


def _rows_of_module(module: str, style: str) -> Iterable[tuple[str, Rule]]:
    if style not in _STYLES:
        return []
    weight, bias = _STYLES[style]
    if weight is Rule.COLUMN:
        weight = bias = _HEADS.get(module.rpartition(".")[2], weight)
    return [(f"{module}.weight", weight), (f"{module}.bias", bias)]


def _rows_of_experts(module: str, style: str) -> Iterable[tuple[str, Rule]]:
    """Return rows for a stacked parameter, and for the single experts that the hub stores instead."""
    parent, _, name = module.rpartition(".")
    stacked = [(module, _STACKED[style])] if style in _STACKED else []
    if name == "gate_up_proj" and style == "packed_colwise":
        below = parent.removeprefix("layers.*.")
        stacked += [*own_tensors(below, "gate_proj", "up_proj", "down_proj"), *own_tensors(below, "w1", "w3", "w2")]
    return stacked


def _is_stacked(module: str) -> bool:
    return module.rpartition(".")[0].endswith(".experts")


def _once(rows: Rows) -> Rows:
    """Return the first row of each pattern, which is the one that counts."""
    found: dict[str, Rule] = {}
    for pattern, rule in rows:
        found.setdefault(pattern, rule)
    return tuple(found.items())
