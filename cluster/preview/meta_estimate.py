"""A model's tensors from its config.json alone, where no weights are: for estimates ahead of a download or a training.

    config.json --transformers' own class for the family, on torch's meta device--> names and shapes --> ModelIndex

Nothing is downloaded, no code of a model's repository runs, no weight exists. Sizes are those of the unquantized model
in the dtype that the config names; a checkpoint may have a few small tensors more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from cluster.errors import ModelConfigError, PlanError
from cluster.layouts.model_config import MAX_CONFIG_BYTES, parse_model_config
from storage.checkpoints.dtypes import tensor_bytes
from storage.checkpoints.model_index import ChunkTable, ModelIndex, OtherFile, Shard, Tensor

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_COUNTED = re.compile(r"(?:layers|depth|n_layer|experts)\Z")
MAX_COUNT = 4096  # of layers, and of experts: each is an object of Python's

Shapes = Iterable[tuple[str, tuple[int, ...]]]


def estimate_index(config_bytes: bytes, chunk_bytes: int) -> ModelIndex:
    """What a checkpoint of that config would hold. Raises ModelConfigError, and PlanError where it cannot be known."""
    parse_model_config(config_bytes)
    fields: dict[str, Any] = json.loads(config_bytes)
    if fields.get("quantization_config"):
        raise PlanError(
            "config.json is of a quantized model, whose tensors it does not tell",
            hint="plan the checkpoint itself, or the config of the model before it was quantized",
        )
    _check_counts(fields)
    if find_spec("transformers") is None or find_spec("torch") is None:
        raise PlanError(
            "an estimate from config.json alone needs transformers and torch",
            hint="pip install transformers torch, or plan a checkpoint: its headers say it all",
        )
    given = fields.get("dtype") or fields.get("torch_dtype") or (fields.get("text_config") or {}).get("dtype")
    name = str(given or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelConfigError(f"config.json names the dtype {name!r:.40}, not one of {', '.join(_DTYPES)}")
    note = f"estimated from config.json, as {name}" + ("" if given else " (it names no dtype)")
    return index_of(_shapes(fields), _DTYPES[name], chunk_bytes, len(config_bytes), note)


def index_of(shapes: Shapes, dtype: str, chunk_bytes: int, config_size_bytes: int, note: str) -> ModelIndex:
    """One shard with these tensors, one after the other."""
    tensors, end = [], 0
    for name, shape in shapes:
        start, end = end, end + tensor_bytes(dtype, shape)
        tensors.append(Tensor(name, dtype, shape, 0, start, end))
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


def _check_counts(fields: Mapping[str, Any], depth: int = 0) -> None:
    for key, value in fields.items():
        if isinstance(value, int) and _COUNTED.search(key) and value > MAX_COUNT:
            raise ModelConfigError(f"config.json has {key!r:.60}={value}; at most {MAX_COUNT} are estimated")
        if isinstance(value, dict) and depth < 4:
            _check_counts(value, depth + 1)


def _shapes(fields: dict[str, Any]) -> Shapes:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = str(fields.get("model_type"))
    if not _NAME.fullmatch(family) or family not in CONFIG_MAPPING:
        raise PlanError(
            f"transformers {transformers.__version__} does not know the model type {family!r:.60} of config.json",
            hint="plan the checkpoint itself: its headers say it all",
        )
    own = {key: value for key, value in fields.items() if key not in ("auto_map", "model_type")}
    try:
        config = CONFIG_MAPPING[family](**own)
        with torch.device("meta"):
            model = _class_for(fields, config)(config)
    except Exception as error:  # whatever a strange config does to a library
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelConfigError(f"transformers makes no model of config.json: {said}") from error
    # Of tied parameters only the first is stored.
    stored = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    return [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if name in stored]


def _class_for(fields: Mapping[str, Any], config: Any) -> Any:
    """The class that the config names, else the one for generating text."""
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
