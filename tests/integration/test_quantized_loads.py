"""Loads that convert, on a real cluster: two layouts share no model, and come to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cluster
from cluster.errors import ConfigError
from cluster.precision.recipes import Precision
from storage.errors import IntegrityError
from tests.support.planned_models import assemble, llama_shapes
from tests.support.ray_clusters import Longshore
from tests.support.reference_quantized import quantized

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows two ranks can share in groups of 128."""
    made = tmp_path_factory.mktemp("llama")
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in llama_shapes(2, 256, 512, 4, 2, 60).items()
    }
    save_file(weights, made / "model.safetensors")
    (made / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}'
    )
    return made


def _pieces(shard: Any) -> list[tuple[Any, Any]]:
    return [
        (shard.slices[name], tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, tensor in shard.items()
    ]


def _expected(folder: Path, scheme: str) -> dict[str, torch.Tensor]:
    """Return what the library makes of each whole matrix."""
    expected = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        made = {"": weight} if "_proj" not in name else quantized(weight, scheme)
        expected |= {f"{name}{suffix}": tensor for suffix, tensor in made.items()}
    return expected


def _check(model: cluster.LoadedModel, expected: dict[str, torch.Tensor]) -> None:
    whole = assemble(piece for pieces in model.call(_pieces) for piece in pieces)
    assert whole.keys() == expected.keys()
    for name, (_, shape, data) in whole.items():
        tensor = expected[name]
        assert shape == tuple(tensor.shape)
        assert data.tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_ranks_hold_the_librarys_quantization_of_whole_tensors(longshore: Longshore, folder: Path) -> None:
    with cluster.load(str(folder), tensor_parallel_size=2, quantization="int4", device="cpu") as two:
        report = two.report
        _check(two, _expected(folder, "int4"))
        # Another precision is another model.
        with cluster.load(str(folder), dtype="float16", device="cpu") as cast:
            assert cast.model_id != two.model_id
            assert {tensor.dtype for tensor in cast.state_dict(0).values()} == {torch.float16}
            assert cast.report.quantization_config is None
    planned = cluster.plan(str(folder), tensor_parallel_size=2, quantization="int4")
    assert [rank.device_bytes for rank in report.ranks] == [rank.device_bytes for rank in planned.ranks]
    assert report.placed_bytes == planned.placed_bytes
    assert report.precision == Precision("auto", "int4")
    assert report.converted_tensors == 2 * 14
    assert 0 < report.peak_staging_bytes <= max(rank.staging_bytes for rank in planned.ranks)
    assert report.quantization_config == planned.quantization_config
    assert report.as_dict()["ranks"][0]["converted_tensors"] == 14


def test_recorded_scales_give_exact_bytes_from_slices_alone(longshore: Longshore, folder: Path, tmp_path: Path) -> None:
    """A file of largest values that was changed ends a load that needs it."""
    published = tmp_path / "published"
    assert cluster.publish(folder, published, amax=True, chunk_bytes=1 << 20).amax
    how: dict[str, Any] = {"tensor_parallel_size": 2, "quantization": "fp8_tensor"}
    with cluster.load(str(published), **how, device="cpu") as model:
        _check(model, _expected(folder, "fp8_tensor"))
        planned = cluster.plan(str(published), **how)
        without = cluster.plan(str(folder), **how)
        assert model.report.placed_bytes == planned.placed_bytes
        assert all(
            now.read_bytes < 0.6 * then.read_bytes for now, then in zip(planned.ranks, without.ranks, strict=True)
        )
    recorded = published / "longshore.amax"
    data = recorded.read_bytes()
    recorded.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="not the published one"):
        cluster.load(str(published), tensor_parallel_size=2, quantization="int8", device="cpu")
    longshore.assert_nothing_left()


def test_a_model_that_has_nothing_to_quantize_is_refused(longshore: Longshore, folder: Path) -> None:
    with pytest.raises(ConfigError, match="applies to no weight"):
        cluster.load(str(folder), quantization="int8", skip_quantization=["**"], device="cpu")
    longshore.assert_nothing_left()
