"""Models of any size without one byte of their weights: a manifest of experts, an index of a dense decoder.

Names, shapes, order in the shards and chunk borders are those of a real checkpoint of that shape. Digests are random
numbers from a seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.command_line.demo import DTYPE, llama_tensors
from cluster.fit.needs import min_slots
from cluster.layouts.model_config import ModelConfig
from cluster.messages import NodeJob
from storage.checkpoints.checkpoint import chunk_table
from storage.checkpoints.manifest import Manifest, ManifestShard
from storage.checkpoints.model_index import ModelIndex, Shard, Tensor, chunk_bounds
from storage.checkpoints.safetensors_header import Header, HeaderTensor, encode_header, tensor_bytes
from storage.publishing.publish import publish
from storage.stores.local import LocalStore

MIB = 1 << 20
HEADER_BYTES_PER_TENSOR = 128  # about what safetensors needs for one entry

# How tensor parallelism cuts the mixture of experts, as `layout_rules` of a load would say.
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

SMALL_RULES = {"**": "row"}  # the cut with the most runs, for the model of many small tensors
_SMALL_SHAPE = (16, 32)  # 1 kB in bf16
_SMALL_MODULES = ("gate_proj", "up_proj", "down_proj")

Named = tuple[str, tuple[int, ...]]  # name and shape of a tensor


@dataclass(frozen=True)
class DenseShape:
    """A Llama-shaped decoder. The default has 70 billion parameters."""

    layers: int = 80
    hidden: int = 8192
    inner: int = 28_672
    heads: int = 64
    kv_heads: int = 8
    vocabulary: int = 128_256
    shards: int = 30

    def config(self) -> ModelConfig:
        """Return the part of config.json that cutting needs."""
        return ModelConfig(
            model_type="llama",
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            hidden_size=self.hidden,
        )

    def tensors(self) -> Iterator[Named]:
        """Yield names and shapes, in the order of the checkpoint."""
        for name, _, shape in llama_tensors(
            hidden=self.hidden,
            layers=self.layers,
            intermediate=self.inner,
            heads=self.heads,
            kv_heads=self.kv_heads,
            vocab=self.vocabulary,
        ):
            yield name, shape


@dataclass(frozen=True)
class MoeShape(DenseShape):
    """A mixture of experts. The default has a trillion parameters in 130,000 tensors."""

    layers: int = 90
    hidden: int = 4096
    inner: int = 1856  # of one expert
    vocabulary: int = 131_072
    shards: int = 1000
    experts: int = 480

    def tensors(self) -> Iterator[Named]:
        for name, shape in super().tensors():
            front, is_inner, which = name.partition(".mlp.")
            if not is_inner:
                yield name, shape
            elif which == "gate_proj.weight":  # the first of three: all experts take their place
                yield f"{front}.mlp.gate.weight", (self.experts, self.hidden)
                for expert in range(self.experts):
                    yield f"{front}.mlp.experts.{expert}.gate_proj.weight", (self.inner, self.hidden)
                    yield f"{front}.mlp.experts.{expert}.up_proj.weight", (self.inner, self.hidden)
                    yield f"{front}.mlp.experts.{expert}.down_proj.weight", (self.hidden, self.inner)


def moe_manifest(shape: MoeShape, *, chunk_bytes: int = 16 * MIB) -> Manifest:
    """Return the manifest of a published model of that shape. Same input, same manifest."""
    chance = random.Random(0)
    shards: list[ManifestShard] = []
    tensors: list[Tensor] = []
    for number, header in enumerate(_headers(shape)):
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
            Tensor(name=t.name, dtype=DTYPE, shape=t.shape, shard=number, start=t.start, end=t.end)
            for t in header.tensors
        ]
    return Manifest.build(hash_name="blake3", chunk_bytes=chunk_bytes, shards=shards, tensors=tensors, files=())


def write_small_tensors(folder: Path, count: int, *, published: bool) -> None:
    """Write a model of `count` tensors of 1 kB in one file, named as those of a mixture of experts."""
    names = (
        f"model.layers.{layer}.mlp.experts.{expert}.{module}.weight"
        for layer in itertools.count()
        for expert in range(128)
        for module in _SMALL_MODULES
    )
    folder.mkdir()
    (folder / "config.json").write_text(DenseShape().config().model_dump_json())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encode_header((name, DTYPE, _SMALL_SHAPE) for name in itertools.islice(names, count)))
        file.write(random.Random(0).randbytes(count * tensor_bytes(DTYPE, _SMALL_SHAPE)))
    if published:
        publish(LocalStore(folder))


def dense_index(shape: DenseShape, *, chunk_bytes: int = 8 * MIB) -> ModelIndex:
    """Return the index of an unpublished model of that shape."""
    headers = _headers(shape)
    return ModelIndex(
        revision="made up",
        source="headers",
        shards=tuple(
            Shard(_shard_name(number, shape.shards), _file_bytes(header), None) for number, header in enumerate(headers)
        ),
        tensors=tuple(
            Tensor(t.name, DTYPE, t.shape, number, t.start, t.end)
            for number, header in enumerate(headers)
            for t in header.tensors
        ),
        chunks=chunk_table([chunk_bounds(header, _file_bytes(header), chunk_bytes) for header in headers]),
        files=(),
    )


def node_job(shared: bytes, ranks: Sequence[int]) -> NodeJob:
    """Return the job of a node that loads such a model with these ranks."""
    return NodeJob(
        load_id="load",
        attempt=1,
        shared=shared,
        store_identity="made up",
        ranks=tuple(ranks),
        done=frozenset(),
        min_slots=min_slots(len(ranks)),
        chunk_attempts=3,
        lease_deadline_s=3600.0,
        record=b"",
    )


def _headers(shape: DenseShape) -> list[Header]:
    """Deal out the tensors in order, so that shards have about equal sizes."""
    named = list(shape.tensors())
    total_bytes = sum(tensor_bytes(DTYPE, dims) for _, dims in named)
    headers = []
    at = laid_bytes = 0
    for number in range(shape.shards):
        first = at
        while at < len(named) and laid_bytes < total_bytes * (number + 1) // shape.shards:
            laid_bytes += tensor_bytes(DTYPE, named[at][1])
            at += 1
        headers.append(_header(named[first:at]))
    return headers


def _header(named: list[Named]) -> Header:
    data_start = 8 + HEADER_BYTES_PER_TENSOR * (len(named) + 1)
    at = data_start
    tensors = []
    for name, dims in named:
        end = at + tensor_bytes(DTYPE, dims)
        tensors.append(HeaderTensor(name, DTYPE, dims, at, end))
        at = end
    return Header(tuple(tensors), {}, data_start)


def _file_bytes(header: Header) -> int:
    return max((tensor.end for tensor in header.tensors), default=header.data_start)


def _shard_name(number: int, shards: int) -> str:
    return f"model-{number + 1:05}-of-{shards:05}.safetensors"
