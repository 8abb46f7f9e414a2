"""Tensors on a real GPU are saved through pinned slots as those in host memory are. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import cluster
from tests.support.reference_slices import as_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
DEVICE = "cuda"


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Tensors of several types and strides, 70 MB in all."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    large = torch.randn(4096, 4096, generator=generator, device=DEVICE)
    return {
        "bf16": large.to(torch.bfloat16),
        "transposed": large[:1000, :2000].t(),
        "rows": large[::2, :512],
        "scalar": large[0, 0],
        "empty": large[:0],
        "fp8": large[:512].to(torch.float8_e4m3fn),
        "whole numbers": torch.arange(1000, device=DEVICE),
    }


@pytest.mark.parametrize("in_background", [False, True])
def test_a_gpus_tensors_are_saved(weights: dict[str, torch.Tensor], tmp_path: Path, in_background: bool) -> None:
    expected = {name: tensor.cpu().clone() for name, tensor in weights.items()}
    if in_background:
        handle = cluster.asave(weights, tmp_path / "saved")
        for tensor in weights.values():  # training goes on
            tensor.zero_()
        report = handle.result()
    else:
        report = cluster.save(weights, tmp_path / "saved")
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "saved").glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor.contiguous())), name
    assert report.tensors == len(expected)
    assert cluster.verify(tmp_path / "saved").ok
