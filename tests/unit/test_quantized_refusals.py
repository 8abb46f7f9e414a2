"""Quantized tensors that cannot be cut: one error each; and whatever a bucket holds, no other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import LayoutError
from cluster.layouts.layout import decide_layout
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig
from cluster.layouts.rules import Rules, parse_rules, region_of
from storage.checkpoints.model_index import Tensor
from tests.support.quantized_models import config_of


def tensor(name: str, dtype: str, shape: tuple[int, ...], element_bytes: int) -> Tensor:
    return Tensor(name, dtype, shape, 0, 0, math.prod(shape) * element_bytes)


def refuse(tensors: list[Tensor], config: ModelConfig | None, ways: int = 4, rule: str = "row") -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        decide_layout(tensors, Layout(ways), parse_rules({"*.weight": rule, "*.*.weight": rule}), config)
    return caught.value


FP8 = config_of({"quant_method": "fp8", "weight_block_size": [128, 128]})
GPTQ = config_of({"quant_method": "gptq", "bits": 4, "group_size": 128})


def test_a_cut_inside_blocks_is_refused_with_the_sizes_that_work() -> None:
    error = refuse(
        [tensor("a.weight", "F8_E4M3", (64, 1536), 1), tensor("a.weight_scale_inv", "F32", (1, 12), 4)], FP8, ways=8
    )
    assert "1 tensor cannot be cut: 'a.weight_scale_inv': parts of 192 of dim 1 of its weight (64, 1536)" in str(error)
    assert "do not fall on blocks of 128" in str(error)
    assert "tensor_parallel_size can be 6, 4, 12, 3, 2 or 1" in str(error)


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        (
            [tensor("a.weight", "F8_E4M3", (256, 256), 1)],
            FP8,
            "'a.weight': it is quantized (F8_E4M3), but has no scale tensor",
        ),
        ([tensor("a.qweight", "I32", (64, 256), 4)], GPTQ, "'a.qweight': its module has no scales and no qzeros"),
        (
            [tensor("a.weight_packed", "I32", (64, 32), 4)],
            config_of({"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 128}}}}),
            "'a.weight_packed': it is quantized (I32), but has no scale tensor",
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
        ([tensor("a.weight_packed", "I32", (64, 64), 4)], None, "they look quantized"),
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


@pytest.mark.slow
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
def test_any_stored_tensors_are_split_or_refused(
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
