"""A rank's tensors: views into its segments, with torch's dtypes for safetensors' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cluster.planning.plan import SliceTable, TensorSlice
from storage.checkpoints.safetensors_header import tensor_bytes
from storage.host.memory import without_collector


def tensor_views(segments: Sequence[torch.Tensor], slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
    """Return tensors by name, with all padding set to zero. `segments` are blocks of uint8."""
    table = SliceTable.of(slices)
    # A view is half a microsecond of torch's own work, so a tensor is one call on a typed segment.
    strided: dict[tuple[int, torch.dtype], Callable[..., torch.Tensor]] = {}
    kinds = []
    for kind in table.kinds:
        dtype, shape = torch_dtype(kind.dtype, kind.sizes)
        # The memory may hold bytes of an earlier load.
        padded = kind.filled_bytes < kind.size_bytes and kind.suffix is None
        kinds.append((dtype, dtype.itemsize, shape, _strides(shape), (kind.filled_bytes, kind.size_bytes), padded))
    views = {}
    with without_collector():
        for name, number, segment, offset in table.rows():
            dtype, item_bytes, shape, strides, (filled_bytes, size_bytes), padded = kinds[number]
            if padded:
                segments[segment][offset + filled_bytes : offset + size_bytes].zero_()
            make = strided.get((segment, dtype))
            if make is None:
                whole = segments[segment]
                typed = whole[: whole.nbytes // item_bytes * item_bytes].view(dtype)
                make = strided[segment, dtype] = typed.as_strided
            views[name] = make(shape, strides, offset // item_bytes)
    return views


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def torch_dtype(name: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the torch dtype for a safetensors dtype, and the shape in its elements.

    Dtypes that this torch lacks, and those smaller than a byte, become `uint8` with the packed bytes in the last
    dimension. The result is flat when the shape has no dimension or the bytes do not divide evenly.
    """
    known = getattr(torch, _TORCH_NAMES.get(name, ""), None)
    if isinstance(known, torch.dtype):
        return known, shape
    total = tensor_bytes(name, shape)
    leading = 1
    for length in shape[:-1]:
        leading *= length
    if shape and leading and total % leading == 0:
        return torch.uint8, (*shape[:-1], total // leading)
    return torch.uint8, (total,)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in order, with shape (bytes,). They share its memory when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# safetensors' dtype names -> attribute of the torch module
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
