"""Conversion, bit for bit against torch's casts and compressed-tensors' quantization of whole tensors."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.devices import convert as convert_module
from actors.devices.convert import convert, torch_dtype
from cluster.layouts.region import Region, whole
from cluster.planning.plan import StagedTensor, TensorSlice
from cluster.precision.recipes import SCHEMES, Recipe, outputs_of, read_region
from storage.checkpoints.safetensors_header import DTYPE_BITS
from tests.support.reference_quantized import quantized, restored
from tests.support.reference_slices import assert_same

STATE = ".quant_state.bitsandbytes__nf4"
NF4_OF_A_SLICE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def held(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the part of a tensor that a region holds, padding included."""
    for dim, ranges in enumerate(region.ranges):
        tensor = torch.cat([tensor.narrow(dim, start, end - start) for start, end in ranges], dim)
    padding = torch.zeros(region.padding, *tensor.shape[1:], dtype=tensor.dtype)
    return torch.cat([tensor, padding]) if region.padding else tensor


def converted(weight: torch.Tensor, recipe: Recipe, region: Region, source_dtype: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of one rank, by suffix."""
    shape = tuple(weight.shape)
    reads = read_region(recipe, shape, region)
    source = held(weight, reads).contiguous()
    dtype = source_dtype or NAMES[weight.dtype]
    piece = TensorSlice("w", dtype, shape, reads, 0, 0, 9, 0, source.nbytes, source.nbytes)
    outputs = outputs_of(recipe, dtype, shape, region)
    slices = [TensorSlice("w", o.dtype, o.shape, o.region, 0, 0, 0, 0, o.size_bytes, 0, "w", o.form) for o in outputs]
    made = [torch.full((o.size_bytes,), 0xEE, dtype=torch.uint8) for o in outputs]
    convert(StagedTensor(piece, recipe, region, 0, len(slices)), source.reshape(-1).view(torch.uint8), slices, made)
    return {
        o.suffix: data.view(torch_dtype(o.dtype, ())[0]).reshape(piece.sizes)
        for o, piece, data in zip(outputs, slices, made, strict=True)
    }


def random_weight(rows: int, columns: int, dtype: torch.dtype, seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * spread
    weight[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    weight[torch.rand(rows, columns, generator=generator) < 0.05] = -0.0
    if rows > 2:
        weight[1] = 0.0  # a row whose scale would be nothing
        weight[2] *= 1e-6
    return weight.to(dtype)


@given(
    st.sampled_from(sorted(SCHEMES)),
    st.sampled_from(FLOATS),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([1e-7, 1e-3, 1.0, 1e3]),
    st.integers(0, 1000),
    st.sampled_from([64, 300, 1 << 19]),
)
@settings(max_examples=80, deadline=None)
def test_whole_tensors_equal_the_librarys_bit_for_bit(
    scheme: str, dtype: torch.dtype, rows: int, groups: int, spread: float, seed: int, block: int
) -> None:
    columns = groups * {"int4": 128, "nf4": 64}.get(scheme, 37) - (scheme not in ("int4", "nf4"))
    weight = random_weight(rows, columns, dtype, seed, spread)
    before = convert_module.BLOCK_ELEMENTS
    convert_module.BLOCK_ELEMENTS = block
    try:
        found = converted(weight, Recipe(NAMES[dtype], scheme), whole((rows, columns)))
    finally:
        convert_module.BLOCK_ELEMENTS = before
    assert_same(found, quantized(weight, scheme))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize(("stored", "computed"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_a_cast_comes_before_quantizing(scheme: str, stored: torch.dtype, computed: torch.dtype) -> None:
    weight = random_weight(5, 256, torch.float32, 3).to(stored)
    found = converted(weight, Recipe(NAMES[computed], scheme), whole((5, 256)))
    assert_same(found, quantized(weight.to(computed), scheme))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_the_library_restores_the_weight(scheme: str) -> None:
    weight = random_weight(16, 256, torch.float32, 5)
    again = restored(converted(weight, Recipe("F32", scheme), whole((16, 256))), scheme)
    step = {"fp8": 0.07, "fp8_tensor": 0.07, "int8": 0.005, "int4": 0.075, "nf4": 0.16}[scheme]
    assert (again - weight).abs().max() <= step * weight.abs().max()


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_slices_equal_slices_of_the_converted_whole(scheme: str) -> None:
    """A rank's rows and columns of a fused tensor, at the same places as in the library's result."""
    weight = random_weight(12, 512, torch.bfloat16, 8)
    expected = quantized(weight, scheme)
    region = Region((((1, 3), (7, 9), (11, 12)), ((128, 256), (384, 512))))
    recipe = Recipe("BF16", scheme)
    found = converted(weight, recipe, region)
    for output in outputs_of(recipe, "BF16", (12, 512), region):
        if output.suffix == STATE:  # contains the shape of the slice
            assert json.loads(bytes(found[STATE].tolist())) == {**NF4_OF_A_SLICE, "shape": [5, 256]}
            continue
        whole_one = expected[output.suffix].reshape(output.shape)  # nf4 is flat
        part = held(
            whole_one.view(torch.uint8 if output.dtype == "F8_E4M3" else found[output.suffix].dtype), output.region
        )
        assert torch.equal(found[output.suffix].view(part.dtype).reshape(part.shape), part), output.suffix


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_each_expert_is_quantized_as_its_own_matrix(scheme: str) -> None:
    weight = torch.stack([random_weight(6, 256, torch.bfloat16, seed, 10.0**seed) for seed in range(3)])
    recipe = Recipe("BF16", scheme)
    found = converted(weight, recipe, Region((((1, 3),), ((0, 6),), ((0, 256),))))
    for place, expert in enumerate((1, 2)):
        for suffix, tensor in quantized(weight[expert], scheme).items():
            if suffix == "_shape":
                assert found[suffix].tolist() == [3, 6, 256]
            elif suffix == STATE:
                assert json.loads(bytes(found[STATE].tolist())) == {**NF4_OF_A_SLICE, "shape": [2, 6, 256]}
            elif suffix == ".quant_map":
                assert torch.equal(found[suffix], tensor)
            else:
                mine = found[suffix].reshape(2, *tensor.shape)[place]
                assert torch.equal(mine.view(torch.uint8), tensor.view(torch.uint8)), suffix


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_padding_equals_converted_rows_of_zeros(scheme: str) -> None:
    weight = random_weight(5, 128, torch.bfloat16, 2)
    found = converted(weight, Recipe("BF16", scheme), Region((((3, 5),), ((0, 128),)), padding=2))
    padded = quantized(torch.cat([weight, torch.zeros(2, 128, dtype=torch.bfloat16)]), scheme)
    for suffix, tensor in padded.items():
        rows = tensor[3:] if tensor.ndim == 2 else tensor
        if suffix == "_shape":
            rows = torch.tensor([5, 128])
        if scheme == "nf4" and suffix in ("", ".absmax"):
            rows = tensor.reshape(7, -1)[3:].reshape(found[suffix].shape)
        if suffix == STATE:
            assert json.loads(bytes(found[STATE].tolist())) == {**NF4_OF_A_SLICE, "shape": [4, 128]}
            continue
        assert torch.equal(found[suffix].view(torch.uint8), rows.view(torch.uint8)), suffix


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize(
    "stored", [*FLOATS, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2], ids=lambda dtype: str(dtype)[6:]
)
def test_casts_equal_those_of_torch(stored: torch.dtype, target: torch.dtype) -> None:
    values = torch.tensor(
        [0.0, -0.0, 1.0, -2.5, 1e-8, 3.14159, 65504.0, 1e6, float("inf"), float("-inf"), float("nan")]
    )
    weight = values.to(stored).reshape(1, -1).repeat(3, 1)
    name = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}.get(stored) or NAMES[stored]
    found = converted(weight, Recipe(NAMES[target]), whole(tuple(weight.shape)), name)
    expected = weight.to(target)
    assert torch.equal(found[""].view(torch.uint8), expected.view(torch.uint8))


def test_empty_tensors_stay_empty() -> None:
    for scheme in ("", "fp8", "int8", "int4", "nf4"):
        empty = Region((((4, 4),), ((0, 128),)))
        found = converted(torch.ones(4, 128), Recipe("BF16", scheme), empty)
        constant = ("_shape", ".quant_map", STATE)
        assert all(tensor.numel() == 0 or suffix in constant for suffix, tensor in found.items())
    found = converted(torch.ones(4, 128), Recipe("F32", "fp8_tensor"), Region((((4, 4),), ((0, 128),))))
    assert found[""].shape == (0, 128)
    assert found["_scale"].tolist() == [
        pytest.approx(1 / 448)
    ]  # a rank without rows has the matrix's scale all the same


def test_sizes_equal_those_of_the_plan() -> None:
    for scheme in SCHEMES:
        for output in outputs_of(Recipe("BF16", scheme), "BF16", (6, 256), whole((6, 256))):
            assert output.size_bytes * 8 == torch.Size(output.shape).numel() * DTYPE_BITS[output.dtype]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_rows_with_infinities_and_nans_equal_the_librarys(scheme: str, dtype: torch.dtype) -> None:
    """Their numbers and scales equal the library's."""
    weight = random_weight(6, 256, dtype, 5)
    for row, *values in ((0, "nan"), (1, "inf"), (2, "-inf"), (3, "inf", "nan"), (4, "inf", "-inf")):
        weight[row, 7 : 7 + len(values)] = torch.tensor([float(value) for value in values])
    expected = quantized(weight, scheme)
    found = converted(weight, Recipe(NAMES[dtype], scheme), whole(tuple(weight.shape)))
    assert torch.equal(found["_packed"], expected["_packed"])
    assert torch.equal(found["_scale"].isnan(), expected["_scale"].isnan())
    assert torch.equal(found["_scale"].nan_to_num(), expected["_scale"].nan_to_num())
