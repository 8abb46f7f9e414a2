"""Checkpoints of compressed-tensors are cut so that the library restores each rank's part of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cluster.errors import LayoutError
from cluster.layouts.layout import decide_layout
from cluster.layouts.mesh import Layout
from cluster.layouts.model_config import ModelConfig, QuantizationConfig
from cluster.layouts.rules import parse_rules
from storage.checkpoints.model_index import Tensor
from tests.support.quantized_models import Array, Stored, ends_of, load_parts, named, plain_region, take_region

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

_TORCH = {"I32": "int32", "I64": "int64", "I8": "int8", "U8": "uint8", "F8_E4M3": "float8_e4m3fn"}
_TORCH |= {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES = {getattr(torch, name): dtype for dtype, name in _TORCH.items()}

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 groups": ("pack-quantized", INT4),
    "int4 groups and zero points": ("pack-quantized", INT4 | {"symmetric": False}),
    "int4 channels": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int8 groups, packed": ("pack-quantized", INT4 | {"num_bits": 8}),
    "int3 groups": ("pack-quantized", INT4 | {"num_bits": 3}),
    "int3 groups and zero points": ("pack-quantized", INT4 | {"num_bits": 3, "symmetric": False}),
    "int8 channels": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 channels and zero points": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int8 tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "fp8 channels": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    ),
    "fp4 groups": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}


def compressor(form: str) -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(form)


def library_scheme(weights: Mapping[str, Any]) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=dict(weights))


def scale_of(weight: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return scales and zero points as an observer of the largest value finds them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = library_scheme(weights).weights
    outputs, inputs = weight.shape
    strategy = weights["strategy"]
    if strategy == "block":
        rows, columns = weights["block_structure"]
        tiles = weight.reshape(outputs // rows, rows, inputs // columns, columns)
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    elif strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    else:
        tiles = weight.reshape(outputs, -1, weights.get("group_size") or inputs)
        low, high = tiles.amin(2), tiles.amax(2)
    if strategy == "tensor_group":
        world = (448 * 6 / weight.abs().max()).reshape(1).float()
        scale, _ = calculate_qparams(low, high, scheme, global_scale=world)
        return {"weight_scale": scale, "weight_global_scale": world}
    scale, zero_point = calculate_qparams(low, high, scheme)
    return {"weight_scale": scale, "weight_zero_point": zero_point}


def compress(form: str, weights: Mapping[str, Any], outputs: int, inputs: int) -> dict[str, Any]:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(7))
    state = {"weight": weight, **scale_of(weight, weights)}
    compressed: dict[str, Any] = compressor(form).compress(state, library_scheme(weights))
    return compressed


def decompress(form: str, weights: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    return compressor(form).decompress(dict(state), library_scheme(weights))["weight"]


def to_stored(state: Mapping[str, Any]) -> Stored:
    stored: Stored = {}
    for end, tensor in state.items():
        tensor = tensor.detach()
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
        dtype = _NAMES[tensor.dtype]
        numpy_dtype = {"F8_E4M3": "uint8", "BF16": "uint16"}.get(dtype, _TORCH[dtype])
        stored[end] = (dtype, raw.view(numpy_dtype).reshape(tuple(tensor.shape)))
    return stored


def to_state(part: Mapping[str, Array], like: Stored) -> dict[str, Any]:
    return {
        end: torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).copy().reshape(-1))
        .view(getattr(torch, _TORCH[like[end][0]]))
        .reshape(array.shape)
        for end, array in part.items()
    }


def config_of(form: str, weights: Mapping[str, Any], **fields: object) -> ModelConfig:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}
    said = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return ModelConfig(quantization=QuantizationConfig.model_validate(said), **fields)


@pytest.mark.parametrize("rule", ["column", "row", "gate_up", "kv_heads"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_library_restores_a_ranks_slice_of_the_weight(name: str, rule: str) -> None:
    form, weights = SCHEMES[name]
    state = compress(form, weights, 256, 128)
    whole = decompress(form, weights, state).float().numpy()
    assert whole.shape == (256, 128)
    assert len(np.unique(whole)) > 10
    stored = to_stored(state)
    config = config_of(form, weights, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    rules = parse_rules({"x.weight": rule})
    for ways in (1, 2, 4):
        layout = Layout(ways)
        for rank, part in enumerate(load_parts(named(stored, "x."), layout, rules, config)):
            region = plain_region("x.weight", whole.shape, layout.rank_coords(rank), layout, rules, config)
            mine = to_state(ends_of(part, "x."), stored)
            if "weight_shape" in mine:
                assert mine["weight_shape"].tolist() == [256, 128]  # the shape of the whole weight, on every rank
                mine["weight_shape"] = torch.tensor(region.sizes)
            found = decompress(form, weights, mine).float().numpy()
            np.testing.assert_array_equal(found, take_region(whole, region))


@pytest.mark.parametrize("name", ["int4 groups and zero points", "int3 groups and zero points", "int8 channels"])
def test_a_padded_vocabulary_is_cut_in_packed_words(name: str) -> None:
    form, weights = SCHEMES[name]
    state = compress(form, weights, 40, 64)  # the last packed words hold less than fits into them
    whole = decompress(form, weights, state).float().numpy()
    stored, config = to_stored(state), config_of(form, weights)
    layout, rules = Layout(2, vocabulary_multiple=64), parse_rules({"x.weight": "vocabulary"})
    for rank, part in enumerate(load_parts(named(stored, "x."), layout, rules, config)):
        mine = to_state(ends_of(part, "x."), stored)
        if "weight_shape" in mine:
            mine["weight_shape"] = torch.tensor([32, 64])
        found = decompress(form, weights, mine).float().numpy()
        expected = np.concatenate([whole, np.zeros((24, 64), np.float32)])[rank * 32 : rank * 32 + 32]
        np.testing.assert_array_equal(found, expected)


def test_the_group_size_that_divides_the_row_is_chosen() -> None:
    groups = {str(size): {"weights": {"num_bits": 8, "strategy": "group", "group_size": size}} for size in (96, 64)}
    config = ModelConfig(quantization=QuantizationConfig.model_validate({"config_groups": groups}))
    stored: Stored = {
        "x.weight": ("I8", np.zeros((8, 128), np.int8)),
        "x.weight_scale": ("F32", np.arange(16, dtype=np.float32).reshape(8, 2)),
    }
    for rank, part in enumerate(load_parts(stored, Layout(2), parse_rules({"x.weight": "row"}), config)):
        np.testing.assert_array_equal(part["x.weight_scale"], stored["x.weight_scale"][1][:, rank : rank + 1])


def test_groups_in_any_order_keep_their_scales_whole() -> None:
    state = compress("pack-quantized", INT4, 64, 128)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    stored = to_stored(state | {"weight_g_idx": (order // 32).to(torch.int32)})
    parts = load_parts(
        named(stored, "x."), Layout(4), parse_rules({"x.weight": "row"}), config_of("pack-quantized", INT4)
    )
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part["x.weight_scale"], stored["weight_scale"][1])
        cut = slice(rank * 32, rank * 32 + 32)
        np.testing.assert_array_equal(part["x.weight_g_idx"], stored["weight_g_idx"][1][cut])
        np.testing.assert_array_equal(part["x.weight_packed"], stored["weight_packed"][1][:, rank * 4 : rank * 4 + 4])


@pytest.mark.parametrize("zero_points", [False, True])
def test_stacked_experts_are_packed_one_by_one(zero_points: bool) -> None:
    form, weights = SCHEMES["int4 groups and zero points" if zero_points else "int4 groups"]
    one = [compress(form, weights, 64, 128) for _ in range(4)]
    state = {end: torch.stack([each[end] for each in one]) for end in one[0] if end != "weight_shape"}
    stored = to_stored(state)
    layout = Layout(4, expert_parallel_size=2)
    whole = decompress(form, weights, one[0]).numpy()
    for rule, dim in (("experts_column", 0), ("experts_row", 1)):
        rules = parse_rules({"x.weight": rule})
        for rank, part in enumerate(load_parts(named(stored, "x."), layout, rules, config_of(form, weights))):
            half = [slice(None), slice(None)]
            size = whole.shape[dim] // 2
            half[dim] = slice(rank % 2 * size, rank % 2 * size + size)
            assert all(len(array) == 2 for array in part.values())
            for expert in range(2):
                mine = to_state({end: array[expert] for end, array in ends_of(part, "x.").items()}, stored)
                mine["weight_shape"] = torch.tensor(whole[tuple(half)].shape)
                np.testing.assert_array_equal(decompress(form, weights, mine).numpy(), whole[tuple(half)])


def packed(inputs: int, bits: int, scale: tuple[int, ...] | None, g_idx: int = 0) -> list[Tensor]:
    words = -(-inputs * bits // 32)
    tensors = [Tensor("x.weight_packed", "I32", (64, words), 0, 0, 256 * words)]
    if scale is not None:
        tensors.append(Tensor("x.weight_scale", "F16", scale, 0, 0, 2 * int(np.prod(scale))))
    if g_idx:
        tensors.append(Tensor("x.weight_g_idx", "I32", (g_idx,), 0, 0, 4 * g_idx))
    return tensors


FOUR_OR_EIGHT = ModelConfig(
    quantization=QuantizationConfig.model_validate(
        {
            "config_groups": {
                "small": {"weights": {"num_bits": 4, "strategy": "channel"}},
                "large": {"weights": {"num_bits": 8, "strategy": "channel"}},
                "grouped": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}},
                "activations only": {"weights": None},
            }
        }
    )
)


@pytest.mark.parametrize(
    ("tensors", "ways", "says"),
    [
        (packed(256, 4, (64, 2)), 4, "'x.weight_scale': parts of 64 of dim 1 of its weight (64, 256) do not fall on"),
        (packed(256, 4, (64, 2)), 3, "dim 1 of size 256 is not divisible by tensor_parallel_size=3"),
        (packed(256, 4, (64, 1)), 2, "do not determine the bits of its values"),
        (packed(256, 4, (64, 3)), 2, "fits none of the config_groups in config.json"),
        (packed(256, 4, (64, 2), g_idx=255), 2, "dim 1 of size 255 is not divisible by tensor_parallel_size=2"),
    ],
)
def test_unsupported_checkpoints_are_refused(tensors: list[Tensor], ways: int, says: str) -> None:
    with pytest.raises(LayoutError) as caught:
        decide_layout(tensors, Layout(ways), parse_rules({"x.weight": "row"}), FOUR_OR_EIGHT)
    assert says in str(caught.value)
