"""A loaded model saves itself from its ranks: the same bytes whatever the layout, quantized ones too."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cluster
from tests.support.gloo_ranks import run_ranks
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


@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, {"fsdp_size": 2, "pipeline_parallel_size": 2}, {"data_parallel_size": 2}],
    ids=lambda layout: "+".join(layout),
)
def test_any_layout_saves_the_bytes_of_its_source(folder: Path, tmp_path: Path, layout: dict[str, int]) -> None:
    uri = tmp_path / "m"
    ranks = math.prod(layout.values())
    (first, second), *_ = run_ranks(
        ranks, "tests.support.saving_ranks:save_shards", str(folder), str(uri), layout=layout
    )  # fmt: skip
    expected = load_file(folder / "model.safetensors")
    found = {name: t for file in uri.glob(f"model-{second['save_id']}-*") for name, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert cluster.verify(str(uri), progress=False).ok
    assert first["written_bytes"] == first["size_bytes"], "replicas are written once"
    assert second["copied_bytes"] == second["size_bytes"]


def test_a_quantized_model_saves_what_it_holds(longshore: Longshore, folder: Path, tmp_path: Path) -> None:
    with cluster.load(str(folder), tensor_parallel_size=2, quantization="int4", device="cpu") as model:
        model.save(tmp_path / "m", extra_files={"note.txt": b"four bits"})
        config = model.report.quantization_config
    expected: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        made = {"": weight} if "_proj" not in name else quantized(weight, "int4")
        expected |= {f"{name}{suffix}": tensor for suffix, tensor in made.items()}
    assert cluster.verify(tmp_path / "m", progress=False).ok
    found = {name: t for file in (tmp_path / "m").glob("model-*") for name, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8)), name
    assert json.loads((tmp_path / "m/config.json").read_text())["quantization_config"] == config
    assert "dtype" not in json.loads((tmp_path / "m/config.json").read_text())
    assert (tmp_path / "m/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "m/note.txt").read_bytes() == b"four bits"
