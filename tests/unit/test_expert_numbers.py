"""The number of the expert that a tensor belongs to, from its name; an error if the name lacks it."""

from __future__ import annotations

import pytest

from cluster.errors import LayoutError
from cluster.layouts.families import TABLES
from cluster.layouts.layout import decide_layout, expert_number
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import experts_of, parse_rules
from storage.checkpoints.model_index import Tensor


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.7.mlp.experts.41.up_proj.weight", 41),
        ("model.layers.7.block_sparse_moe.experts.0.w1.qweight", 0),
        ("model.layers.7.mlp.experts.3.mlp.2.weight", 3),
        ("experts.3.up", 3),
        ("encoder.block.1.layer.2.mlp.experts.expert_5.wi.weight", 5),
        ("layers.7.moe.expert.6.up", 6),
        ("layers.7.moe.6.up", 6),
        ("layers.7.self_attn.q_proj.weight", None),
        ("layers.7.mlp.shared_experts.up_proj.weight", None),
        ("layers.7.mlp.experts.gate_up_proj", None),
        ("lm_head.weight", None),
    ],
)
def test_the_number_of_an_expert_is_read_from_its_name(name: str, expected: int | None) -> None:
    assert expert_number(name) == expected


def test_every_table_names_experts_recognisably() -> None:
    found = 0
    for rows in TABLES.values():
        for pattern, rule in rows:
            if experts_of(rule) == "one":
                layers, _, expert = pattern.rpartition("*")
                name = f"{layers.replace('*', '7')}41{expert}"
                assert expert_number(name) == 41, name
                found += 1
    assert found >= 18


def test_a_layer_number_is_not_an_expert() -> None:
    tensors = [Tensor(f"model.layers.{n}.self_attn.q_proj.weight", "BF16", (8, 8), 0, 0, 128) for n in range(4)]
    rules = parse_rules({"**.q_proj.weight": "expert"})
    said = r"of one expert by rule, but without an expert number in the name: 'model.layers.\*.self_attn.* \(4\)"
    with pytest.raises(LayoutError, match=said) as raised:
        decide_layout(tensors, Layout(2, expert_parallel_size=2), rules)
    assert "such as model.layers.7.mlp.experts.41" in raised.value.hint
    decide_layout(tensors, Layout(2), rules)  # every rank has all experts, so the number does not matter
