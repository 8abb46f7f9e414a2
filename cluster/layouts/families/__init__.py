"""Tables of rules, one per model family: data, and nothing but data. `cluster.layouts.rules` explains the patterns.

The tables agree with the tensor-parallel and expert-parallel plans that transformers ships for these families; where
they differ on purpose, a test lists the row with its reason (tests/unit/test_transformers_plans.py). What
transformers leaves out of its plans is decided as engines such as vLLM do: embedding and head are cut by vocabulary,
key/value heads are copied when there are fewer of them than ranks, fused matrices are cut in each of their parts.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.layouts.families.dense import DENSE
from cluster.layouts.families.experts import EXPERTS
from cluster.layouts.families.fused import FUSED
from cluster.layouts.families.multimodal import MULTIMODAL
from cluster.layouts.rule import Rows

# `model_type` of config.json -> rows. A new family is a new row.
TABLES: Mapping[str, Rows] = {**DENSE, **FUSED, **EXPERTS, **MULTIMODAL}
