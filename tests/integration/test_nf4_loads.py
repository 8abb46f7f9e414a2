"""NF4 on a real cluster: each rank's tensors stand for its own slice, and are those of the whole weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cluster
from tests.support.planned_models import llama_shapes
from tests.support.ray_clusters import Longshore
from tests.support.reference_quantized import nf4, restored_nf4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows two ranks can share in blocks of 64."""
    made = tmp_path_factory.mktemp("llama")
    generator = torch.Generator().manual_seed(3)
    shapes = llama_shapes(1, 128, 256, 4, 2, 60)
    weights = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, made / "model.safetensors")
    (made / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}'
    )
    return made


def _arrays(shard: Any) -> dict[str, Any]:
    return {
        name: tensor.numpy() if tensor.dtype is not torch.bfloat16 else tensor.float().numpy()
        for name, tensor in shard.items()
    }


def test_ranks_hold_nf4_of_their_slices(longshore: Longshore, folder: Path) -> None:
    with cluster.load(str(folder), tensor_parallel_size=2, quantization="nf4", device="cpu") as model:
        ranks = model.call(_arrays)
        report = model.report
    planned = cluster.plan(str(folder), tensor_parallel_size=2, quantization="nf4")
    assert [rank.device_bytes for rank in report.ranks] == [rank.device_bytes for rank in planned.ranks]
    assert report.quantization_config == planned.quantization_config
    assert sorted(report.quantization_config["llm_int8_skip_modules"]) == ["lm_head", "model.embed_tokens"]
    weights = load_file(folder / "model.safetensors")
    layers = [name for name in weights if "_proj" in name]
    assert report.converted_tensors == 2 * len(layers) == 14
    for name in layers:
        parts = []
        for arrays in ranks:
            made = {key.removeprefix(name): torch.tensor(array) for key, array in arrays.items() if name in key}
            assert made.keys() == {"", ".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"}
            assert made[""].shape == (made[""].numel(), 1)
            parts.append(restored_nf4(made))
        by_row = "o_proj" in name or "down_proj" in name
        assert torch.equal(torch.cat(parts, 1 if by_row else 0), restored_nf4(nf4(weights[name]))), name
    longshore.assert_nothing_left()
