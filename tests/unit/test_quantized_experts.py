"""Quantized experts, of their own and stacked, over stages, replicas and shares: each rank has its part of each."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.layouts.mesh import Layout
from cluster.layouts.rules import parse_rules
from tests.support.quantized_models import (
    Grouped,
    Stored,
    config_of,
    ends_of,
    fp8_blocks,
    fp8_weight,
    grouped_config,
    load_parts,
    named,
    plain_region,
    take_region,
)


def expert_model(kind: Grouped) -> Stored:
    stored: Stored = {}
    for layer in range(2):
        for expert in range(4):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            stored |= named(kind.gptq(64, 64, seed=layer * 10 + expert), f"{name}.up_proj.")
            stored |= named(kind.gptq(64, 64, seed=layer * 10 + expert + 4), f"{name}.down_proj.")
        stored[f"model.layers.{layer}.norm.weight"] = ("F16", np.ones(64, np.float16))
    return stored


EXPERT_RULES = {
    "model.layers.*.mlp.experts.*.up_proj.weight": "expert_column",
    "model.layers.*.mlp.experts.*.down_proj.weight": "expert_row",
    "model.layers.*.norm.weight": "replicate",
}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, expert_parallel_size=2),
        Layout(4, expert_parallel_size=2),
        Layout(2, 2, 1, 2),
        Layout(2, 1, 2, 2, expert_parallel_size=4),
        Layout(2, 1, 2, expert_parallel_size=2, expert_tensor_parallel_size=2),
    ],
    ids=str,
)
def test_experts_stages_and_replicas(layout: Layout) -> None:
    kind = Grouped(4, 16)
    stored, config, rules = expert_model(kind), grouped_config("gptq", kind), parse_rules(EXPERT_RULES)
    unsharded = Layout(
        layout.tensor_parallel_size,
        1,
        layout.data_parallel_size,
        layout.pipeline_parallel_size,
        layout.expert_parallel_size,
        layout.expert_tensor_parallel_size,
    )
    parts = load_parts(stored, layout, rules, config)
    places = [layout.rank_coords(rank) for rank in range(layout.ranks)]
    held = set()
    for rank in range(unsharded.ranks):
        coords = unsharded.rank_coords(rank)
        shares = [
            part
            for part, place in zip(parts, places, strict=True)
            if (place.data, place.stage, place.tensor) == (coords.data, coords.stage, coords.tensor)
        ]
        assert len(shares) == layout.fsdp_size
        for name in {name.rpartition(".")[0] for name in shares[0] if "experts" in name}:
            whole = {end.removeprefix(f"{name}."): array for end, (_, array) in stored.items() if end.startswith(name)}
            # Fully sharded parts are put together again before they are used, each tensor for itself.
            part = {end: np.concatenate([share[f"{name}.{end}"] for share in shares]) for end in whole}
            weight = kind.gptq_weight(whole)
            region = plain_region(f"{name}.weight", weight.shape, coords, with_all_experts(unsharded), rules, config)
            np.testing.assert_array_equal(kind.gptq_weight(part), take_region(weight, region))
            held.add((name, coords.stage))
    assert len(held) == 16


def with_all_experts(layout: Layout) -> Layout:
    """A single tensor cannot be spread; how its experts are cut stays."""
    return Layout(layout.tensor_parallel_size, 1, layout.data_parallel_size, 1, 1, layout.expert_cuts)


@pytest.mark.parametrize(
    ("rule", "cut"), [("experts", None), ("experts_column", 1), ("experts_row", 2), ("experts_gate_up", 1)]
)
def test_stacked_experts(rule: str, cut: int | None) -> None:
    config = config_of({"quant_method": "fp8", "weight_block_size": [8, 8]})
    stored = fp8_blocks((4, 32, 64), 8) | {"_activation_scale": ("F32", np.arange(4, dtype=np.float32))}
    rules = parse_rules({"x.experts.gate_up_proj": rule})
    layout = Layout(4, expert_parallel_size=2)
    name = "x.experts.gate_up_proj"
    weight = fp8_weight({end: array for end, (_, array) in stored.items()}, 8)
    for rank, part in enumerate(load_parts(named(stored, name), layout, rules, config)):
        region = plain_region(name, weight.shape, layout.rank_coords(rank), layout, rules, config)
        assert (region.sizes == weight[:2].shape) is (cut is None)
        np.testing.assert_array_equal(fp8_weight(ends_of(part, name), 8), take_region(weight, region))
        coords = layout.rank_coords(rank)
        assert part[f"{name}_activation_scale"].tolist() == [2 * coords.expert, 2 * coords.expert + 1]


def test_stacked_experts_with_one_scale_for_all() -> None:
    stored: Stored = {
        "": ("F8_E4M3", np.zeros((4, 32, 64), np.uint8)),
        "_scale": ("F32", np.float32(2).reshape(())),
        "_global_scale": ("F32", np.ones(1, np.float32)),
    }
    layout, rules = Layout(4, expert_parallel_size=2), parse_rules({"x.down_proj": "experts_row"})
    for part in load_parts(named(stored, "x.down_proj"), layout, rules, config_of({"quant_method": "fp8"})):
        assert part["x.down_proj"].shape == (2, 32, 32)
        assert (part["x.down_proj_scale"].shape, part["x.down_proj_global_scale"].shape) == ((), (1,))
