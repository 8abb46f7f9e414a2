"""A model's tensors from its config.json alone, for estimates before weights are downloaded or trained.

    config.json --the class in transformers for the family, on torch's meta device--> names and shapes --> ModelIndex

Nothing is downloaded, no code named by the config runs, and no weights are allocated. Sizes are those of the
unquantized model in the dtype that the config names. A real checkpoint may have a few more small tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from cluster.errors import ModelConfigError, PlanError
from cluster.layouts.model_config import MAX_CONFIG_BYTES, find_quantization, parse_model_config
from cluster.units import show_bytes
from storage.checkpoints.model_index import ChunkTable, ModelIndex, OtherFile, Shard, Tensor
from storage.checkpoints.safetensors_header import tensor_bytes

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_COUNTED = re.compile(r"(?:layers|depths?|n_layer|blocks|stages|experts|num_labels)\Z")
MAX_COUNT = 4096  # of layers, experts or labels; each becomes a Python object
MAX_CHUNKS = 1 << 22  # chunks of the estimated model: 35 TB in chunks of 8 MiB
_MAX_DEPTH = 32  # nesting of JSON objects
# Fields without influence on shapes: names of code, some of which transformers would download, and private fields.
_LEFT_OUT = re.compile(r"_.*|auto_map|(?:attn|experts)_implementation", re.DOTALL)
# Fields for which transformers would read the hub.
_LOOKED_UP = ("backbone", "use_timm_backbone", "use_pretrained_backbone")

Named = tuple[str, tuple[int, ...]]
Shapes = Iterable[Named]
_STACKED = re.compile(r"mlp\.experts\.(?:gate_up_proj|down_proj)\Z")
# model_type -> names of the expert's module and matrices in the hub's checkpoints
_ON_THE_HUB = {
    "mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen3_moe", "deepseek_v3"), ("mlp.experts", "gate_proj", "up_proj", "down_proj")),
}
MAX_EXPERT_TENSORS = 1 << 18


def estimate_index(config_bytes: bytes, chunk_bytes: int) -> ModelIndex:
    """Return the index of a checkpoint of that config.

    Raises ModelConfigError for a bad config, and PlanError where the config does not determine the tensors.
    """
    parse_model_config(config_bytes)
    fields: dict[str, Any] = json.loads(config_bytes)
    if find_quantization(fields) is not None:
        raise PlanError(
            "config.json describes a quantized model; it does not determine the tensors",
            hint="plan the checkpoint itself, or the config of the model before it was quantized",
        )
    fields = _shape_fields(fields)
    if find_spec("transformers") is None or find_spec("torch") is None:
        raise PlanError(
            "an estimate from config.json alone needs transformers and torch",
            hint="pip install transformers torch, or plan a checkpoint with weights",
        )
    nested = fields.get("text_config")
    places = (fields, nested if isinstance(nested, dict) else {})
    given = next(filter(None, (part.get(key) for part in places for key in ("dtype", "torch_dtype"))), None)
    name = str(given or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelConfigError(f"config.json names the dtype {name!r:.40}; it can be {', '.join(_DTYPES)}")
    shapes = list(_shapes(fields))
    shapes, how = one_by_one(shapes, str(fields.get("model_type")))
    note = f"estimated from config.json, as {name}" + ("" if given else " (it names no dtype)") + how
    return index_of(shapes, _DTYPES[name], chunk_bytes, len(config_bytes), note)


def one_by_one(shapes: Sequence[tuple[str, tuple[int, ...]]], family: str) -> tuple[list[Named], str]:
    """Return shapes as the family's checkpoints on the hub store experts, and a note about that.

    The hub may have one tensor per expert where transformers has one per layer. It matters because converted tensors
    are staged one at a time, and all experts of a layer are many times as large as one expert.
    """
    stacked = {name: shape for name, shape in shapes if len(shape) == 3 and _STACKED.search(name)}
    if not stacked:
        return list(shapes), ""
    count = sum(2 * shape[0] for shape in stacked.values())
    if family not in _ON_THE_HUB or count > MAX_EXPERT_TENSORS:
        return list(shapes), "; all experts of a layer in one tensor, as in transformers"
    folder, gate, up, down = _ON_THE_HUB[family]
    found: list[Named] = []
    for name, shape in shapes:
        if name not in stacked:
            found.append((name, shape))
            continue
        layer = _STACKED.sub(folder, name)
        experts, rows, columns = shape
        parts = ((down, rows),) if name.endswith("down_proj") else ((gate, rows // 2), (up, rows // 2))
        found += [
            (f"{layer}.{expert}.{part}.weight", (held, columns)) for expert in range(experts) for part, held in parts
        ]
    return found, "; one tensor per expert, as on the hub"


def index_of(shapes: Shapes, dtype: str, chunk_bytes: int, config_size_bytes: int, note: str) -> ModelIndex:
    """Return an index of one shard with these tensors in order. Raises ModelConfigError if it is too large."""
    tensors, end = [], 0
    for name, shape in shapes:
        start, end = end, end + tensor_bytes(dtype, shape)
        tensors.append(Tensor(name, dtype, shape, 0, start, end))
    if end > MAX_CHUNKS * chunk_bytes:
        raise ModelConfigError(
            f"config.json describes a model of {show_bytes(end)}; at most {show_bytes(MAX_CHUNKS * chunk_bytes)} are "
            "estimated",
            hint="correct the sizes in config.json, or raise LONGSHORE_CHUNK_BYTES",
        )
    starts = np.arange(0, end, chunk_bytes, dtype=np.int64)
    chunks = ChunkTable(np.zeros(len(starts), np.int32), starts, np.minimum(starts + chunk_bytes, end), None, None)
    return ModelIndex(
        revision="none: an estimate",
        source="config",
        shards=(Shard("(estimated)", end, None),),
        tensors=tuple(tensors),
        chunks=chunks,
        files=(OtherFile("config.json", min(config_size_bytes, MAX_CONFIG_BYTES), None),),
        notes=(note,),
    )


def _shape_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that decide shapes. Raises ModelConfigError for counts above the limits, or PlanError."""
    found: dict[str, Any] = _checked("", fields, _MAX_DEPTH)
    return found


def _checked(key: str, value: Any, depth: int) -> Any:
    if depth < 0:
        raise ModelConfigError(f"config.json is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {name: _checked(name, part, depth - 1) for name, part in value.items() if not _LEFT_OUT.fullmatch(name)}
    if isinstance(value, list):
        return [_checked(key, part, depth - 1) for part in value]
    if isinstance(value, int | float) and value > MAX_COUNT and _COUNTED.search(key):
        raise ModelConfigError(f"config.json has {key!r:.60}={value}; at most {MAX_COUNT} are estimated")
    if value is not None and (key in _LOOKED_UP or (key == "architecture" and ":" in str(value))):
        raise PlanError(
            f"config.json names its {key} ({value!r:.60}), which is another model",
            hint="plan the checkpoint itself",
        )
    return value


def _shapes(fields: dict[str, Any]) -> Shapes:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = str(fields.get("model_type"))
    if not _NAME.fullmatch(family) or family not in CONFIG_MAPPING:
        raise PlanError(
            f"transformers {transformers.__version__} does not know the model type {family!r:.60} of config.json",
            hint="plan the checkpoint itself",
        )
    own = {key: value for key, value in fields.items() if key != "model_type"}
    try:
        config = CONFIG_MAPPING[family](**own)
        with torch.device("meta"):
            model = _class_for(fields, config)(config)
    except Exception as error:  # a strange config can make a library raise anything
        text = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelConfigError(f"transformers cannot make a model from config.json: {text}") from error
    # Of tied parameters only the first is stored.
    stored = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    return [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name in stored]


def _class_for(fields: Mapping[str, Any], config: Any) -> Any:
    """Return the class that the config names, else the family's class for text generation."""
    import transformers

    for name in fields.get("architectures") or ():
        found = getattr(transformers, str(name), None) if _NAME.fullmatch(str(name)) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise PlanError("config.json names no architecture that transformers knows")
