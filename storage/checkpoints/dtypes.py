"""Every element type of the safetensors format, by the name it has there.

Sizes are in bits: F4 and the F6 types are packed, and a tensor of them is valid only when its elements fill
whole bytes. Checked against `safetensors/src/tensor.rs` of safetensors 0.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

MAX_ELEMENTS = 2**63 - 1  # of one tensor, and of each product on the way: the format refuses what overflows
MAX_DIMENSIONS = 64  # what torch and numpy can hold


def tensor_bits(dtype: str, shape: Sequence[int]) -> int:
    """Bits of a tensor; `("F4", (3,))` is 12.

    Raises KeyError for an unknown dtype, OverflowError past 2**63.
    """
    bits = DTYPE_BITS[dtype]
    count = 1
    for size in shape:
        count *= size
        if count > MAX_ELEMENTS:
            raise OverflowError(f"shape has more than {MAX_ELEMENTS} elements")
    if count * bits > MAX_ELEMENTS:
        raise OverflowError(f"tensor has more than {MAX_ELEMENTS} bits")
    return count * bits


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor. Raises what `tensor_bits` does, and ValueError when it does not fill whole bytes."""
    bits = tensor_bits(dtype, shape)
    if bits % 8:
        raise ValueError(f"{bits} bits of {dtype} do not fill whole bytes")
    return bits // 8


def atom_bytes(dtype: str) -> int:
    """Fewest bytes that hold whole elements only: 2 for BF16, 1 for F4 (two elements), 3 for F6 (four)."""
    bits = DTYPE_BITS[dtype]
    return bits // math.gcd(bits, 8)
