"""Models in memory for planning tests: an index, its shards' bytes, and a load carried out on arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cluster.command_line.demo import llama_tensors
from cluster.planning.plan import LoadPlan, RankPlan, TensorSlice
from cluster.planning.read_items import expand_read_items
from storage.checkpoints.model_index import ChunkTable, ModelIndex, Shard, Tensor
from storage.checkpoints.safetensors_header import DTYPE_BITS
from tests.support.checkpoints import safetensors_bytes

NF4_STATE = ".quant_state.bitsandbytes__nf4"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class StoredModel:
    """An index, and what a store would hold for it."""

    index: ModelIndex
    files: tuple[Bytes, ...]  # bytes of each shard


def store_arrays(
    arrays: Mapping[str, tuple[str, NDArray[np.generic]]],
    shards: int = 1,
    chunk_bytes: int = 1 << 20,
    chunk_ends: Sequence[Sequence[int]] | None = None,
) -> StoredModel:
    """Arrays by name, each with its safetensors dtype, dealt out to `shards` files behind headers of junk.

    Chunks end at `chunk_ends[shard]` (and at each file's end), else every `chunk_bytes`.
    """
    contents = [[np.full(56 + 8 * shard, 0xEE, np.uint8)] for shard in range(shards)]
    sizes = [len(pieces[0]) for pieces in contents]
    tensors = []
    for number, (name, (dtype, array)) in enumerate(arrays.items()):
        shard = number % shards
        raw = np.frombuffer(array.tobytes(), np.uint8)
        tensors.append(Tensor(name, dtype, array.shape, shard, sizes[shard], sizes[shard] + len(raw)))
        contents[shard].append(raw)
        sizes[shard] += len(raw)
    tensors.sort(key=lambda tensor: (tensor.shard, tensor.start, tensor.name))
    files = tuple(np.concatenate(pieces) for pieces in contents)
    if chunk_ends is None:
        chunk_ends = [range(chunk_bytes, size, chunk_bytes) for size in sizes]
    index = ModelIndex(
        revision="test",
        source="headers",
        shards=tuple(Shard(f"model-{shard}.safetensors", size, None) for shard, size in enumerate(sizes)),
        tensors=tuple(tensors),
        chunks=cut_into_chunks(sizes, chunk_ends),
        files=(),
    )
    return StoredModel(index, files)


def cut_into_chunks(sizes: Sequence[int], ends: Sequence[Sequence[int]]) -> ChunkTable:
    """Chunks that tile shards of `sizes` bytes and end at `ends` (those inside the shard) and at its end."""
    shard, start, end = [], [], []
    for number, size in enumerate(sizes):
        borders = sorted({0, size, *(cut for cut in ends[number] if 0 < cut < size)})
        shard += [number] * (len(borders) - 1)
        start += borders[:-1]
        end += borders[1:]
    return ChunkTable(np.array(shard, np.int32), np.array(start, np.int64), np.array(end, np.int64), None, None)


def carry_out(plan: LoadPlan, rank: RankPlan, files: Sequence[Bytes]) -> tuple[dict[str, Bytes], int]:
    """The bytes of each slice of a rank after every read item was copied once, and the bytes copied.

    Checks on the way that no byte of a segment is written twice and that no copy leaves its chunk.
    """
    sizes = (*rank.segment_bytes, *(each.source.size_bytes for each in rank.staged))
    segments = [np.zeros(size, np.uint8) for size in sizes]
    written = [np.zeros(size, np.uint8) for size in sizes]
    items = expand_read_items(rank.sources, plan.chunks)
    copied = 0
    for chunk_id in rank.chunk_ids:
        chunk = plan.chunks.byte_range(int(chunk_id))
        data = files[plan.chunks.shard[chunk_id]][chunk.start : chunk.end]
        rows = items.for_chunk(int(chunk_id))
        for row in range(rows.start, rows.stop):
            run = int(items.run_bytes[row])
            segment = int(items.segment[row])
            for number in range(int(items.count[row])):
                src = int(items.src_offset[row] + number * items.src_stride[row])
                dest = int(items.dest_offset[row] + number * items.dest_stride[row])
                assert src >= 0
                assert src + run <= len(data)
                assert dest + run <= len(segments[segment])
                segments[segment][dest : dest + run] = data[src : src + run]
                written[segment][dest : dest + run] += 1
                copied += run
    for piece in rank.sources:
        end = piece.segment_offset + piece.filled_bytes
        assert (written[piece.segment][piece.segment_offset : end] == 1).all(), f"{piece.name}: not written once"
        place = slice(piece.segment_offset, piece.segment_offset + piece.size_bytes)
        assert not written[piece.segment][end : place.stop].any(), f"{piece.name}: its padding was written"
    _convert(rank, segments)
    places = {piece.name: (piece.segment, piece.segment_offset, piece.size_bytes) for piece in rank.slices}
    return {name: segments[at][begin : begin + size] for name, (at, begin, size) in places.items()}, copied


def _convert(rank: RankPlan, segments: Sequence[Bytes]) -> None:
    """Convert the staged tensors."""
    if not rank.staged:
        return
    import torch

    from actors.devices.convert import convert

    for staged in rank.staged:
        slices = rank.slices[staged.first : staged.end]
        made = [
            torch.from_numpy(segments[piece.segment])[piece.segment_offset : piece.segment_offset + piece.size_bytes]
            for piece in slices
        ]
        convert(staged, torch.from_numpy(segments[staged.source.segment]), slices, made)


def assemble(pieces: Iterable[tuple[TensorSlice, Bytes]]) -> dict[str, tuple[str, tuple[int, ...], Bytes]]:
    """Return whole tensors, as (dtype, shape, bytes), from what ranks hold of them.

    Every byte of them must be held, all ranks must agree, and padding must be zero. For elements of whole bytes.
    NF4's record of a shape is left out: it is each rank's own.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], Bytes]] = {}
    known: dict[str, Bytes] = {}
    for piece, data in pieces:
        if piece.name.endswith(NF4_STATE):
            continue
        width = DTYPE_BITS[piece.dtype] // 8
        shape = (*piece.shape, width)
        if piece.name not in tensors:
            tensors[piece.name] = (piece.dtype, piece.shape, np.zeros(shape, np.uint8))
            known[piece.name] = np.zeros(shape, np.uint8)
        dtype, full, whole = tensors[piece.name]
        assert (dtype, full) == (piece.dtype, piece.shape)
        mine = data.reshape(*piece.region.sizes, width)
        padding = np.ones(mine.shape, bool)
        for (offsets, sizes), place in piece.region.boxes():
            there = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            here = tuple(slice(offset, offset + size) for offset, size in zip(place, sizes, strict=True))
            held = known[piece.name][there].astype(bool)
            assert (whole[there][held] == mine[here][held]).all(), f"{piece.name}: ranks differ"
            whole[there] = mine[here]
            known[piece.name][there] = 1
            padding[here] = False
        assert not mine[padding].any(), f"{piece.name}: padding is not zero"
    missing = [name for name, written in known.items() if not written.all()]
    assert not missing, f"held by no rank: {missing}"
    return tensors


def llama_shapes(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint as transformers saves it."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "vocab": vocabulary, "tie_word_embeddings": tied}
    return {name: shape for name, _, shape in llama_tensors(layers=layers, hidden=hidden, intermediate=inner, **sizes)}


def write_linear_llama(folder: Path, layers: int = 4) -> Path:
    """A Llama in the Hugging Face layout, of which nearly all bytes are in linear layers. The folder."""
    folder.mkdir(exist_ok=True)
    tensors = [(name, "BF16", shape) for name, shape in llama_shapes(layers, 256, 512, 8, 4, 64).items()]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return folder


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, NDArray[np.uint16]]:
    """A random 16-bit array for each shape."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 1 << 16, math.prod(shape), np.uint16).reshape(shape) for name, shape in shapes.items()
    }


def as_bf16(arrays: Mapping[str, NDArray[np.uint16]]) -> dict[str, tuple[str, NDArray[np.generic]]]:
    """The same arrays labelled BF16, as `store_arrays` takes them."""
    return {name: ("BF16", array) for name, array in arrays.items()}
