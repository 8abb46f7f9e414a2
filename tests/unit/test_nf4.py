"""NF4 against bitsandbytes itself, bit for bit, where that is installed; and at every border between two values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cluster
from actors.devices import convert
from actors.devices.convert import quantize_nf4
from actors.saving.loaded import _save_rank
from cluster.layouts.region import MeshCut, dtensor_region
from cluster.precision.quantized_tensors import ABSMAX, BLOCK, QUANT_MAP, STATE, VALUES, packed_state
from tests.support import reference_quantized
from tests.support.reference_slices import assert_same

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.fixture
def library() -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, with which NF4 is compared, is not installed")
    import bitsandbytes.functional

    return bitsandbytes.functional


def ours(weight: torch.Tensor, dtype: str, at_once: int = 1 << 15) -> dict[str, torch.Tensor]:
    packed = torch.full((weight.numel() // 2,), 0xEE, dtype=torch.uint8)
    absmax = torch.full((weight.numel() // BLOCK,), -1.0)
    quantize_nf4(weight.reshape(-1), FLOATS[dtype], packed, absmax, at_once)
    state = torch.tensor(list(packed_state(dtype, weight.shape)), dtype=torch.uint8)
    return {"": packed[:, None], ABSMAX: absmax, QUANT_MAP: torch.tensor(VALUES), STATE: state}


def the_librarys(functional: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=False)
    return {"": packed, **{f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()}}


def random_weight(rows: int, columns: int, dtype: torch.dtype, seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * spread
    weight[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    weight[torch.rand(rows, columns, generator=generator) < 0.05] = -0.0
    weight[0, :BLOCK] = 0.0  # a block without any
    return weight.to(dtype)


@given(
    st.sampled_from(sorted(FLOATS)),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([1e-42, 1e-38, 1e-7, 1.0, 1e3]),
    st.integers(0, 1000),
    st.sampled_from([1, 64, 300, 1 << 15]),
)
@settings(max_examples=60, deadline=None)
def test_the_bytes_are_those_of_the_definition(
    dtype: str, rows: int, blocks: int, spread: float, seed: int, at_once: int
) -> None:
    weight = random_weight(rows, blocks * BLOCK, FLOATS[dtype], seed, spread)
    assert_same(ours(weight, dtype, at_once), reference_quantized.nf4(weight))


def test_the_bytes_are_those_of_the_library(library: Any) -> None:
    for seed, spread in enumerate([1e-42, 1e-38, 1e-7, 1e-3, 1.0, 1e3]):
        for dtype in FLOATS:
            weight = random_weight(33, 11 * BLOCK, FLOATS[dtype], seed, spread)
            expected = the_librarys(library, weight)
            assert_same(ours(weight, dtype), expected)
            assert_same(reference_quantized.nf4(weight), expected)


def test_matrices_of_experts_are_the_librarys_too(library: Any) -> None:
    """It takes any number of dimensions, and keeps them in what it says."""
    weight = torch.stack([random_weight(6, 2 * BLOCK, torch.bfloat16, seed, 1.0) for seed in range(3)])
    assert_same(ours(weight, "BF16"), the_librarys(library, weight))


def test_the_library_reads_the_quantized_tensors(library: Any) -> None:
    weight = random_weight(16, 4 * BLOCK, torch.float32, 7, 1.0)
    made = ours(weight, "F32")
    said = {f"weight{suffix}": tensor for suffix, tensor in made.items() if suffix}
    state = library.QuantState.from_dict(said, torch.device("cpu"))
    again = library.dequantize_4bit(made[""], state)
    assert torch.equal(again, reference_quantized.restored_nf4(made))
    assert (again - weight).abs().max() <= 0.16 * weight.abs().max()


@pytest.mark.filterwarnings("ignore:.*")  # what is no number may be warned of
def test_infinities_and_nans_match_the_library(library: Any) -> None:
    weight = random_weight(4, 4 * BLOCK, torch.float32, 3, 1.0)
    weight[0, 3], weight[1, 70], weight[2, 200] = torch.inf, torch.nan, -torch.inf
    assert_same(ours(weight, "F32"), the_librarys(library, weight))


def test_borders_between_values() -> None:
    """Look-up and comparison agree on each border and one float32 step to both sides."""
    middles = convert._middles(torch.device("cpu"))
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    near = torch.cat((middles, middles.nextafter(up), middles.nextafter(down), torch.tensor(VALUES)))
    weight = torch.zeros(2 * BLOCK)
    weight[: len(near)] = near
    weight[BLOCK:] = weight[:BLOCK].flip(0) * 0.37  # the same borders, elsewhere, after a multiplication
    assert_same(ours(weight[None], "F32"), reference_quantized.nf4(weight[None]))
    assert len(middles) == 15
    assert ours(torch.tensor([*middles.tolist(), *[1.0] * 49])[None], "F32")[""][:8, 0].tolist() == [
        *(0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF)
    ]


def test_the_lookup_table_agrees_with_comparisons() -> None:
    """Every number that the rounding to steps distinguishes, and many more."""
    scaled = torch.linspace(-1, 1, 1 << 16)
    middles = convert._middles(torch.device("cpu"))
    assert torch.equal(convert._look_up(scaled), (scaled[:, None] > middles).sum(1).to(torch.uint8))
    steps = convert._step_of(scaled)
    assert (steps.diff() >= 0).all()
    assert (int(steps[0]), int(steps[-1])) == (0, 128)


def test_part_of_a_weight_cannot_be_saved_with_others(tmp_path: Path) -> None:
    """Bytes are packed across the rows of a rank, so those of two ranks make no tensor. A whole weight is saved."""

    class Held(dict[str, torch.Tensor]):
        rank, revision = 0, "r1"

        def __init__(self, ranks: int) -> None:
            region = dtensor_region((8, 64), [MeshCut(0, ranks, 0, 1)])
            super().__init__({"w": torch.zeros(8 * 64 // 2 // ranks, 1, dtype=torch.uint8)})
            self.slices = {"w": SimpleNamespace(region=region, shape=(8, 64), dtype="BF16")}

    options = {"save_timeout_s": 20.0}
    with pytest.raises(cluster.SaveRefused, match=r"rank 0: 'w' is packed as \(128, 1\)"):
        _save_rank(Held(2), str(tmp_path / "m"), "", 1, {}, "r1", options)
    assert not (tmp_path / "m").exists()
    assert _save_rank(Held(1), str(tmp_path / "m"), "", 1, {}, "r1", options).size_bytes > 256
