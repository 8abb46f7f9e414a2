"""Tensors of quantised modules are cut where their weight is: a rank's parts are that part of the weight."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import LayoutError
from cluster.layout import decide_layout
from cluster.layout_rules import Rules, parse_rules
from cluster.mesh import Layout
from cluster.model_config import ModelConfig
from cluster.quantization_config import QuantizationConfig
from cluster.tensor_cut import region_of
from storage.model_index import Tensor
from tests.support.quantized_models import (
    Array,
    Floats,
    Grouped,
    Stored,
    ends_of,
    fp8_blocks,
    fp8_weight,
    load_parts,
    named,
    plain_region,
    take_region,
)

Weight = Callable[[Mapping[str, Array]], Floats]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def config_of(quantization: Mapping[str, object], **fields: object) -> ModelConfig:
    return ModelConfig(quantization=QuantizationConfig.model_validate(quantization), **fields)


def grouped_config(method: str, kind: Grouped, **fields: object) -> ModelConfig:
    said = {"quant_method": method, "bits": kind.bits, "group_size": kind.group or -1, "desc_act": kind.desc_act}
    return config_of(said, **fields)


def same_as_the_weight(
    stored: Stored, prefix: str, weight_of: Weight, layout: Layout, rule: str, config: ModelConfig
) -> None:
    """Each rank's part, dequantised, is its part of the dequantised weight, bit for bit."""
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


def test_a_head_that_all_ranks_share_needs_no_whole_blocks_unless_something_follows() -> None:
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


def test_activation_order_keeps_the_scales_whole_and_counts_groups_of_the_whole_weight() -> None:
    kind = Grouped(4, 32, desc_act=True)
    stored = kind.gptq(64, 128)
    parts = load_parts(named(stored, "x."), Layout(4), parse_rules({"x.weight": "row"}), grouped_config("gptq", kind))
    for rank, part in enumerate(parts):
        assert part["x.scales"].shape == (4, 64)
        assert part["x.qzeros"].shape == (4, 8)
        np.testing.assert_array_equal(part["x.g_idx"], stored["g_idx"][1][rank * 32 : rank * 32 + 32])


def test_a_rank_with_plain_groups_has_their_scales_and_the_numbers_as_they_are_stored() -> None:
    kind = Grouped(4, 32)
    parts = load_parts(
        named(kind.gptq(64, 128), "x."), Layout(2), parse_rules({"x.weight": "row"}), grouped_config("gptq", kind)
    )
    assert [part["x.scales"].shape for part in parts] == [(2, 64), (2, 64)]
    assert [sorted(set(part["x.g_idx"].tolist())) for part in parts] == [[0, 1], [2, 3]]


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


def test_fully_sharded_alone_needs_neither_rules_nor_units() -> None:
    stored = named(Grouped(4, 32).gptq(96, 64), "x.")
    for fsdp_size in (2, 3, 5):
        parts = load_parts(stored, Layout(1, fsdp_size), Rules(), ModelConfig())
        for name, (_, array) in stored.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_what_is_not_quantised_is_cut_as_ever_and_scales_of_caches_are_copied() -> None:
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


def test_rules_that_name_a_tensor_and_not_its_weight_are_taken_as_they_are() -> None:
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


def tensor(name: str, dtype: str, shape: tuple[int, ...], element_bytes: int) -> Tensor:
    return Tensor(name, dtype, shape, 0, 0, math.prod(shape) * element_bytes)


def refuse(tensors: list[Tensor], config: ModelConfig | None, ways: int = 4, rule: str = "row") -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        decide_layout(tensors, Layout(ways), parse_rules({"*.weight": rule, "*.*.weight": rule}), config)
    return caught.value


FP8 = config_of({"quant_method": "fp8", "weight_block_size": [128, 128]})
GPTQ = config_of({"quant_method": "gptq", "bits": 4, "group_size": 128})


def test_a_cut_that_is_not_on_blocks_says_so_and_which_sizes_do() -> None:
    error = refuse(
        [tensor("a.weight", "F8_E4M3", (64, 1536), 1), tensor("a.weight_scale_inv", "F32", (1, 12), 4)], FP8, ways=8
    )
    assert "1 tensors cannot be cut: 'a.weight_scale_inv': parts of 192 of dim 1 of its weight (64, 1536)" in str(error)
    assert "do not fall on blocks of 128" in str(error)
    assert "these tensors can be cut with tensor_parallel_size=1 or 2 or 4" in str(error)


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        (
            [tensor("a.weight", "F8_E4M3", (256, 256), 1)],
            FP8,
            "'a.weight': it is quantised (F8_E4M3), but there is no scale next to it",
        ),
        ([tensor("a.qweight", "I32", (64, 256), 4)], GPTQ, "'a.qweight': next to it there is no scales and no qzeros"),
        (
            [tensor("a.weight_packed", "I32", (64, 32), 4)],
            config_of({"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 128}}}}),
            "'a.weight_packed': it is quantised (I32), but there is no scale next to it",
        ),
        (
            [tensor("a.weight", "F8_E4M3", (256, 256), 1), tensor("a.weight_scale_inv", "F32", (3, 2), 4)],
            FP8,
            "'a.weight_scale_inv': shape (3, 2) does not fit its weight, (256, 256)",
        ),
        (
            [
                tensor("a.qweight", "I32", (64, 256), 4),
                tensor("a.qzeros", "I32", (4, 32), 4),
                tensor("a.scales", "F16", (5, 256), 2),
            ],
            GPTQ,
            "'a.qweight': the shapes of its module are not those of GPTQ",
        ),
        (
            [tensor("a.W_q", "U8", (64, 64), 1)],
            config_of({"quant_method": "hqq"}),
            "the quant_method in config.json is 'hqq', which tensor parallelism cannot cut (it can: gptq, awq, fp8,",
        ),
        (
            [tensor("a.qweight", "I32", (64, 64), 4)],
            config_of({"quant_method": "awq", "version": "GEMV"}),
            "the awq format in config.json is 'GEMV'",
        ),
        ([tensor("a.qweight", "I32", (64, 64), 4)], ModelConfig(), "config.json has no quantization_config"),
        ([tensor("a.weight_packed", "I32", (64, 64), 4)], None, "they look quantised"),
    ],
)
def test_refusals(tensors: list[Tensor], config: ModelConfig | None, says: str) -> None:
    error = refuse(tensors, config)
    assert says in str(error)
    assert str(error).count("'a.") == 1  # one tensor is named, not all of its module
    assert "fsdp_size and pipeline_parallel_size need no rules" in error.hint


def test_a_rank_of_one_needs_no_scale() -> None:
    assert decide_layout([tensor("a.weight", "F8_E4M3", (256, 256), 1)], Layout(1, 4), Rules(), FP8)


_ENDS = ["weight", "qweight", "qzeros", "scales", "g_idx", "input_scale", "k_scale"]
_ENDS += [f"weight_{end}" for end in ("packed", "scale", "scale_inv", "zero_point", "shape", "g_idx", "global_scale")]
_METHODS: list[dict[str, object]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 4},
    {"quant_method": "gptq", "desc_act": True, "bits": 3},
    {"quant_method": "awq", "group_size": 2, "zero_point": False},
    {"quant_method": "fp8", "weight_block_size": [2, 4]},
    {"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 4}}, "h": {"weights": {"num_bits": 8}}}},
    {"config_groups": {"g": {"weights": {"num_bits": 3, "block_structure": [2, 2]}}}},
]


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(_ENDS),
        st.tuples(
            st.lists(st.integers(0, 9) | st.sampled_from([16, 32]), max_size=4), st.sampled_from(["I8", "F16", "I32"])
        ),
        max_size=6,
    ),
    st.sampled_from(_METHODS),
    st.sampled_from(["column", "row", "vocabulary", "gate_up", "experts_column", "experts_row", "replicate"]),
    st.sampled_from([Layout(2), Layout(4, vocabulary_multiple=6), Layout(4, 2, 1, 1, 2)]),
)
def test_whatever_is_in_a_bucket_is_cut_or_refused(
    found: dict[str, tuple[list[int], str]], method: dict[str, object], rule: str, layout: Layout
) -> None:
    sizes = {"I8": 1, "F16": 2, "I32": 4}
    tensors = [tensor(f"x.{end}", dtype, tuple(shape), sizes[dtype]) for end, (shape, dtype) in found.items()]
    try:
        placed = decide_layout(tensors, layout, parse_rules({"x.weight": rule}), config_of(method))
    except LayoutError:
        return
    for one, place in zip(tensors, placed, strict=True):
        for rank in range(layout.ranks):
            region = region_of(one.shape, place.cut, layout.rank_coords(rank), layout)
            assert len(region.sizes) == len(one.shape)
            for ranges, size in zip(region.ranges, one.shape, strict=True):
                assert all(0 <= start <= end <= size for start, end in ranges)
