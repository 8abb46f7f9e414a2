"""`longshore demo`: the whole way on one machine. A checkpoint is written, uploaded to a real S3 server, published,
loaded into four ranks in CPU memory, compared byte by byte with what the safetensors library reads, and loaded again
from the cache. Nothing is left behind, also after Ctrl-C (`cluster.command_line.demo`).

A Llama-shaped checkpoint of any size, in the Hugging Face layout: for the demo, benchmarks and tests.

Random but the same for the same arguments, finite in bfloat16, written block by block in little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from cluster import client, publishing
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.joining.connection import connect, disconnect
from cluster.joining.patience import sigterm_interrupts
from cluster.telemetry.report import LoadProgress, LoadReport
from cluster.telemetry.stats import Jsonable
from cluster.units import show_bytes
from storage.checkpoints.safetensors_header import encode_header, tensor_bytes
from storage.errors import IntegrityError
from storage.stores.embedded_s3 import EmbeddedS3

if TYPE_CHECKING:
    from storage.publishing.publish import PublishReport


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
    """Yield `size` bytes of bfloat16 with magnitudes of 2**-7 to 2**-3, in blocks."""
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
    """Return the bytes of all tensors."""
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


_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
GRACE_S = 5.0


@contextlib.contextmanager
def sandbox() -> Iterator[None]:
    """Every process begun inside is ended with the block; Ctrl-C and SIGTERM end it in order.

    This process becomes the parent of orphans, so that a daemon whose own parent is gone is found too.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        with sigterm_interrupts():
            yield
    finally:
        # From here on a second Ctrl-C or SIGTERM must not leave half of it.
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            _end_children(mine, before)
            importlib.import_module("storage.arena.arena_files").sweep()
        finally:
            signal.signal(signal.SIGINT, ignored)
            signal.signal(signal.SIGTERM, terminated)
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end_children(mine: psutil.Process, before: set[int]) -> None:
    for attempt in range(20):
        left = [child for child in mine.children(recursive=True) if child.pid not in before]
        if not left:
            return
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate() if attempt == 0 else child.kill()
        psutil.wait_procs(left, timeout=GRACE_S if attempt == 0 else 1.0)
    os.write(2, b"longshore: some processes of the demo could not be ended\n")


RANKS = 4
# What a Llama cuts by rows or by columns over tensor-parallel ranks; everything else every rank holds whole. Written
# out here a second time on purpose: the demo must not check Longshore's layout by Longshore's layout.
CUT_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
CUT_BY_COLUMNS = ("o_proj", "down_proj")

Say = Callable[[str], None]
ShowLoad = Callable[[LoadProgress], None]
ShowBytes = Callable[..., None]


@dataclass(frozen=True, slots=True)
class DemoReport(Jsonable):
    """The results of the demo."""

    model_bytes: int
    write_s: float
    publish_s: float
    publish: PublishReport
    first: LoadReport  # from the store
    again: LoadReport  # from the cache
    compared_tensors: int  # slices of all ranks, both loads
    compared_bytes: int


def run(
    size_bytes: int | None = None, *, say: Say, show_load: ShowLoad, show_publish: ShowBytes | None = None
) -> DemoReport:
    """Run the demo. Raises IntegrityError when one byte differs, any LongshoreError when a step fails."""
    model_size_bytes = model_bytes(shape_for(size_bytes or DEFAULT_SIZE_BYTES))
    config = _config(model_size_bytes)
    with sandbox(), tempfile.TemporaryDirectory(prefix="longshore-demo-") as folder:
        checkpoint, buckets = Path(folder, "checkpoint"), Path(folder, "buckets")
        buckets.mkdir()
        try:
            say(f"starting a local Ray cluster; writing a Llama in bf16 of {show_bytes(model_size_bytes)}")
            # Most of Ray's start is waiting. It has the main thread: Ray ends with the thread that started it.
            with ThreadPoolExecutor(1) as writer:
                writing = writer.submit(write_demo_model, checkpoint, size_bytes)
                connect("local", config)
            written = writing.result()
            with EmbeddedS3(buckets) as server:
                server.make_bucket("models")
                uri = "s3://models/llama-demo"
                store: dict[str, Any] = {
                    "endpoint_url": server.endpoint_url,
                    "region": server.region,
                    "credentials": server.credentials(),
                }
                say(f"uploading {written.shards} shards to an S3 server of this machine ({server.endpoint_url})")
                begun_s = time.monotonic()
                published = publishing.publish(str(checkpoint), uri, progress=show_publish, **store)
                publish_s = time.monotonic() - begun_s
                say(f"published {uri}; loading with tensor_parallel_size={RANKS}")
                options: dict[str, Any] = {
                    **store,
                    "tensor_parallel_size": RANKS,
                    "device": "cpu",
                    "address": "local",
                    "progress": show_load,
                    "config": config,
                }
                first, compared = _load_and_compare(uri, options, checkpoint)
                say("every slice equals what the safetensors library reads; loading again")
                again, compared_again = _load_and_compare(uri, options, checkpoint)
        finally:
            disconnect()
    return DemoReport(
        model_bytes=written.size_bytes,
        write_s=written.write_s,
        publish_s=publish_s,
        publish=published,
        first=first,
        again=again,
        compared_tensors=compared[0] + compared_again[0],
        compared_bytes=compared[1] + compared_again[1],
    )


def _load_and_compare(uri: str, options: dict[str, Any], checkpoint: Path) -> tuple[LoadReport, tuple[int, int]]:
    with client.load(uri, **options) as model:
        results = model.call(compare_with_safetensors, str(checkpoint), RANKS)
        different = [name for _, _, names in results for name in names]
        if different:
            raise IntegrityError(f"{len(different)} slices differ from the checkpoint: {', '.join(different[:5])}")
        return model.report, (sum(r[0] for r in results), sum(r[1] for r in results))


def compare_with_safetensors(shard: Any, checkpoint: str, ranks: int) -> tuple[int, int, list[str]]:
    """Inside a worker: (tensors, bytes compared, names of slices that differ or are missing)."""
    import torch
    from safetensors import safe_open

    expected_names = set()
    compared_bytes = 0
    different = []
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                expected_names.add(name)
                whole = file.get_slice(name)
                rows, columns = slice(None), slice(None)
                if any(part in name for part in CUT_BY_ROWS):
                    rows = _part(whole.get_shape()[0], shard.rank, ranks)
                elif any(part in name for part in CUT_BY_COLUMNS):
                    columns = _part(whole.get_shape()[1], shard.rank, ranks)
                expected = whole[rows, columns] if len(whole.get_shape()) == 2 else whole[rows]
                found = shard.get(name)
                # Compared as bytes: equal NaNs are equal, and so is nothing else.
                same = found is not None and found.shape == expected.shape and found.dtype == expected.dtype
                if not same or not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
                    different.append(f"rank {shard.rank}: {name}")
                compared_bytes += expected.numel() * expected.element_size()
    different += [f"rank {shard.rank}: {name} is not in the checkpoint" for name in set(shard) - expected_names]
    return len(expected_names), compared_bytes, different


def _part(length: int, rank: int, ranks: int) -> slice:
    return slice(length // ranks * rank, length // ranks * (rank + 1))


def _config(model_bytes: int) -> Config:
    """The user's settings; the arena holds the model, so that the second load can come from the cache."""
    config = Config.from_env()
    if config.arena_bytes:
        return config
    # Chunks end at tensors and rows, so slots are not all full; a few more are for what is in flight.
    return Config.from_env(arena_bytes=model_bytes * 5 // 4 + (768 << 20))
