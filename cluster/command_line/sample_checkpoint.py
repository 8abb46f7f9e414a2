"""A Llama-shaped checkpoint of any size, in the Hugging Face layout: for the demo, benchmarks and tests.

Random but the same for the same arguments, finite in bfloat16, written block by block in little memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.errors import ConfigError
from cluster.telemetry.rank_report import Jsonable
from storage.checkpoints.safetensors_header import encode_header, tensor_bytes

BLOCK_BYTES = 4 << 20  # written at a time: all the memory that this takes
DTYPE = "BF16"

TensorSpec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def llama_tensors(
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tie_word_embeddings: bool = False,
) -> list[TensorSpec]:
    """Names and shapes as `transformers` saves a LlamaForCausalLM, in the order of the model."""
    head_dim = hidden // heads
    kv = kv_heads * head_dim
    block = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    tensors: list[TensorSpec] = [("model.embed_tokens.weight", DTYPE, (vocab, hidden))]
    for layer in range(layers):
        tensors += [(f"model.layers.{layer}.{name}", DTYPE, shape) for name, shape in block.items()]
    tensors.append(("model.norm.weight", DTYPE, (hidden,)))
    if not tie_word_embeddings:
        tensors.append(("lm_head.weight", DTYPE, (vocab, hidden)))
    return tensors


def write_llama_checkpoint(
    folder: str | Path,
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    shards: int,
    seed: int,
    tie_word_embeddings: bool = False,
) -> None:
    """Write shards, `model.safetensors.index.json` and `config.json` into `folder`, which is made.

    One shard is `model.safetensors` without an index. A tensor's values depend on `seed` and its place in the
    model, not on `shards`. Raises ValueError when heads do not divide evenly or there are too few tensors.
    """
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"heads={heads} must divide hidden={hidden}, kv_heads={kv_heads} must divide heads")
    tensors = llama_tensors(
        hidden=hidden,
        layers=layers,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        tie_word_embeddings=tie_word_embeddings,
    )
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot be written in {shards} shards")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    first = 0
    for number, part in enumerate(partition_tensors(tensors, shards), start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        with (root / name).open("wb") as file:
            file.write(encode_header(part, {"format": "pt"}))
            for index, (_, dtype, shape) in enumerate(part, start=first):
                for block in _random_bfloat16(tensor_bytes(dtype, shape), (seed, index)):
                    file.write(block)
        weight_map.update({tensor: name for tensor, _, _ in part})
        first += len(part)
    if shards > 1:
        total = sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
        index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(root / "model.safetensors.index.json", index_json)
    _write_json(
        root / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "vocab_size": vocab,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": tie_word_embeddings,
            "torch_dtype": "bfloat16",
        },
    )


def partition_tensors(tensors: Sequence[TensorSpec], shards: int) -> Iterator[Sequence[TensorSpec]]:
    """Cut the list into `shards` runs of about equal bytes, none empty."""
    remaining = sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
    at = 0
    for left in range(shards, 0, -1):
        target = remaining / left
        end, size = at, 0
        while end < len(tensors) - (left - 1):
            step = tensor_bytes(*tensors[end][1:])
            if left > 1 and size and size + step / 2 > target:
                break
            size += step
            end += 1
        yield tensors[at:end]
        remaining -= size
        at = end


def _random_bfloat16(size_bytes: int, seed: tuple[int, int]) -> Iterator[memoryview]:
    """That many bytes of bfloat16 with magnitudes of 2**-7 to 2**-3, in blocks."""
    random = np.random.Generator(np.random.SFC64(seed))
    for start in range(0, size_bytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, size_bytes - start)
        words = random.integers(0, 2**64, (size + 7) // 8, dtype=np.uint64).view(np.uint16)[: size // 2]
        # Sign, two exponent bits and the mantissa stay random; the rest of the exponent is fixed.
        words &= np.uint16(0x81FF)
        words |= np.uint16(0x3C00)
        yield words.data.cast("B")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


DEFAULT_SIZE_BYTES = 1_000_000_000
LEAST_SIZE_BYTES = 20_000_000
SHARDS = 4


@dataclass(frozen=True, slots=True)
class WrittenModel(Jsonable):
    """A checkpoint that was written."""

    folder: str
    size_bytes: int  # of its tensors
    shards: int
    write_s: float


def write_demo_model(folder: str | Path, size_bytes: int | None = None) -> WrittenModel:
    """Write the checkpoint into `folder`, which is made. Raises ConfigError when something is in it, or below 20 MB."""
    shape = shape_for(size_bytes or DEFAULT_SIZE_BYTES)
    where = Path(folder)
    try:
        taken = where.exists() and any(where.iterdir())
    except OSError as error:
        raise ConfigError(f"the model cannot be written there: {error}", folder=str(folder)) from error
    if taken:
        raise ConfigError("the folder for the model is not empty", hint="name a new one", folder=str(folder))
    begun_s = time.monotonic()
    try:
        write_llama_checkpoint(where, **shape, shards=SHARDS, seed=0)
    except OSError as error:
        raise ConfigError(f"the model cannot be written there: {error}", folder=str(folder)) from error
    return WrittenModel(str(folder), model_bytes(shape), SHARDS, time.monotonic() - begun_s)


def model_bytes(shape: dict[str, Any]) -> int:
    """Of all tensors."""
    return sum(tensor_bytes(dtype, dims) for _, dtype, dims in llama_tensors(**shape))


def shape_for(size_bytes: int) -> dict[str, Any]:
    """A Llama of about that size: layers of one width, as many as it takes. Raises ConfigError below 20 MB."""
    if size_bytes < LEAST_SIZE_BYTES:
        raise ConfigError("the demo's model must have at least 20 MB", size_bytes=size_bytes)
    large = size_bytes >= 400_000_000
    shape: dict[str, Any] = {
        "hidden": 2048 if large else 512,
        "intermediate": 5632 if large else 1408,
        "heads": 16,
        "kv_heads": 8,
        "vocab": 32000 if large else 8000,
    }
    one, two = (model_bytes({**shape, "layers": layers}) for layers in (1, 2))
    return {**shape, "layers": max(1, round((size_bytes - one) / (two - one)) + 1)}
