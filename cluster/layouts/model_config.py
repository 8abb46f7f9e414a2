"""The fields of a model's `config.json` that layouts need. The file comes from a bucket, so it is not trusted.

Of its `quantization_config` only fields that decide cuts are read: sizes of groups and blocks, bits, the format's name.
The stored tensors show which modules are quantized. The patterns (regular expressions) in such a config are never used
for that.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import ModelConfigError
from cluster.layouts.families import CONFIG_DEFAULTS
from storage.checkpoints.checkpoint import read_other_file
from storage.checkpoints.model_index import ModelIndex
from storage.problems import Problems, json_values, quote
from storage.stores.object_store import ObjectStore

MAX_SCHEMES = 64  # config_groups of compressed-tensors
MAX_UNIT = 1 << 20  # indices in a group or block

_Name = Annotated[str, Field(strict=True, max_length=100)]
_Bits = Annotated[int, Field(strict=True, ge=1, le=64)]
_Unit = Annotated[int, Field(strict=True, ge=1, le=MAX_UNIT)]
_GroupSize = Annotated[int, Field(strict=True, ge=-1, le=MAX_UNIT)]  # -1 and 0: no groups, one scale per output
_Block = tuple[_Unit, _Unit]  # (outputs, inputs)


def _from_text(given: Any) -> Any:
    """Parse a block that early files write as "128x128"."""
    match = re.fullmatch(r"([0-9]{1,8})x([0-9]{1,8})", given) if isinstance(given, str) else None
    return tuple(map(int, match.groups())) if match else given


class Family(StrEnum):
    """The families of formats that store tensors alike."""

    GPTQ = "gptq"
    AWQ = "awq"
    SCALED = "scaled"  # a `weight` of full shape, with tensors of scales
    COMPRESSED = "compressed-tensors"


# quant_method -> family
METHODS = {
    "gptq": Family.GPTQ,
    "awq": Family.AWQ,
    "fp8": Family.SCALED,
    "fbgemm_fp8": Family.SCALED,
    "compressed-tensors": Family.COMPRESSED,
}
_GPTQ_FORMATS = ("", "gptq", "gptq_v2")
_AWQ_FORMATS = ("", "gemm")
_COMPRESSED_FORMATS = (
    "",
    "dense",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)


class WeightScheme(BaseModel):
    """The quantization of the weights in one of the `config_groups` of compressed-tensors."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_bits: _Bits = 8
    strategy: _Name | None = None
    group_size: _GroupSize | None = None
    block_structure: Annotated[_Block | None, BeforeValidator(_from_text)] = None

    @property
    def units(self) -> tuple[int, int]:
        """Return the numbers of outputs and inputs that share a scale; 0: all of them."""
        if self.block_structure is not None:
            return self.block_structure
        if self.group_size is not None and self.group_size > 0:
            return (1, self.group_size)
        return (0, 0) if self.strategy == "tensor" else (1, 0)


class QuantizationConfig(BaseModel):
    """The fields that decide cuts. Missing fields have the defaults of the formats."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    quant_method: _Name = ""
    bits: Annotated[_Bits | None, Field(validation_alias=AliasChoices("bits", "w_bit"))] = None
    group_size: Annotated[_GroupSize | None, Field(validation_alias=AliasChoices("group_size", "q_group_size"))] = None
    desc_act: Annotated[bool, Field(strict=True)] = False
    zero_point: Annotated[bool, Field(strict=True)] = True
    weight_block_size: _Block | None = None
    format: _Name = ""
    schemes: Annotated[tuple[WeightScheme, ...], Field(max_length=MAX_SCHEMES)] = ()

    @model_validator(mode="before")
    @classmethod
    def _read(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        fields = {name: value for name, value in fields.items() if value is not None}
        groups = fields.pop("config_groups", None)
        fields["schemes"] = groups if groups is not None and not isinstance(groups, dict) else _weights(groups or {})
        if "quant_method" not in fields and groups is not None:
            fields["quant_method"] = "compressed-tensors"
        method = fields.get("quant_method")
        if method in ("gptq", "awq"):
            names = ("checkpoint_format",) if method == "gptq" else ("version",)
            fields["format"] = next((fields[name] for name in names if name in fields), "")
        elif method in ("auto-round", "intel/auto-round"):
            # Names such as "auto_round:auto_gptq" mean that the tensors are those of GPTQ or AWQ.
            packing = fields.get("packing_format")
            named = [family for family in ("gptq", "awq") if isinstance(packing, str) and family in packing]
            fields |= {"quant_method": named[0], "format": ""} if len(named) == 1 else {}
        if method == "gptq" and "desc_act" not in fields:
            fields["desc_act"] = True  # the order of inputs is unknown, and this is correct for any order
        if _own_activation_order(fields.get("dynamic")):
            fields["desc_act"] = True
        return fields

    @property
    def family(self) -> Family | None:
        """Return the family whose rules cut its tensors, or None (see `trouble`)."""
        return None if self.trouble else METHODS[self.quant_method]

    @property
    def trouble(self) -> str:
        """Return why no rules cut its tensors, or ""."""
        if self.quant_method not in METHODS:
            named = repr(self.quant_method) if self.quant_method else "not named"
            return (
                f"the quant_method in config.json is {named}, which tensor parallelism cannot cut "
                f"(it can: {', '.join(METHODS)})"
            )
        formats = {
            Family.GPTQ: _GPTQ_FORMATS,
            Family.AWQ: _AWQ_FORMATS,
            Family.COMPRESSED: _COMPRESSED_FORMATS,
        }.get(METHODS[self.quant_method])
        if formats is not None and self.format.lower() not in formats:
            return (
                f"the {self.quant_method} format in config.json is {self.format!r}, which tensor parallelism "
                f"cannot cut (it can: {', '.join(filter(None, formats))})"
            )
        return ""


def find_quantization(fields: dict[str, Any]) -> object:
    """Return the fields of a config.json that `QuantizationConfig` checks, or None without quantization.

    A multimodal model may have them in `text_config`. Early releases of compressed-tensors used another name.
    """
    nested = fields.get("text_config")
    for part in (fields, nested if isinstance(nested, dict) else {}):
        for name in ("quantization_config", "compression_config"):
            if part.get(name) is not None:
                found: object = part[name]
                return found
    return None


def _weights(groups: dict[str, Any]) -> list[Any]:
    """Return the weight settings of each group. A group may quantize activations only."""
    return [group["weights"] for group in groups.values() if isinstance(group, dict) and group.get("weights")]


def _own_activation_order(dynamic: object) -> bool:
    """Return whether a module's own GPTQModel settings have desc_act. Then g_idx is used for all modules."""
    return isinstance(dynamic, dict) and any(
        isinstance(settings, dict) and settings.get("desc_act") is True for settings in dynamic.values()
    )


CONFIG_KEY = "config.json"
MAX_CONFIG_BYTES = 16 << 20  # config.json with the label names of a large classifier is about 1 MB
MAX_JSON_VALUES = 1_000_000  # bounds the memory that parsing takes

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
