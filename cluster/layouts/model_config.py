"""The fields of a model's `config.json` that layouts need. The file comes from a bucket, so it is not trusted."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import ModelConfigError
from cluster.layouts.families import CONFIG_DEFAULTS
from cluster.precision.quantization_config import QuantizationConfig, find_quantization
from storage.checkpoints.checkpoint import read_other_file
from storage.checkpoints.model_index import ModelIndex
from storage.problems import Problems, json_values, quote
from storage.stores.object_store import ObjectStore

CONFIG_KEY = "config.json"
MAX_CONFIG_BYTES = 16 << 20  # config.json with the label names of a large classifier is about 1 MB
MAX_JSON_VALUES = 1_000_000  # bounds the memory that parsing takes

_Name = Annotated[str, Field(strict=True, max_length=100)]
_Count = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]


class ModelConfig(BaseModel):
    """The fields of `config.json` that describe the model's shape. Fields that the file lacks are None."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: _Name | None = None  # the family: "llama"...
    text_model_type: _Name | None = None  # family of the language model inside a multimodal one
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None  # None: as many as attention heads
    head_dim: _Count | None = None  # None: hidden_size / num_attention_heads
    hidden_size: _Count | None = None
    qk_nope_head_dim: _Count | None = None  # DeepSeek's latent attention: heads of two lengths, no head_dim
    vision_heads: _Count | None = None  # heads of a vision tower, `vision_config.num_heads`
    tie_word_embeddings: Any = None  # True: the head is the embedding; device maps keep them together
    quantization: QuantizationConfig | None = None  # `quantization_config` of a quantized checkpoint

    @property
    def kv_heads(self) -> int | None:
        """Return the number of key/value heads. A family without grouped queries has one per attention head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_rows(self) -> int | None:
        """Return the rows of one head in a query, key or value projection; None if unknown or not equal."""
        if self.qk_nope_head_dim is not None:
            return None
        if self.head_dim is not None:
            return self.head_dim
        if self.hidden_size is None or not self.num_attention_heads:
            return None
        return self.hidden_size // self.num_attention_heads


def parse_model_config(data: bytes) -> ModelConfig:
    """Return the checked fields of `config.json`. Raises ModelConfigError listing every problem.

    A multimodal model nests its language model's numbers in `text_config`. Those are used when the top level has no
    `num_attention_heads`.
    """
    _check_size(len(data))
    values = json_values(data)
    if values > MAX_JSON_VALUES:
        raise ModelConfigError(f"config.json has some {values} JSON values; at most {MAX_JSON_VALUES} are read")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as exc:  # ValueError: not JSON, not UTF-8, or a number of too many digits
        raise ModelConfigError(f"config.json is not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ModelConfigError(f"config.json is a JSON {type(fields).__name__}, not an object")
    try:
        return ModelConfig.model_validate({**_language_part(fields), "quantization": find_quantization(fields)})
    except ValidationError as exc:
        problems = Problems(
            f"{_field(e['loc'])}: {_OBJECT_WANTED if e['type'] in _NO_OBJECT else e['msg']}, got {quote(e['input'])}"
            for e in exc.errors()
        )
        raise ModelConfigError(f"config.json cannot be used: {problems}") from exc


_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")  # error types of pydantic
_OBJECT_WANTED = "Input should be an object"


def _field(path: tuple[int | str, ...]) -> str:
    """Return the name of a field as in config.json."""
    first = "quantization_config" if path[:1] == ("quantization",) else None
    return ".".join(map(str, (first, *path[1:]) if first else path))


def read_model_config(store: ObjectStore, index: ModelIndex) -> ModelConfig | None:
    """Return the config of a stored model, checked as `check_model_config` does; None when it has none.

    Raises ModelConfigError, ManifestMismatch, IntegrityError, StoreError.
    """
    data = _read_config(store, index)
    return None if data is None else parse_model_config(data)


def check_model_config(store: ObjectStore, index: ModelIndex) -> None:
    """Raise ManifestMismatch or IntegrityError unless config.json is the published one, if one was published."""
    if index.source == "manifest":
        _read_config(store, index)


def _read_config(store: ObjectStore, index: ModelIndex) -> bytes | None:
    file = next((file for file in index.files if file.key == CONFIG_KEY), None)
    if file is None:
        return None
    _check_size(file.size_bytes)
    return read_other_file(store, file)


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_CONFIG_BYTES:
        raise ModelConfigError(f"config.json has {size_bytes} bytes, more than {MAX_CONFIG_BYTES}")


def _language_part(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's fields, with the family's defaults for missing ones."""
    nested, vision = fields.get("text_config"), fields.get("vision_config")
    ours = ("vision_heads", "text_model_type")  # names of ours, which a config.json must not set
    fields = {name: value for name, value in fields.items() if name not in ours}
    family = fields.get("model_type")
    if isinstance(vision, dict):
        heads = vision.get("num_heads", vision.get("num_attention_heads"))
        fields["vision_heads"] = heads if isinstance(heads, int) else None
    if isinstance(nested, dict):
        nested = {name: value for name, value in nested.items() if name not in ours}
        fields["text_model_type"] = nested.get("model_type")
        if fields.get("num_attention_heads") is None:
            fields = {**fields, **nested, "model_type": family or nested.get("model_type")}
    defaults = CONFIG_DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    return {**defaults, **{name: value for name, value in fields.items() if value is not None}}
