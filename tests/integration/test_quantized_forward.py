"""Quantized weights go into modules of compressed-tensors or bitsandbytes, and compute the same results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.precision.recipes import make_precision
from cluster.precision.written_quantization import quantization_config
from tests.support.hf_models import save_tiny
from tests.support.shards import files_of, plan_of, shard_of

pytestmark = pytest.mark.slow

IDS = torch.arange(3, 19)[None]
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}  # groups of int4 have 128 inputs
# the largest difference that a logit may have, of the largest logit
CLOSE = {"fp8": 0.1, "fp8_tensor": 0.1, "int8": 0.03, "int4": 0.3, "nf4": 0.3}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def make_layers(model: Any, said: dict[str, Any]) -> None:
    """The model's linear layers become those for such weights, as the documentation has it."""
    if said["quant_method"] == "bitsandbytes":
        from transformers import BitsAndBytesConfig
        from transformers.integrations import replace_with_bnb_linear

        config = BitsAndBytesConfig.from_dict(said)
        replace_with_bnb_linear(model, config.llm_int8_skip_modules, config, pre_quantized=True)
        return
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    form = QuantizationConfig.model_validate(said)
    apply_quantization_config(model, form, run_compressed=False)
    ModelCompressor(quantization_config=form).compress_model(model)


@pytest.mark.parametrize("quantization", CLOSE)
def test_quantized_weights_in_modules_made_for_them(tmp_path: Path, quantization: str) -> None:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if quantization == "nf4":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes, which computes with NF4, is not installed")
    stored = save_tiny("llama", tmp_path / "stored", **WIDE)
    plan = plan_of(stored, precision=make_precision("auto", quantization, None))
    shard = shard_of(plan, 0, files_of(plan, stored))
    said = quantization_config(plan.cut)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(stored))
        make_layers(model, said)
    assert shard.into(model).copied == ()

    # The same as a checkpoint, read by transformers.
    written = tmp_path / "written"
    written.mkdir()
    config = json.loads((stored / "config.json").read_text())
    (written / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    save_file({name: tensor.contiguous() for name, tensor in shard.items()}, written / "model.safetensors")
    found = logits(model)
    assert torch.equal(found, logits(AutoModelForCausalLM.from_pretrained(written)))

    exact = logits(AutoModelForCausalLM.from_pretrained(stored))
    assert not torch.equal(found, exact)
    assert float((found - exact).abs().max()) < CLOSE[quantization] * float(exact.abs().max())
