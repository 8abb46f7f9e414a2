"""Quantized checkpoints of every family, with the family's own rules: a rank's parts are its part of each weight."""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from cluster.layouts.layout import decide_layout
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import QuantizationConfig
from cluster.layouts.rules import region_of
from storage.checkpoints.model_index import Tensor
from tests.support.family_checkpoints import SavedFamily
from tests.support.hf_models import FAMILIES, MOE_FAMILIES
from tests.support.quantized_models import (
    Array,
    Floats,
    Grouped,
    Stored,
    fp8_blocks,
    fp8_weight,
    load_parts,
    named,
    take_region,
)

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.slow,
]

Saved = dict[tuple[str, str], SavedFamily]

UNIT = 8  # of groups and blocks: four ranks can share every dimension of the tiny models in eights
INT4 = Grouped(4, UNIT)
SAID = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": UNIT, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": UNIT},
    "fp8": {"quant_method": "fp8", "weight_block_size": [UNIT, UNIT]},
}
OTHER_LAYOUTS = [Layout(2), Layout(2, pipeline_parallel_size=2)]
EXPERT_LAYOUTS = [Layout(4, expert_parallel_size=2), Layout(2, data_parallel_size=2, expert_parallel_size=4)]
CASES = [
    *((family, Layout(4), method) for family in FAMILIES for method in SAID),
    *((family, layout, "gptq") for family in FAMILIES for layout in OTHER_LAYOUTS),
    *((family, layout, "fp8") for family in MOE_FAMILIES for layout in EXPERT_LAYOUTS),
]


def is_quantized(tensor: Tensor) -> bool:
    module = tensor.name.split(".")[-2] if tensor.name.endswith(".weight") else ""
    tower = any(part in tensor.name for part in ("visual", "vision"))
    return len(tensor.shape) == 2 and not tower and (module.endswith("_proj") or module in ("w1", "w2", "w3"))


@cache
def module(method: str, shape: tuple[int, int], seed: int) -> tuple[Stored, Floats]:
    """Return the stored tensors of a weight of that shape, and the weight that they mean."""
    stored = {"gptq": INT4.gptq, "awq": INT4.awq}[method](*shape, seed) if method != "fp8" else fp8_blocks(shape, UNIT)
    return stored, weight_of(method, {end: array for end, (_, array) in stored.items()})


def weight_of(method: str, part: dict[str, Array]) -> Floats:
    if method == "fp8":
        return fp8_weight(part, UNIT)
    return INT4.gptq_weight(part) if method == "gptq" else INT4.awq_weight(part)


@pytest.mark.parametrize(("family", "layout", "method"), CASES, ids=str)
def test_a_family(family: str, layout: Layout, method: str, saved_families: Saved) -> None:
    saved = saved_families[family, "hub"]
    tensors = [tensor for tensor in saved.index.tensors if math.prod(tensor.shape) < 1 << 16]
    stored: Stored = {}
    weights: dict[str, Floats] = {}
    for number, tensor in enumerate(tensors):
        if is_quantized(tensor):
            parts, weights[tensor.name] = module(method, (tensor.shape[0], tensor.shape[1]), number % 7)
            prefix = tensor.name if method == "fp8" else tensor.name.removesuffix("weight")
            stored |= named(parts, prefix)
        else:
            stored[tensor.name] = ("BF16", np.zeros(tensor.shape, np.uint16))
    assert len(weights) >= 16
    config = saved.config.model_copy(update={"quantization": QuantizationConfig.model_validate(SAID[method])})
    placed = decide_layout(tensors, layout, saved.rules, saved.config)
    held = dict.fromkeys(weights, 0)
    for rank, arrays in enumerate(load_parts(stored, layout, saved.rules, config, chunk_bytes=1 << 16)):
        coords = layout.rank_coords(rank)
        for tensor, place in zip(tensors, placed, strict=True):
            if tensor.name not in weights:
                continue
            prefix = tensor.name if method == "fp8" else tensor.name.removesuffix("weight")
            part = {end: arrays[prefix + end] for end in module(method, (64, 64), 0)[0] if prefix + end in arrays}
            if not part:
                continue
            held[tensor.name] += 1
            found, region = weight_of(method, part), region_of(tensor.shape, place.cut, coords, layout)
            np.testing.assert_array_equal(found, take_region(weights[tensor.name], region), err_msg=tensor.name)
    expected = layout.ranks // layout.pipeline_parallel_size
    for name, count in held.items():
        experts = layout.expert_parallel_size if ".experts." in name else 1
        assert count == expected // experts, name
