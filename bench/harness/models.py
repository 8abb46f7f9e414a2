"""The models that contenders load, made once in tmpfs.

ROOT/bench/model/      the model and its manifest
ROOT/bench/plain/      hard links to the same shards, without a manifest, so not verified
ROOT/bench/xxh3/       hard links to the same shards, published with XXH3-128
ROOT/bench/twin/       same shapes, other bytes; and twin-plain/, twin-xxh3/. No chunk of one has a key that a chunk of
                       another has, so that each is loaded from the store though the one before is in the cache
ROOT/bench/small/      a few megabytes: loaded before the clock starts
ROOT/part/...          the same, a quarter of the size
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from bench.harness.contender import BenchFile, Spec
from bench.harness.store import LISTING
from cluster.command_line.demo import llama_tensors, write_llama_checkpoint
from cluster.publishing import publish
from storage.checkpoints.safetensors_header import tensor_bytes

BUCKET, PART_BUCKET = "bench", "part"
PART = 4  # models of PART_BUCKET have that part of the size
MODEL, PLAIN, XXH3, SMALL = "model", "plain", "xxh3", "small"
TWIN, TWIN_PLAIN, TWIN_XXH3 = "twin", "twin-plain", "twin-xxh3"
_LINKED = {MODEL: (PLAIN, XXH3), TWIN: (TWIN_PLAIN, TWIN_XXH3)}
_SMALL_BYTES = 8 << 20
_SHARD_BYTES = 512 << 20  # about; the shards of real checkpoints have 1 to 5 GB
_SPARE_BYTES = 2 << 30  # for arenas and the contenders' own shared memory


class NoRoom(Exception):
    """Raised when tmpfs has too little room for the models."""


def make_models(root: Path, size_bytes: int, bucket_name: str = BUCKET) -> Spec:
    """Write and publish them below `root`, a folder of buckets in tmpfs. Returns the files' spec. Raises NoRoom."""
    root.mkdir(parents=True, exist_ok=True)
    need_bytes = 2 * size_bytes + _SPARE_BYTES if size_bytes > _SPARE_BYTES else 2 * size_bytes + size_bytes
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < need_bytes:
        raise NoRoom(f"{root} has {free_bytes / 1e9:.1f} GB free; the models and arenas need {need_bytes / 1e9:.1f} GB")
    bucket, first = root / bucket_name, 1 if bucket_name == BUCKET else 4  # the same seed would make equal chunks
    for seed, (name, size) in enumerate(((MODEL, size_bytes), (TWIN, size_bytes), (SMALL, _SMALL_BYTES)), first):
        write_model(bucket / name, size, seed)
        for linked in _LINKED.get(name, ()):
            shutil.copytree(bucket / name, bucket / linked, copy_function=os.link)
            if linked in (XXH3, TWIN_XXH3):
                publish(bucket / linked, hash_name="xxh3_128")
        publish(bucket / name)
    write_listing(bucket, MODEL)
    shards = sorted((bucket / MODEL).glob("*.safetensors"))
    files = tuple(BenchFile(f"{MODEL}/{path.name}", str(path), path.stat().st_size) for path in shards)
    return Spec("file", "", bucket_name, str(bucket / MODEL), files, sum(file.size_bytes for file in files))


def write_listing(bucket: Path, name: str) -> None:
    """Write what the store answers when S3's ListObjectsV2 asks for that folder."""
    found = "".join(
        f"<Contents><Key>{name}/{path.name}</Key><Size>{path.stat().st_size}</Size></Contents>"
        for path in sorted((bucket / name).glob("[!.]*"))
        if path.is_file()
    )
    head = f"<Name>{bucket.name}</Name><Prefix>{name}/</Prefix><IsTruncated>false</IsTruncated>"
    xml = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{head}{found}</ListBucketResult>'
    (bucket / name / LISTING).write_text(xml)


def write_model(folder: Path, size_bytes: int, seed: int) -> None:
    """Write a Llama of about that size."""
    shards = max(2, round(size_bytes / _SHARD_BYTES))
    write_llama_checkpoint(folder, shards=shards, seed=seed, **llama_shape(size_bytes))


def llama_shape(size_bytes: int) -> dict[str, Any]:
    """Return the sizes of a Llama of about that many bytes in bf16.

    It is as wide as an 8B model where two layers of that fit, so that tensors have the size of real ones: of each, a
    rank of eight wants whole chunks.
    """
    hidden = 256
    while hidden < 4096 and _llama_bytes(2 * hidden, 2) <= size_bytes * 1.05:
        hidden *= 2
    one, two = _llama_bytes(hidden, 1), _llama_bytes(hidden, 2)
    return _shape(hidden, max(1, round((size_bytes - one) / (two - one)) + 1))


def _shape(hidden: int, layers: int) -> dict[str, Any]:
    """Return the proportions of a Llama 3, but for a smaller vocabulary."""
    heads = max(8, hidden // 128)  # so that 8 ranks can share them
    sizes = {"heads": heads, "kv_heads": max(1, heads // 4), "intermediate": hidden * 7 // 2, "vocab": hidden * 2}
    return {"hidden": hidden, "layers": layers, **sizes}


def _llama_bytes(hidden: int, layers: int) -> int:
    return sum(tensor_bytes(dtype, shape) for _, dtype, shape in llama_tensors(**_shape(hidden, layers)))
