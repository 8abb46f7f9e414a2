"""What can be done to one tensor: the names that tables of rules, and users, write."""

from __future__ import annotations

from enum import StrEnum


class Rule(StrEnum):
    """What tensor and expert parallelism do to one tensor; dimensions as stored, a linear weight is (out, in)."""

    COLUMN = "column"  # dim 0 (the outputs) in equal parts
    ROW = "row"  # dim 1 (the inputs) in equal parts
    VOCABULARY = "vocabulary"  # dim 0 (one row per token) in equal parts, the last ones padded with zeros
    HEADS = "heads"  # dim 0 in whole attention heads
    KV_HEADS = "kv_heads"  # dim 0 in whole key/value heads; fewer heads than ranks: neighbours share a head
    QKV = "qkv"  # dim 0 is the heads of q, of k and of v, one after the other; each is cut like q_proj, k_proj, v_proj
    EQUAL_HEADS = "equal_heads"  # QKV with as many heads each, as towers of vision models have
    GATE_UP = "gate_up"  # dim 0 is two matrices of one size, gate and up; each is cut like COLUMN
    REPLICATE = "replicate"  # every rank has all of it
    # One expert's own tensor; see `cluster.layouts.layout.expert_number` for which expert's.
    EXPERT = "expert"  # whole, on the ranks that have the expert
    EXPERT_COLUMN = "expert_column"
    EXPERT_ROW = "expert_row"
    EXPERT_GATE_UP = "expert_gate_up"
    # All experts in one tensor, dim 0: (expert, out, in), and biases (expert, out).
    EXPERTS = "experts"
    EXPERTS_COLUMN = "experts_column"
    EXPERTS_ROW = "experts_row"
    EXPERTS_GATE_UP = "experts_gate_up"


Rows = tuple[tuple[str, Rule], ...]  # patterns of names in order of precedence, each with its rule
