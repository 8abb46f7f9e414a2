"""Models of any size without one byte of their weights: a manifest of experts, an index of a dense decoder.

Names, shapes, order in the shards and chunk borders are those that a real checkpoint of that shape would have; digests
are random numbers from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.layouts.model_config import ModelConfig
from storage.checkpoints.checkpoint import chunk_table
from storage.checkpoints.manifest import Manifest, ManifestShard, ManifestTensor
from storage.checkpoints.model_index import ModelIndex, Shard, Tensor, chunk_bounds
from storage.checkpoints.safetensors_header import Header, HeaderTensor, tensor_bytes

MIB = 1 << 20
HEADER_BYTES_PER_TENSOR = 128  # about what safetensors needs for one entry

# How tensor parallelism cuts it, as `layout_rules` of a load would say.
MOE_RULES = {
    "model.embed_tokens.weight": "vocabulary",
    "model.layers.*.self_attn.q_proj.weight": "heads",
    "model.layers.*.self_attn.k_proj.weight": "kv_heads",
    "model.layers.*.self_attn.v_proj.weight": "kv_heads",
    "model.layers.*.self_attn.o_proj.weight": "row",
    "model.layers.*.mlp.experts.*.gate_proj.weight": "column",
    "model.layers.*.mlp.experts.*.up_proj.weight": "column",
    "model.layers.*.mlp.experts.*.down_proj.weight": "row",
    "model.layers.*.mlp.gate.weight": "replicate",
    "model.layers.*.input_layernorm.weight": "replicate",
    "model.layers.*.post_attention_layernorm.weight": "replicate",
    "model.norm.weight": "replicate",
    "lm_head.weight": "vocabulary",
}


@dataclass(frozen=True)
class MoeShape:
    """What decides the size; the default has a trillion parameters in 130,000 tensors."""

    layers: int = 90
    experts: int = 480
    hidden: int = 4096
    inner: int = 1856  # of one expert
    heads: int = 64
    kv_heads: int = 8
    vocabulary: int = 131_072
    shards: int = 1000

    def config(self) -> dict[str, object]:
        """The part of config.json that cutting needs."""
        return {
            "model_type": "a mixture of experts",
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the checkpoint."""
        kv_rows = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            front = f"model.layers.{layer}"
            yield f"{front}.input_layernorm.weight", (self.hidden,)
            yield f"{front}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{front}.self_attn.k_proj.weight", (kv_rows, self.hidden)
            yield f"{front}.self_attn.v_proj.weight", (kv_rows, self.hidden)
            yield f"{front}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{front}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{front}.mlp.gate.weight", (self.experts, self.hidden)
            for expert in range(self.experts):
                yield f"{front}.mlp.experts.{expert}.gate_proj.weight", (self.inner, self.hidden)
                yield f"{front}.mlp.experts.{expert}.up_proj.weight", (self.inner, self.hidden)
                yield f"{front}.mlp.experts.{expert}.down_proj.weight", (self.hidden, self.inner)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)


def moe_manifest(shape: MoeShape, *, chunk_bytes: int = 16 * MIB, dtype: str = "BF16", seed: int = 0) -> Manifest:
    """A published model of that shape. Same input, same manifest."""
    chance = random.Random(seed)
    shards: list[ManifestShard] = []
    tensors: list[ManifestTensor] = []
    for number, header in enumerate(_headers(list(shape.tensors()), shape.shards, dtype)):
        ends = chunk_bounds(header, _file_bytes(header), chunk_bytes)
        shards.append(
            ManifestShard(
                path=_shard_name(number, shape.shards),
                size_bytes=_file_bytes(header),
                etag=f'"{chance.getrandbits(128):032x}"',
                source_etag=None,
                checked_by="read-twice",
                digest=f"{chance.getrandbits(256):064x}",
                chunk_ends=tuple(ends),
                chunk_digests=tuple(f"{chance.getrandbits(256):064x}" for _ in ends),
            )
        )
        tensors += [
            ManifestTensor(name=t.name, dtype=dtype, shape=t.shape, shard=number, start=t.start, end=t.end)
            for t in header.tensors
        ]
    return Manifest.build(hash_name="blake3", chunk_bytes=chunk_bytes, shards=shards, tensors=tensors, files=())


@dataclass(frozen=True)
class DenseShape:
    """A Llama-shaped decoder; the default has 70 billion parameters."""

    layers: int = 80
    hidden: int = 8192
    inner: int = 28_672
    heads: int = 64
    kv_heads: int = 8
    vocabulary: int = 128_256
    shards: int = 30

    def config(self) -> ModelConfig:
        """What cutting needs of it."""
        return ModelConfig(
            model_type="llama",
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            hidden_size=self.hidden,
        )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the checkpoint."""
        kv_rows = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            front = f"model.layers.{layer}"
            yield f"{front}.input_layernorm.weight", (self.hidden,)
            yield f"{front}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{front}.self_attn.k_proj.weight", (kv_rows, self.hidden)
            yield f"{front}.self_attn.v_proj.weight", (kv_rows, self.hidden)
            yield f"{front}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{front}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{front}.mlp.gate_proj.weight", (self.inner, self.hidden)
            yield f"{front}.mlp.up_proj.weight", (self.inner, self.hidden)
            yield f"{front}.mlp.down_proj.weight", (self.hidden, self.inner)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)


def dense_index(shape: DenseShape, *, chunk_bytes: int = 8 * MIB, dtype: str = "BF16") -> ModelIndex:
    """What a plan knows of a model of that shape, unpublished."""
    headers = _headers(list(shape.tensors()), shape.shards, dtype)
    return ModelIndex(
        revision="made up",
        source="headers",
        shards=tuple(
            Shard(_shard_name(number, shape.shards), _file_bytes(header), None) for number, header in enumerate(headers)
        ),
        tensors=tuple(
            Tensor(t.name, dtype, t.shape, number, t.start, t.end)
            for number, header in enumerate(headers)
            for t in header.tensors
        ),
        chunks=chunk_table([chunk_bounds(header, _file_bytes(header), chunk_bytes) for header in headers]),
        files=(),
    )


def _headers(named: list[tuple[str, tuple[int, ...]]], shards: int, dtype: str) -> list[Header]:
    """Tensors dealt out in order, so that shards have about equal sizes."""
    total_bytes = sum(tensor_bytes(dtype, dims) for _, dims in named)
    headers = []
    at = laid_bytes = 0
    for number in range(shards):
        first = at
        while at < len(named) and laid_bytes < total_bytes * (number + 1) // shards:
            laid_bytes += tensor_bytes(dtype, named[at][1])
            at += 1
        headers.append(_header(named[first:at], dtype))
    return headers


def _header(named: list[tuple[str, tuple[int, ...]]], dtype: str) -> Header:
    data_start = 8 + HEADER_BYTES_PER_TENSOR * (len(named) + 1)
    at = data_start
    tensors = []
    for name, dims in named:
        end = at + tensor_bytes(dtype, dims)
        tensors.append(HeaderTensor(name, dtype, dims, at, end))
        at = end
    return Header(tuple(tensors), {}, data_start)


def _file_bytes(header: Header) -> int:
    return max((tensor.end for tensor in header.tensors), default=header.data_start)


def _shard_name(number: int, shards: int) -> str:
    return f"model-{number + 1:05}-of-{shards:05}.safetensors"
