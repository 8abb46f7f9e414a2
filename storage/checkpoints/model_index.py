"""The index of one model: its shards, its tensors, and where each chunk begins and ends.

It is read from a published manifest (chunks have digests) or derived from the safetensors headers (chunks have none).

Pure functions decide from the header where the chunks of one shard end:

    [header][ small small small ][ rows of a large tensor ][ more rows ][ last rows ][ small small ]

The header has its own chunk or chunks, so that data chunks contain only tensor bytes. A large tensor shares no chunk.
Its chunks end with rows (slices along dimension 0). So a rank that needs whole tensors or rows reads few bytes that it
does not need. Only a row larger than half a chunk is cut inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from storage.checkpoints.safetensors_header import DTYPE_BITS, MAX_ELEMENTS, Header, HeaderTensor, atom_bytes
from storage.checksum import StoreChecksum
from storage.stores.object_store import ByteRange


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored safetensors file."""

    key: str  # relative to the model's root
    size_bytes: int
    etag: str | None  # the version that every read of this load must have
    checksum: StoreChecksum | None = None  # the store's own checksum, for a model without a manifest
    unchecked: str = ""  # why the store's checksum is missing


class _SizeBounds:
    """Bounds of a size for pydantic, which calls this where a manifest is read. Ranks do not import it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {**handler(source), "ge": 0, "le": MAX_ELEMENTS}


Size = Annotated[int, _SizeBounds()]


@dataclass(frozen=True, slots=True)
class Tensor:
    """The place, dtype and shape of one whole stored tensor: bytes `[start, end)` of a shard.

    A manifest has these fields of each tensor. Pydantic checks them, and makes this compact object of them.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "revalidate_instances": "always"}

    name: str
    dtype: str  # safetensors' own name: "BF16", "F32", "F8_E4M3"...
    shape: tuple[Size, ...]  # global shape; () for a 0-d tensor
    shard: Size  # index into ModelIndex.shards
    start: Size  # first byte, counted from the start of the shard's file
    end: Size  # first byte after; start == end for a tensor without elements

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the tensor in its shard."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that belongs to the model besides its weights: config, tokenizer, artifacts."""

    key: str
    size_bytes: int
    digest: str | None  # "<hash name>:<hex>"; None if the index is derived from headers


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The columns of n chunks, ordered by (shard, start). A chunk's id is its row."""

    shard: NDArray[np.int32]  # (n,) index into the shards
    start: NDArray[np.int64]  # (n,) first byte in the shard's file
    end: NDArray[np.int64]  # (n,) first byte after
    hash_name: str | None  # "blake3" or "xxh3_128"; None if there are no digests
    digests: NDArray[np.uint8] | None  # (n, digest size in bytes)

    def __len__(self) -> int:
        return len(self.shard)

    def byte_range(self, chunk: int) -> ByteRange:
        """Return the half-open byte range of the chunk in its shard."""
        return ByteRange(int(self.start[chunk]), int(self.end[chunk]))

    def digest(self, chunk: int) -> bytes | None:
        """Return the published digest of one chunk, or None if the model has no manifest."""
        return None if self.digests is None else self.digests[chunk].tobytes()

    def sizes_bytes(self) -> NDArray[np.int64]:
        """Sizes of all chunks in bytes, in chunk order."""
        return self.end - self.start

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest chunk in bytes; 0 if there is none."""
        return int(self.sizes_bytes().max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class ModelIndex:
    """All facts about a model that a plan needs."""

    revision: str  # digest of the manifest, or of every (key, size, ETag) without one
    source: Literal["manifest", "headers", "config"]  # "config" is an estimate of a model that is not stored
    shards: tuple[Shard, ...]
    tensors: tuple[Tensor, ...]  # in manifest order: by shard, then by start, then by name
    chunks: ChunkTable
    files: tuple[OtherFile, ...]
    signed_by: str = ""  # id of the trusted key that signed the manifest; empty if no signature was required
    notes: tuple[str, ...] = ()  # messages for users: what was skipped, what could not be checked

    @property
    def size_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(tensor.size_bytes for tensor in self.tensors)


MIB = 1 << 20
MIN_CHUNK_BYTES = MIB  # minimum for a published model
MAX_CHUNK_BYTES = 16 * MIB  # maximum of the format, which an arena slot must be able to hold
DEFAULT_CHUNK_BYTES = 8 * MIB
CUT_ALIGN_BYTES = 64  # cuts inside a row are multiples of this, times the dtype's atom, from the tensor's start


def chunk_bounds(header: Header, size_bytes: int, chunk_bytes: int) -> list[int]:
    """Return the ends of the chunks that tile `[0, size_bytes)`: chunk i is `[ends[i-1], ends[i])`.

    A tensor of at least a quarter of `chunk_bytes` has chunks of its own, of about equal size, with cuts between rows
    where they are not too large. Nothing but its dtype and shape decides where they lie in it. So two revisions of a
    model compare chunk by chunk, in whatever files their tensors are. Smaller tensors that follow each other share
    chunks. No chunk is larger than `chunk_bytes`. One is smaller than a quarter of it only if it ends such a run.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    ends = list(range(chunk_bytes, header.data_start, chunk_bytes))
    if header.data_start <= size_bytes:
        ends.append(header.data_start)
    begin = header.data_start  # of the small tensors that have no chunk yet
    for tensor in header.tensors:
        is_large = 4 * (tensor.end - tensor.start) >= chunk_bytes
        if begin < tensor.start and (is_large or tensor.end - begin > chunk_bytes):
            ends.append(tensor.start)
            begin = tensor.start
        if is_large:
            ends += _cuts(tensor, chunk_bytes)
            begin = tensor.end
    if begin < size_bytes:
        ends.append(size_bytes)
    return ends


def fixed_bounds(size_bytes: int, chunk_bytes: int) -> list[int]:
    """Return the ends of equal chunks, for a file without tensors; none for an empty file."""
    return [*range(chunk_bytes, size_bytes, chunk_bytes), size_bytes] if size_bytes else []


def row_step_bytes(tensor: HeaderTensor) -> int:
    """Return the size of the fewest whole rows that fill whole bytes; 0 if the tensor has no rows.

    That is one row for nearly every tensor. `("F4", (8, 3))` has rows of 12 bits, so it takes two rows of 3 bytes.
    """
    if not tensor.shape or tensor.end == tensor.start:
        return 0
    row_bits = DTYPE_BITS[tensor.dtype] * math.prod(tensor.shape[1:])
    return row_bits * (8 // math.gcd(row_bits, 8)) // 8


def _cuts(tensor: HeaderTensor, chunk_bytes: int) -> list[int]:
    """Return the ends of the chunks of one tensor: between rows, else aligned, else where they fall."""
    size_bytes = tensor.end - tensor.start
    steps = (row_step_bytes(tensor), CUT_ALIGN_BYTES * atom_bytes(tensor.dtype))
    step = next((step for step in steps if 0 < 2 * step <= chunk_bytes), 1)
    count = -(-size_bytes // step)  # of steps, of which the last may be shorter
    chunks = -(-count // (chunk_bytes // step))
    return [*(tensor.start + step * (count * number // chunks) for number in range(1, chunks)), tensor.end]
