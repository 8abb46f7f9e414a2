"""Tensors of quantized modules are cut where their weight is: a rank's parts are that part of the weight."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import LayoutError
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import Rules, parse_rules
from tests.support.quantized_models import (
    Array,
    Floats,
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

Weight = Callable[[Mapping[str, Array]], Floats]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def same_as_the_weight(
    stored: Stored, prefix: str, weight_of: Weight, layout: Layout, rule: str, config: ModelConfig
) -> None:
    """Each rank's part, dequantized, is its part of the dequantized weight, bit for bit."""
    rules = parse_rules({"x.weight": rule})
    weight = weight_of({end: array for end, (_, array) in stored.items()})
    for rank, part in enumerate(load_parts(named(stored, prefix), layout, rules, config)):
        region = plain_region("x.weight", weight.shape, layout.rank_coords(rank), layout, rules, config)
        found = weight_of(ends_of(part, prefix))
        np.testing.assert_array_equal(found, take_region(weight, region))


def refused(stored: Stored, prefix: str, layout: Layout, rule: str, config: ModelConfig) -> str | None:
    try:
        load_parts(named(stored, prefix), layout, parse_rules({"x.weight": rule}), config)
    except LayoutError as error:
        return str(pickle.loads(pickle.dumps(error)))
    return None


@st.composite
def grouped_cases(draw: st.DrawFn, bits: st.SearchStrategy[int]) -> tuple[Grouped, int, int, int, str]:
    kind = Grouped(draw(bits), draw(st.sampled_from([0, 32, 64])), draw(st.booleans()))
    outputs, inputs = 32 * draw(st.integers(1, 8)), 32 * draw(st.integers(1, 8))
    return kind, outputs, inputs, draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(["column", "row"]))


@settings(max_examples=60, deadline=None)
@given(grouped_cases(st.sampled_from([2, 3, 4, 8])))
def test_gptq(case: tuple[Grouped, int, int, int, str]) -> None:
    kind, outputs, inputs, ways, rule = case
    stored = kind.gptq(outputs, inputs)
    config = grouped_config("gptq", kind)
    size = outputs if rule == "column" else inputs
    unit = 32 // math.gcd(32, kind.bits)  # packed in words, both ways
    if rule == "row" and kind.group and not kind.desc_act:
        unit = math.lcm(unit, kind.group)
    if ways > 1 and (size % ways or size // ways % unit):
        assert refused(stored, "x.", Layout(ways), rule, config)
        return
    same_as_the_weight(stored, "x.", kind.gptq_weight, Layout(ways), rule, config)


@settings(max_examples=40, deadline=None)
@given(grouped_cases(st.just(4)))
def test_awq(case: tuple[Grouped, int, int, int, str]) -> None:
    kind, outputs, inputs, ways, rule = case
    stored = kind.awq(outputs, inputs)
    size, unit = (outputs, 8) if rule == "column" else (inputs, kind.group or 1)
    config = grouped_config("awq", kind)
    if ways > 1 and (size % ways or size // ways % unit):
        assert refused(stored, "x.", Layout(ways), rule, config)
        return
    same_as_the_weight(stored, "x.", kind.awq_weight, Layout(ways), rule, config)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([4, 16]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["column", "row", "replicate", "vocabulary"]),
)
def test_blocks_of_fp8(outputs: int, inputs: int, block: int, ways: int, rule: str) -> None:
    config = config_of({"quant_method": "fp8", "weight_block_size": [block, block]})
    stored = fp8_blocks((outputs, inputs), block)
    size = {"column": outputs, "row": inputs, "vocabulary": -(-outputs // ways) * ways}.get(rule, 0)
    if rule != "replicate" and ways > 1 and (size % ways or size // ways % block):
        text = refused(stored, "x.weight", Layout(ways), rule, config)
        assert text
        assert size % ways or f"blocks of {block}" in text
        return
    same_as_the_weight(stored, "x.weight", lambda part: fp8_weight(part, block), Layout(ways), rule, config)


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("heads", (128, 64)),
        ("kv_heads", (32, 64)),  # with four ranks, neighbours share a head
        ("qkv", (128 + 2 * 32, 64)),
        ("gate_up", (128, 64)),
        ("row", (64, 128)),
    ],
)
def test_heads_and_fused_tensors(rule: str, shape: tuple[int, int], ways: int) -> None:
    layout = Layout(ways)
    heads = HEADS | {"head_dim": 16}
    gptq = Grouped(4, 16)
    same_as_the_weight(gptq.gptq(*shape), "x.", gptq.gptq_weight, layout, rule, grouped_config("gptq", gptq, **heads))
    same_as_the_weight(gptq.awq(*shape), "x.", gptq.awq_weight, layout, rule, grouped_config("awq", gptq, **heads))
    blocks = config_of({"quant_method": "fp8", "weight_block_size": [16, 16]}, **heads)
    same_as_the_weight(fp8_blocks(shape, 16), "x.weight", lambda part: fp8_weight(part, 16), layout, rule, blocks)


def test_a_shared_kv_head_may_end_inside_a_block_unless_fused() -> None:
    config = config_of(
        {"quant_method": "fp8", "weight_block_size": [8, 8]},
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=12,
    )
    key = fp8_blocks((12, 16), 8)
    same_as_the_weight(key, "x.weight", lambda part: fp8_weight(part, 8), Layout(2), "kv_heads", config)
    fused = fp8_blocks((96 + 12 + 12, 16), 8)
    text = refused(fused, "x.weight", Layout(2), "qkv", config)
    assert text
    assert "parts of 12 of dim 0 of its weight (120, 16) do not fall on blocks of 8" in text


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (64, 1), (64,)])
@pytest.mark.parametrize("rule", ["column", "row"])
def test_scales_of_a_tensor_and_of_its_outputs(shape: tuple[int, ...], rule: str) -> None:
    random = np.random.default_rng(0)
    stored: Stored = {
        ".weight": ("F8_E4M3", random.integers(0, 0x7F, (64, 32)).astype(np.uint8)),
        ".weight_scale": ("F32", random.uniform(0.1, 1, shape).astype(np.float32)),
        ".input_scale": ("F32", np.float32(3.5).reshape(())),
    }
    config = config_of({"quant_method": "fp8", "activation_scheme": "static"})
    rules = parse_rules({"x.weight": rule})
    for rank, part in enumerate(load_parts(named(stored, "x"), Layout(4), rules, config)):
        cut = slice(rank * 16, rank * 16 + 16)
        scale = stored[".weight_scale"][1]
        expected = scale[cut] if rule == "column" and scale.size > 1 else scale
        np.testing.assert_array_equal(part["x.weight_scale"], expected)
        assert part["x.input_scale"] == np.float32(3.5)


def test_activation_order_keeps_whole_scales_and_group_numbers() -> None:
    kind = Grouped(4, 32, desc_act=True)
    stored = kind.gptq(64, 128)
    parts = load_parts(named(stored, "x."), Layout(4), parse_rules({"x.weight": "row"}), grouped_config("gptq", kind))
    for rank, part in enumerate(parts):
        assert part["x.scales"].shape == (4, 64)
        assert part["x.qzeros"].shape == (4, 8)
        np.testing.assert_array_equal(part["x.g_idx"], stored["g_idx"][1][rank * 32 : rank * 32 + 32])


def test_plain_groups_keep_their_scales_and_stored_numbers() -> None:
    kind = Grouped(4, 32)
    parts = load_parts(
        named(kind.gptq(64, 128), "x."), Layout(2), parse_rules({"x.weight": "row"}), grouped_config("gptq", kind)
    )
    assert [part["x.scales"].shape for part in parts] == [(2, 64), (2, 64)]
    assert [sorted(set(part["x.g_idx"].tolist())) for part in parts] == [[0, 1], [2, 3]]


def test_fully_sharded_alone_needs_neither_rules_nor_units() -> None:
    stored = named(Grouped(4, 32).gptq(96, 64), "x.")
    for fsdp_size in (2, 3, 5):
        parts = load_parts(stored, Layout(1, fsdp_size), Rules(), ModelConfig())
        for name, (_, array) in stored.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_plain_tensors_are_split_and_cache_scales_replicated() -> None:
    stored: Stored = {
        "l.0.q_proj.weight": ("F16", np.arange(64, dtype=np.float16).reshape(8, 8)),
        "l.0.q_proj.bias": ("F16", np.arange(8, dtype=np.float16)),
        "l.0.k_scale": ("F32", np.ones((), np.float32)),
        "l.0.v_proj.output_scale": ("F32", np.ones(1, np.float32)),
    }
    rules = parse_rules({"l.*.q_proj.*": "column"})
    for method in ({"quant_method": "fp8"}, {"config_groups": {}}):
        for part in load_parts(stored, Layout(2), rules, config_of(method)):
            assert part["l.0.q_proj.weight"].shape == (4, 8)
            assert part["l.0.q_proj.bias"].shape == (4,)
            assert part["l.0.k_scale"].shape == ()


def test_rules_for_stored_tensor_names_apply_as_written() -> None:
    stored = named(Grouped(4, 32).gptq(64, 64), "x.")
    rules = parse_rules({"x.*s": "replicate", "x.g_idx": "replicate", "x.qweight": "row"})
    (first, _) = load_parts(stored, Layout(2), rules, grouped_config("gptq", Grouped(4, 32)))
    assert (first["x.qweight"].shape, first["x.scales"].shape) == ((8, 32), (2, 64))


def test_a_padded_vocabulary() -> None:
    blocks = config_of({"quant_method": "fp8", "weight_block_size": [4, 4]})
    same_as_the_weight(
        fp8_blocks((22, 8), 4),
        "x.weight",
        lambda part: fp8_weight(part, 4),
        Layout(2, vocabulary_multiple=8),
        "vocabulary",
        blocks,
    )
    kind = Grouped(4, 16)
    config = grouped_config("gptq", kind)
    same_as_the_weight(kind.gptq(64, 32), "x.", kind.gptq_weight, Layout(4), "vocabulary", config)
    text = refused(kind.gptq(64, 32), "x.", Layout(2, vocabulary_multiple=96), "vocabulary", config)
    assert text
    assert "would be padded, but it lies along dim 1" in text
