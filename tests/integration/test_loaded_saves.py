"""A loaded model saves itself from its ranks: the same bytes whatever the layout, quantized ones too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cluster
from cluster.errors import SaveRefused
from tests.support.planned_models import llama_shapes
from tests.support.ray_clusters import Longshore
from tests.support.reference_quantized import quantized

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows two ranks can share in groups of 128, and a tokenizer."""
    made = tmp_path_factory.mktemp("llama")
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in llama_shapes(2, 256, 512, 4, 2, 61).items()
    }
    save_file(weights, made / "model.safetensors")
    (made / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}'
    )
    (made / "tokenizer.json").write_text("{}")
    return made


def saved(uri: Path) -> dict[str, torch.Tensor]:
    assert cluster.verify(str(uri), progress=False).ok
    return {name: t for file in uri.glob("model-*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, {"fsdp_size": 2, "pipeline_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=lambda layout: "+".join(layout),
)
def test_any_layout_saves_the_bytes_of_its_source(
    longshore: Longshore, folder: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    with cluster.load(str(folder), **layout, device="cpu") as model:
        report = model.save(tmp_path / "m")
        again = model.save(tmp_path / "m")
    expected = load_file(folder / "model.safetensors")
    found = saved(tmp_path / "m")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert report.written_bytes == report.size_bytes, "replicas are written once"
    assert again.copied_bytes == again.size_bytes
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "m" / name).read_text()) == json.loads((folder / name).read_text())


def test_a_quantized_model_saves_what_it_holds(longshore: Longshore, folder: Path, tmp_path: Path) -> None:
    with cluster.load(str(folder), tensor_parallel_size=2, quantization="int4", device="cpu") as model:
        model.save(tmp_path / "m", extra_files={"note.txt": b"four bits"})
        config = model.report.quantization_config
    expected: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        made = {"": weight} if "_proj" not in name else quantized(weight, "int4")
        expected |= {f"{name}{suffix}": tensor for suffix, tensor in made.items()}
    found = saved(tmp_path / "m")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8)), name
    assert json.loads((tmp_path / "m/config.json").read_text())["quantization_config"] == config
    assert (tmp_path / "m/note.txt").read_bytes() == b"four bits"


def test_numbers_packed_over_ranks_are_refused(longshore: Longshore, folder: Path, tmp_path: Path) -> None:
    with (
        cluster.load(str(folder), tensor_parallel_size=2, quantization="nf4", device="cpu") as model,
        pytest.raises(SaveRefused, match="cannot be put together"),
    ):
        model.save(tmp_path / "m")
    assert not (tmp_path / "m" / "longshore.manifest.json").exists()
