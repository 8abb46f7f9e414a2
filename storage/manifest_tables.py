"""What no schema can say of a manifest: whether its tables fit each other."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from storage.checksum import DIGEST_SIZES
from storage.dtypes import DTYPE_BITS, MAX_DIMENSIONS, tensor_bytes
from storage.problems import Problems, quote

if TYPE_CHECKING:
    from storage.manifest import Manifest, ManifestShard, ManifestTensor


def table_problems(manifest: Manifest) -> Problems:
    """All the ways in which shards, chunks, tensors and files do not fit each other."""
    problems = Problems()
    if not manifest.shards:
        problems.add("no shards")
    _check_paths(manifest, problems)
    for shard in manifest.shards:
        _check_chunks(shard, manifest, problems)
    for file in manifest.files:
        if len(file.digest) != 2 * DIGEST_SIZES[manifest.hash]:
            problems.add(f"{quote(file.path)}: not a {manifest.hash} digest")
    _check_tensors(manifest, problems)
    return problems


def _check_paths(manifest: Manifest, problems: Problems) -> None:
    for kind, entries in (("shards", manifest.shards), ("files", manifest.files)):
        for one, other in pairwise(entry.path for entry in entries):
            if one >= other:
                problems.add(f"{kind} out of order or twice: {quote(one)} before {quote(other)}")
    for path in {shard.path for shard in manifest.shards} & {file.path for file in manifest.files}:
        problems.add(f"both a shard and another file: {quote(path)}")


def _check_chunks(shard: ManifestShard, manifest: Manifest, problems: Problems) -> None:
    label = f"shard {quote(shard.path)}"
    hex_characters = 2 * DIGEST_SIZES[manifest.hash]
    if len(shard.digest) != hex_characters or any(len(d) != hex_characters for d in shard.chunk_digests):
        problems.add(f"{label}: a digest is not a {manifest.hash} digest")
    if len(shard.chunk_ends) != len(shard.chunk_digests):
        problems.add(f"{label}: {len(shard.chunk_ends)} chunks and {len(shard.chunk_digests)} chunk digests")
    sizes = np.diff(np.array((0, *shard.chunk_ends), np.int64))
    if not len(sizes) or sizes.min() <= 0 or shard.chunk_ends[-1] != shard.size_bytes:
        problems.add(f"{label}: chunks do not tile its {shard.size_bytes} bytes")
    elif sizes.max() > manifest.chunk_bytes:
        problems.add(f"{label}: a chunk of {sizes.max()} bytes, more than {manifest.chunk_bytes}")


def _check_tensors(manifest: Manifest, problems: Problems) -> None:
    """Names once each, in order, without overlap, inside their shards, as large as dtype and shape say."""
    names: set[str] = set()
    sizes = [shard.size_bytes for shard in manifest.shards]
    before: tuple[int, int, int, str] = (0, 0, 0, "")
    for tensor in manifest.tensors:
        label = f"tensor {quote(tensor.name)}"
        if tensor.name in names:
            problems.add(f"{label} twice")
        names.add(tensor.name)
        if tensor.shard >= len(sizes):
            problems.add(f"{label}: shard {tensor.shard} of {len(sizes)}")
        elif not tensor.start <= tensor.end <= sizes[tensor.shard]:
            problems.add(f"{label}: bytes [{tensor.start}, {tensor.end}) of {sizes[tensor.shard]}")
        if expected := _size_problem(tensor):
            problems.add(f"{label}: {expected}")
        place = (tensor.shard, tensor.start, tensor.end, tensor.name)
        if place < before:
            problems.add(f"{label} out of order")
        elif tensor.shard == before[0] and tensor.start < before[2]:
            problems.add(f"{label} overlaps {quote(before[3])}")
        before = place


def _size_problem(tensor: ManifestTensor) -> str:
    if tensor.dtype not in DTYPE_BITS:
        return f"unknown dtype {quote(tensor.dtype)}"
    if len(tensor.shape) > MAX_DIMENSIONS:
        return f"{len(tensor.shape)} dimensions"
    try:
        expected = tensor_bytes(tensor.dtype, tensor.shape)
    except (OverflowError, ValueError) as error:
        return str(error)
    stored = tensor.end - tensor.start
    return "" if stored == expected else f"{stored} bytes stored, {tensor.dtype} {tensor.shape} takes {expected}"
