"""Rules of families that have no table, from the parallel plan that transformers has for them. Pure: a plan goes in.

    {"layers.*.mlp.c_fc": "colwise"}  -->  "model.layers.*.mlp.c_fc.weight": column, "...c_fc.bias": column

A plan names modules that are cut and is silent about the rest. Of the rest only what is known by its name gets a rule
(norms, routers, embedding, head): a tensor that neither knows stays an error, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.layouts.families.experts import LATENT_ATTENTION, own_tensors
from cluster.layouts.families.multimodal import NESTED_HEAD, TOWER
from cluster.layouts.families.parts import HEAD, NESTED_PREFIXES, TEXT_PREFIXES, table
from cluster.layouts.rule import Rows, Rule

_STYLES: Mapping[str, tuple[Rule, Rule]] = {  # of a weight, of a bias
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
_STACKED: Mapping[str, Rule] = {  # of a parameter that has all experts
    "packed_colwise": Rule.EXPERTS_GATE_UP,
    "colwise": Rule.EXPERTS_COLUMN,
    "rowwise": Rule.EXPERTS_ROW,
}
# In whole heads, and copied when there are fewer than ranks, which a plan of transformers cannot say.
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
    """Rules from `base_model_tp_plan` and `base_model_ep_plan`; `nested`: of a language model inside another model.

    Styles that say nothing of how a tensor is stored, and those that are unknown, give no rule.
    """
    rows: list[tuple[str, Rule]] = []
    for module, style in {**dict.fromkeys(expert_plan, "grouped_gemm"), **plan}.items():
        rows += _rows_of_experts(module, style) if _is_stacked(module) else _rows_of_module(module, style)
    parts = (tuple(rows), LATENT_ATTENTION, _KNOWN_NAMES)
    if nested:
        return _once((*TOWER, *table(*parts, prefixes=NESTED_PREFIXES, head=(*NESTED_HEAD, *_HEADS_OF_MODELS))))
    return _once(table(*parts, prefixes=TEXT_PREFIXES, head=(*HEAD, *_HEADS_OF_MODELS)))


def nested_rows(rows: Rows) -> Rows:
    """A language model's table, for that model inside another one."""
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
    """A stacked parameter, and the tensors of single experts that the hub has in its place."""
    parent, _, name = module.rpartition(".")
    stacked = [(module, _STACKED[style])] if style in _STACKED else []
    if name == "gate_up_proj" and style == "packed_colwise":
        below = parent.removeprefix("layers.*.")
        stacked += [*own_tensors(below, "gate_proj", "up_proj", "down_proj"), *own_tensors(below, "w1", "w3", "w2")]
    return stacked


def _is_stacked(module: str) -> bool:
    return module.rpartition(".")[0].endswith(".experts")


def _once(rows: Rows) -> Rows:
    """Each pattern's first row: the one that counts."""
    found: dict[str, Rule] = {}
    for pattern, rule in rows:
        found.setdefault(pattern, rule)
    return tuple(found.items())
