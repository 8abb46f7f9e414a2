"""A quantized load, written down as a checkpoint, is one that transformers reads through compressed-tensors, or through
bitsandbytes where that is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from actors.devices.convert import torch_dtype
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan
from cluster.precision.recipes import SCHEMES, Precision, decide_recipes
from cluster.precision.written_quantization import quantization_config
from storage.checkpoints.checkpoint import open_model
from storage.checkpoints.model_index import Tensor
from storage.stores.local import LocalStore
from tests.support.hf_models import FAMILIES, make_tiny, save_tiny
from tests.support.planned_models import carry_out
from tests.support.reference_quantized import quantized, restored

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
TOKENS = torch.tensor([[1, 5, 9, 33, 60]])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_transformers_reads_the_loaded_tensors(tmp_path: Path, scheme: str) -> None:
    if scheme == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes, which reads NF4, is not installed")
    source = save_tiny("llama", tmp_path / "source", **SIZES)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    written = write_quantized(source, tmp_path / "quantized", scheme)
    found = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16).eval()
    # The same weights, restored by the library from its own quantization of them, in the model as it was.
    state = {}
    for name, weight in model.state_dict().items():
        state[name] = restored(quantized(weight, scheme), scheme) if "_proj" in name else weight
    model.load_state_dict(state)
    with torch.no_grad():
        logits, expected = found(TOKENS).logits.float(), model(TOKENS).logits.float()
    # fp8 layers quantize their inputs as well; on some CPUs bitsandbytes rounds absmax to bfloat16 to compute with it.
    close = {"fp8": 0.2, "fp8_tensor": 0.2, "nf4": 0.02}.get(scheme, 1e-6)
    assert (logits - expected).abs().max() <= close * expected.abs().max()


def write_quantized(source: Path, folder: Path, scheme: str, skip: tuple[str, ...] = ("default",)) -> Path:
    """A checkpoint of what one rank holds."""
    index = open_model(LocalStore(str(source)), chunk_bytes=10_007)
    plan = build_load_plan(index, Layout(), None, None, Precision("auto", scheme, skip))
    files = [np.fromfile(source / shard.key, np.uint8) for shard in index.shards]
    made, _ = carry_out(plan, plan.ranks[0], files)
    tensors = {}
    for piece in plan.ranks[0].slices:
        dtype, shape = torch_dtype(piece.dtype, piece.sizes)
        tensors[piece.name] = torch.from_numpy(made[piece.name].copy()).view(dtype).reshape(shape)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(plan.cut)
    (folder / "config.json").write_text(json.dumps(config))
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_only_linear_layers_of_the_language_model_are_quantized(family: str) -> None:
    model = make_tiny(family)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
    tensors = [
        Tensor(name, names[tensor.dtype], tuple(tensor.shape), 0, 0, tensor.nbytes)
        for name, tensor in model.state_dict().items()
    ]
    recipes = decide_recipes(tensors, Precision(quantization="fp8"))
    everything = decide_recipes(tensors, Precision(quantization="fp8", skip=()))
    found, asked = (
        {tensor.name for tensor, recipe in zip(tensors, chosen, strict=True) if recipe is not None}
        for chosen in (recipes, everything)
    )
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    towers = {name for name in linear if "visual" in name or "vision_tower" in name}
    experts = {tensor.name for tensor in tensors if ".experts." in tensor.name and len(tensor.shape) == 3}
    assert found == linear - towers - {"lm_head.weight"}  # all experts in one tensor: nothing reads them quantized
    assert asked == linear | experts  # embeddings and routers are no linear layers
