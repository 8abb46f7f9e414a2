"""Where the chunks of one shard end: decided once, from the header, by a pure function.

    [header][ small small small ][ rows of a large tensor ][ more rows ][ last rows, small ]

The header region is cut on its own, so that data chunks hold nothing but tensor bytes. A data chunk ends
where a tensor ends, else where a row (a slice along dimension 0) ends, so that a rank that wants whole
tensors or rows touches few chunks it has no use for. Only a row larger than half a chunk is cut inside.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from storage.checkpoints.dtypes import DTYPE_BITS, atom_bytes
from storage.checkpoints.safetensors_header import Header, HeaderTensor

MIB = 1 << 20
MIN_CHUNK_BYTES = MIB  # of a published model
MAX_CHUNK_BYTES = 16 * MIB  # the format's maximum: what an arena slot must be able to hold
DEFAULT_CHUNK_BYTES = 8 * MIB
CUT_ALIGN_BYTES = 64  # cuts inside a row keep this distance from the tensor's start, times the dtype's atom


def chunk_bounds(header: Header, size_bytes: int, chunk_bytes: int) -> list[int]:
    """Ends of the chunks that tile `[0, size_bytes)`: chunk i is `[ends[i-1], ends[i])`.

    No chunk is larger than `chunk_bytes`; a data chunk is at least half of that, but for the shard's last.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, not {chunk_bytes}")
    ends = list(range(chunk_bytes, header.data_start, chunk_bytes))
    if header.data_start <= size_bytes:
        ends.append(header.data_start)
    tensors = [tensor for tensor in header.tensors if tensor.end > tensor.start]
    tensor_ends = [tensor.end for tensor in tensors]
    at = header.data_start
    while at < size_bytes:
        at = _chunk_end(at, size_bytes, chunk_bytes, tensors, tensor_ends)
        ends.append(at)
    return ends


def fixed_bounds(size_bytes: int, chunk_bytes: int) -> list[int]:
    """Ends of equal chunks, for files that have no tensors; none for an empty file."""
    return [*range(chunk_bytes, size_bytes, chunk_bytes), size_bytes] if size_bytes else []


def row_step_bytes(tensor: HeaderTensor) -> int:
    """Bytes of the fewest whole rows that fill whole bytes; 0 when the tensor has no rows.

    One row for nearly every tensor; `("F4", (8, 3))` has rows of 12 bits: two rows, 3 bytes.
    """
    if not tensor.shape or tensor.end == tensor.start:
        return 0
    row_bits = DTYPE_BITS[tensor.dtype] * math.prod(tensor.shape[1:])
    return row_bits * (8 // math.gcd(row_bits, 8)) // 8


def _chunk_end(at: int, size_bytes: int, chunk_bytes: int, tensors: list[HeaderTensor], tensor_ends: list[int]) -> int:
    """End of the chunk of data that begins at `at`: the best of the places where it may end."""
    limit = at + chunk_bytes
    if limit >= size_bytes:
        return size_bytes
    least = at + (chunk_bytes + 1) // 2
    straddling = bisect_right(tensor_ends, limit)  # first tensor that ends after the limit
    if straddling and tensor_ends[straddling - 1] >= least:
        return tensor_ends[straddling - 1]
    tensor = tensors[straddling]
    for step in (row_step_bytes(tensor), CUT_ALIGN_BYTES * atom_bytes(tensor.dtype)):
        if step:
            cut = limit - (limit - tensor.start) % step
            if cut >= least and cut > tensor.start:
                return cut
    return limit
