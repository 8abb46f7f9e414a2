"""One model as the rest of the code sees it: shards, tensors and the table of chunks.

Read from a published manifest (chunks carry digests) or derived from the safetensors headers (they do not).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from storage.ranges import ByteRange
from storage.store_checksum import StoreChecksum


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored safetensors file."""

    key: str  # relative to the model's root
    size_bytes: int
    etag: str | None  # the version every read of this load is pinned to
    checksum: StoreChecksum | None = None  # the store's own, of a model without a manifest
    unchecked: str = ""  # why there is none


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one whole tensor is stored."""

    name: str
    dtype: str  # safetensors' own name: "BF16", "F32", "F8_E4M3"...
    shape: tuple[int, ...]  # global shape; () for a 0-d tensor
    shard: int  # index into ModelIndex.shards
    start: int  # first byte, counted from the start of the shard's file
    end: int  # first byte after; start == end for a tensor without elements

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file kept along with the weights: config, tokenizer, artifacts."""

    key: str
    size_bytes: int
    digest: str | None  # "<hash name>:<hex>"; None when derived


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Columns of n chunks, ordered by (shard, start). A chunk's id is its row."""

    shard: NDArray[np.int32]  # (n,) index into the shards
    start: NDArray[np.int64]  # (n,) first byte in the shard's file
    end: NDArray[np.int64]  # (n,) first byte after
    hash_name: str | None  # "blake3" or "xxh3_128"; None: no digests
    digests: NDArray[np.uint8] | None  # (n, digest size in bytes)

    def __len__(self) -> int:
        return len(self.shard)

    def byte_range(self, chunk: int) -> ByteRange:
        return ByteRange(int(self.start[chunk]), int(self.end[chunk]))

    def digest(self, chunk: int) -> bytes | None:
        """The published digest of one chunk, or None when the model has no manifest."""
        return None if self.digests is None else self.digests[chunk].tobytes()

    def sizes_bytes(self) -> NDArray[np.int64]:
        return self.end - self.start

    @property
    def largest_bytes(self) -> int:
        """Of a chunk; 0 when there is none."""
        return int(self.sizes_bytes().max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class ModelIndex:
    """Everything a plan needs to know of a model."""

    revision: str  # digest of the manifest, else of every (key, size, ETag)
    source: Literal["manifest", "headers", "config"]  # "config": an estimate, nothing is stored
    shards: tuple[Shard, ...]
    tensors: tuple[Tensor, ...]  # in manifest order: by shard, then by start, then by name
    chunks: ChunkTable
    files: tuple[OtherFile, ...]
    signed_by: str = ""  # id of the trusted key that signed the manifest; empty where no signature was asked for
    notes: tuple[str, ...] = ()  # for people: what was skipped, what could not be checked

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)
