"""Models that see: a language model of a family, with a tower before it.

The tower is replicated. It is a small part of the model (some 0.4 to 0.7 billion parameters), no plan of transformers
cuts it, and its sizes often do not divide: the tower of Qwen2.5-VL has 3420 rows in its MLP, which eight ranks cannot
share. Who wants it cut by its own heads says so with rules of his own; docs/layouts.md has them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.layouts.families.dense import GEMMA3_PARTS
from cluster.layouts.families.fused import GLM4_PARTS
from cluster.layouts.families.parts import ATTENTION, EMBEDDING, HEAD, NESTED_PREFIXES, NORMS, ROTARY, mlp, table
from cluster.layouts.module_names import TOWERS
from cluster.layouts.rule import Rows, Rule

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
