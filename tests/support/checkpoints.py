"""Checkpoints for tests: odd ones, random ones, and a tiny Llama."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from cluster.command_line.demo import write_llama_checkpoint
from storage.checkpoints.safetensors_header import DTYPE_BITS, encode_header, tensor_bits, tensor_bytes

TensorSpec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape
INDEX_KEY = "model.safetensors.index.json"


def safetensors_bytes(tensors: Sequence[TensorSpec], seed: int = 0, metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file with random contents, tensors stored in the order given."""
    size = sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
    return encode_header(tensors, metadata) + np.random.default_rng(seed).bytes(size)


def raw_header(header: object, data: bytes = b"") -> bytes:
    """A file with any JSON at all for its header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def sharded_objects(parts: Sequence[Sequence[TensorSpec]], seed: int = 0) -> dict[str, bytes]:
    """Hugging Face layout as key -> bytes: one shard per part, index and config."""
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    objects = {
        name: safetensors_bytes(part, seed + i, {"format": "pt"})
        for i, (name, part) in enumerate(zip(names, parts, strict=True))
    }
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor, _, _ in part}
    objects[INDEX_KEY] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    objects["config.json"] = b'{"model_type": "odd"}'
    return objects


def odd_parts() -> list[list[TensorSpec]]:
    """Two shards of everything the format allows: each dtype, 0-d, zero-size, one row, Unicode names."""
    every_dtype: list[TensorSpec] = [(f"dtype.{name}", name, (4, 6)) for name in DTYPE_BITS]
    odd: list[TensorSpec] = [
        ("scalar", "F32", ()),
        ("empty", "BF16", (0,)),
        ("empty.matrix", "F16", (3, 0, 5)),
        ("Gewichte.für.Schicht-0", "BF16", (5, 3)),
        ("層.重み", "I64", (2,)),
        ("emoji.🚢", "U8", (7,)),
        ("one.row", "F32", (1, 9)),
        ("tail.empty", "I8", (0, 4)),
    ]
    return [every_dtype, odd]


def flat_objects(tensors: int = 40, rows: int = 64, seed: int = 1) -> dict[str, bytes]:
    """One shard; each tensor is 16 bytes a row."""
    specs = [(f"layers.{number}.weight", "F32", (rows, 4)) for number in range(tensors)]
    return {"model.safetensors": safetensors_bytes(specs, seed)}


def odd_objects() -> dict[str, bytes]:
    """`odd_parts` as stored objects."""
    return sharded_objects(odd_parts(), seed=7)


def write_objects(folder: Path, objects: Mapping[str, bytes]) -> None:
    """Objects as files below `folder`."""
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read_objects(folder: Path) -> dict[str, bytes]:
    """Files below `folder` as objects."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def write_tiny_llama(folder: Path, *, shards: int = 2, seed: int = 0) -> None:
    """A Llama of about 3 MB: 4 heads, 2 KV heads, 2 layers."""
    write_llama_checkpoint(
        folder,
        hidden=128,
        layers=2,
        intermediate=352,
        heads=4,
        kv_heads=2,
        vocab=4096,
        shards=shards,
        seed=seed,
    )


def tensor_specs(max_side: int = 6, max_tensors: int = 8) -> st.SearchStrategy[list[TensorSpec]]:
    """Lists of valid tensors: any dtype, 0 to 3 dimensions, sizes from 0, names of any valid text."""
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda n: n != "__metadata__")
    shapes = st.lists(st.integers(0, max_side), max_size=3).map(tuple)
    return st.lists(
        st.tuples(names, st.sampled_from(sorted(DTYPE_BITS)), shapes).filter(
            lambda spec: tensor_bits(spec[1], spec[2]) % 8 == 0
        ),
        max_size=max_tensors,
        unique_by=lambda spec: spec[0],
    )
