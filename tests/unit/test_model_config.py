"""config.json from a bucket: valid fields are read, hostile ones are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ModelConfigError
from cluster.layouts.model_config import MAX_CONFIG_BYTES, ModelConfig, parse_model_config, read_model_config
from storage.checkpoints.model_index import OtherFile
from storage.checksum import new_hasher
from storage.errors import IntegrityError
from storage.stores.object_store import MemoryStore
from tests.support.planned_models import store_arrays

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def test_llama() -> None:
    config = parse_model_config(json.dumps(LLAMA).encode())
    assert (config.model_type, config.kv_heads, config.head_rows) == ("llama", 8, 128)


def test_missing_fields_are_reported() -> None:
    empty = parse_model_config(b"{}")
    assert (empty.model_type, empty.kv_heads, empty.head_rows) == (None, None, None)
    assert ModelConfig(num_attention_heads=4, num_key_value_heads=None).kv_heads == 4
    assert ModelConfig(num_attention_heads=4, hidden_size=64, head_dim=32).head_rows == 32
    assert parse_model_config(b'{"head_dim": null}').head_dim is None


def test_multimodal_nesting() -> None:
    nested = {"model_type": "llava", "text_config": LLAMA}
    assert parse_model_config(json.dumps(nested).encode()).num_key_value_heads == 8
    partial = {"model_type": "mistral", "text_config": {"num_attention_heads": 2}}
    assert parse_model_config(json.dumps(partial).encode()).model_type == "mistral"
    flat = {**LLAMA, "text_config": {"num_attention_heads": 2}}
    assert parse_model_config(json.dumps(flat).encode()).num_attention_heads == 64
    assert parse_model_config(b'{"text_config": 7}').num_attention_heads is None
    names_of_ours = {"text_config": {**LLAMA, "vision_heads": 3, "text_model_type": "other"}}
    found = parse_model_config(json.dumps(names_of_ours).encode())
    assert (found.vision_heads, found.text_model_type) == (None, LLAMA["model_type"])


# What the published config.json of Gemma 3's 4B model says of its language model.
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34},
    "vision_config": {"num_attention_heads": 16, "model_type": "siglip_vision_model"},
}


def test_families_that_leave_numbers_out() -> None:
    config = parse_model_config(json.dumps(GEMMA3_4B).encode())
    assert (config.num_attention_heads, config.kv_heads, config.head_rows) == (8, 4, 256)
    assert (config.model_type, config.text_model_type, config.vision_heads) == ("gemma3", "gemma3_text", 16)
    larger = {**GEMMA3_4B, "text_config": {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}}
    config = parse_model_config(json.dumps(larger).encode())
    assert (config.num_attention_heads, config.kv_heads, config.head_rows) == (32, 16, 128)
    assert parse_model_config(b'{"model_type": "llama"}').num_attention_heads is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b"nul",
        b"[" * 100_000,
        b'{"num_attention_heads": ' + b"9" * 5000 + b"}",
        b'{"num_attention_heads": 0}',
        b'{"num_attention_heads": -8}',
        b'{"num_attention_heads": 1e9}',
        b'{"num_attention_heads": 99999999999}',
        b'{"num_attention_heads": "32"}',
        b'{"num_attention_heads": true}',
        b'{"num_attention_heads": NaN}',
        b'{"model_type": ["llama"]}',
        b'{"head_dim": {}}',
        json.dumps({"model_type": "x" * 101}).encode(),
    ],
)
def test_hostile_configs_are_refused(data: bytes) -> None:
    with pytest.raises(ModelConfigError) as caught:
        parse_model_config(data)
    assert len(str(caught.value)) < 500


def test_all_problems_are_listed() -> None:
    with pytest.raises(ModelConfigError, match=r"num_attention_heads.*head_dim"):
        parse_model_config(b'{"num_attention_heads": 0, "head_dim": "x"}')


@given(st.binary(max_size=200) | st.text('{}[]":,0123456789.eE-ntrufalse', max_size=60).map(str.encode))
def test_arbitrary_bytes_do_not_crash_the_parser(data: bytes) -> None:
    with suppress(ModelConfigError):
        assert isinstance(parse_model_config(data), ModelConfig)


def test_read_from_a_store() -> None:
    data = json.dumps(LLAMA).encode()
    store = MemoryStore({"config.json": data})
    index = store_arrays({}).index
    assert read_model_config(store, index) is None
    hasher = new_hasher("blake3")
    hasher.update(data)
    listed = replace(index, files=(OtherFile("config.json", len(data), f"blake3:{hasher.hexdigest()}"),))
    assert read_model_config(store, listed) == parse_model_config(data)
    unchecked = replace(index, files=(OtherFile("config.json", len(data), None),))
    assert read_model_config(store, unchecked) == parse_model_config(data)
    store.put("config.json", data.replace(b"64", b"32"))
    with pytest.raises(IntegrityError):
        read_model_config(store, listed)
    huge = replace(index, files=(OtherFile("config.json", MAX_CONFIG_BYTES + 1, None),))
    with pytest.raises(ModelConfigError, match="more than"):
        read_model_config(store, huge)


@pytest.mark.parametrize("given", ["gptq", 5, ["gptq"]])
def test_problems_use_the_field_names_of_config_json(given: object) -> None:
    with pytest.raises(ModelConfigError) as error:
        parse_model_config(json.dumps({"quantization_config": given}).encode())
    assert "quantization_config: Input should be an object, got" in error.value.message
    assert "QuantizationConfig" not in error.value.message
    with pytest.raises(ModelConfigError, match=r"quantization_config\.bits: "):
        parse_model_config(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": "x"}}).encode())
