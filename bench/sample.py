"""The models of a run, made once in tmpfs: published, the same files unpublished, a twin and a very small one.

ROOT/bench/model/      the model and its manifest
ROOT/bench/plain/      hard links to the same shards, without a manifest: what is not verified
ROOT/bench/twin/       same shapes, other bytes: loaded before the clock starts, so that memory is recycled and
                       nothing of the model is in any cache of ours
ROOT/bench/small/      a few megabytes: loaded before the clock starts, so that workers are warm and memory is not
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from bench.spec import BenchFile, Source, Spec
from cluster.client import publish
from cluster.command_line.demo import llama_tensors, write_llama_checkpoint
from storage.checkpoints.safetensors_header import tensor_bytes

BUCKET, TUNING_BUCKET = "bench", "tuning"
MODEL, PLAIN, XXH3, TWIN, SMALL = "model", "plain", "xxh3", "twin", "small"
_SMALL_BYTES = 8 << 20
_SHARD_BYTES = 512 << 20  # about; the shards of real checkpoints have 1 to 5 GB
_SPARE_BYTES = 2 << 30  # for arenas and the contenders' own shared memory


class NoRoom(Exception):
    """tmpfs has not the room for the models; the message has need and have."""


@dataclass(frozen=True, slots=True)
class Models:
    """Where the models are."""

    root: Path  # the folder of buckets
    files: tuple[BenchFile, ...]  # of the model; those of its hard links differ in their prefix only
    bucket: str = BUCKET

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def spec(self, source: Source, endpoint: str = "", ca_bundle: str = "") -> Spec:
        """What a contender is told, without options."""
        folder = str(self.root / self.bucket / MODEL)
        return Spec(source, endpoint, self.bucket, MODEL, folder, self.files, self.size_bytes, ca_bundle)


def make_models(root: Path, size_bytes: int, bucket_name: str = BUCKET) -> Models:
    """Write and publish them below `root`, which must be in tmpfs to mean something. Raises NoRoom."""
    root.mkdir(parents=True, exist_ok=True)
    need_bytes = 2 * size_bytes + _SPARE_BYTES if size_bytes > _SPARE_BYTES else 2 * size_bytes + size_bytes
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < need_bytes:
        raise NoRoom(f"{root} has {free_bytes / 1e9:.1f} GB free; the models and arenas need {need_bytes / 1e9:.1f} GB")
    bucket = root / bucket_name
    for name, size, seed in ((MODEL, size_bytes, 1), (TWIN, size_bytes, 2), (SMALL, _SMALL_BYTES, 3)):
        _write(bucket / name, size, seed)
        for linked in (PLAIN, XXH3) if name == MODEL else ():
            _link(bucket / name, bucket / linked)
        publish(bucket / name)
    publish(bucket / XXH3, hash_name="xxh3_128")
    shards = sorted((bucket / MODEL).glob("*.safetensors"))
    files = tuple(BenchFile(f"{MODEL}/{path.name}", str(path), path.stat().st_size) for path in shards)
    return Models(root, files, bucket_name)


def _link(folder: Path, to: Path) -> None:
    to.mkdir()
    for path in folder.iterdir():
        os.link(path, to / path.name)


def _write(folder: Path, size_bytes: int, seed: int) -> None:
    """A Llama of about that size: of the width of an 8B model where three layers of that fit, so that tensors have
    the size of real ones; narrower where not."""
    hidden = 256
    while hidden < 4096 and _llama_bytes(2 * hidden, 3) <= size_bytes:
        hidden *= 2
    one, two = _llama_bytes(hidden, 1), _llama_bytes(hidden, 2)
    layers = max(1, round((size_bytes - one) / (two - one)) + 1)
    shards = max(2, round(size_bytes / _SHARD_BYTES))
    write_llama_checkpoint(folder, shards=shards, seed=seed, **_shape(hidden, layers))


class _Shape(TypedDict):
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int


def _shape(hidden: int, layers: int) -> _Shape:
    """Proportions of a Llama 3, the vocabulary in proportion too."""
    heads = max(4, hidden // 128)
    return _Shape(
        hidden=hidden,
        layers=layers,
        intermediate=hidden * 7 // 2,
        heads=heads,
        kv_heads=max(1, heads // 4),
        vocab=hidden * 8,
    )


def _llama_bytes(hidden: int, layers: int) -> int:
    return sum(tensor_bytes(dtype, shape) for _, dtype, shape in llama_tensors(**_shape(hidden, layers)))
