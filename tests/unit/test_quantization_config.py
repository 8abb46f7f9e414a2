"""config.json says how a checkpoint is quantized; supported methods are read, others refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping

import pytest

from cluster.errors import ModelConfigError
from cluster.layouts.model_config import MAX_SCHEMES, METHODS, Family, QuantizationConfig, parse_model_config


def parse(fields: Mapping[str, object]) -> QuantizationConfig | None:
    return parse_model_config(json.dumps(fields).encode()).quantization


def said(**fields: object) -> QuantizationConfig:
    found = parse({"model_type": "llama", "quantization_config": fields})
    assert found is not None
    assert pickle.loads(pickle.dumps(found)) == found
    return found


def test_gptq() -> None:
    config = said(
        quant_method="gptq",
        bits=4,
        group_size=128,
        desc_act=True,
        sym=True,
        checkpoint_format="gptq",
        dataset=["a"],
        damp_percent=0.1,
        modules_in_block_to_quantize=None,
    )
    assert (config.family, config.bits, config.group_size, config.desc_act) == (Family.GPTQ, 4, 128, True)
    assert said(quant_method="gptq", bits=4, desc_act=False, dynamic={"-:lm_head": {}}).desc_act is False
    assert said(quant_method="gptq", bits=4).desc_act is True  # nobody says that inputs are in order
    assert said(quant_method="gptq", bits=4, dynamic={"+:.*down.*": {"bits": 8, "desc_act": True}}).desc_act is True
    assert said(quant_method="gptq", bits=4, checkpoint_format="marlin").family is None


def test_awq_and_the_names_of_its_early_files() -> None:
    config = said(quant_method="awq", w_bit=4, q_group_size=64, zero_point=True, version="GEMM")
    assert (config.family, config.bits, config.group_size) == (Family.AWQ, 4, 64)
    assert "the awq format in config.json is 'gemv'" in said(quant_method="awq", version="gemv").trouble


def test_auto_round_uses_the_format_of_other_methods() -> None:
    assert said(quant_method="auto-round", packing_format="auto_round:auto_gptq", bits=4).family is Family.GPTQ
    assert said(quant_method="auto-round", packing_format="auto_round:auto_awq", bits=4).family is Family.AWQ
    assert said(quant_method="auto-round", packing_format="other").family is None
    assert said(quant_method="auto-round", packing_format=7).family is None


def test_fp8() -> None:
    config = said(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128])
    assert (config.family, config.weight_block_size) == (Family.SCALED, (128, 128))
    assert said(quant_method="fp8", weight_block_size=None).weight_block_size is None


def test_compressed_tensors() -> None:
    groups = {
        "group_0": {"targets": ["re:.*"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 128}},
        "group_1": {"targets": ["x"], "weights": {"num_bits": 8, "strategy": "channel", "group_size": None}},
        "group_2": {"targets": ["x"], "weights": {"num_bits": 8, "strategy": "tensor", "actorder": None}},
        "group_3": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [128, 64]}},
        "group_4": {"input_activations": {"num_bits": 8}, "weights": None},
    }
    config = said(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)
    assert [scheme.units for scheme in config.schemes] == [(1, 128), (1, 0), (0, 0), (128, 64)]
    written = said(config_groups={"g": {"weights": {"strategy": "block", "block_structure": "128x64"}}})
    assert written.schemes[0].units == (128, 64)
    early = parse({"compression_config": {"config_groups": groups, "format": "pack-quantized"}})
    assert early is not None
    assert early.family is Family.COMPRESSED
    assert said(quant_method="compressed-tensors", format="marlin-24").family is None


def test_quantization_configs_are_found_in_nested_configs() -> None:
    inner = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for fields in (
        {"quantization_config": inner},
        {"text_config": {"num_attention_heads": 8, "quantization_config": inner}},
        {"num_attention_heads": 8, "text_config": {"quantization_config": inner}},
    ):
        config = parse(fields)
        assert config is not None
        assert config.family is Family.SCALED
    assert parse({"quantization": {"bits": 4}}) is None
    assert parse({"quantization_config": None}) is None


def test_methods_that_cannot_be_split_are_refused() -> None:
    for fields in ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {"bits": 4, "group_size": 64}):
        config = said(**fields)
        assert config.family is None
        assert all(name in config.trouble for name in METHODS)


@pytest.mark.parametrize(
    "fields",
    [
        7,
        "gptq",
        [],
        {"quant_method": 7},
        {"quant_method": "x" * 101},
        {"quant_method": "gptq", "bits": 0},
        {"quant_method": "gptq", "bits": "4"},
        {"quant_method": "gptq", "bits": 1 << 40},
        {"quant_method": "gptq", "group_size": -2},
        {"quant_method": "gptq", "group_size": 1 << 30},
        {"quant_method": "gptq", "desc_act": "yes"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"config_groups": 7},
        {"config_groups": {"g": {"weights": 7}}},
        {"config_groups": {str(n): {"weights": {"num_bits": 8}} for n in range(MAX_SCHEMES + 1)}},
        {"config_groups": {str(n): {"weights": {"num_bits": "x" * 1000}} for n in range(MAX_SCHEMES)}},
    ],
)
def test_hostile_configs_are_refused(fields: object) -> None:
    with pytest.raises(ModelConfigError, match="quantization") as caught:
        parse({"quantization_config": fields})
    assert len(str(caught.value)) < 5000
