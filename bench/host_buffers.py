"""Host memory for clients that read ranges and leave the rest to their user: a buffer per file, tensors as views."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.delivered import read_tensors, torch_dtype
from bench.spec import Spec

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of malloc.h


@dataclass(frozen=True, slots=True)
class FileRange:
    """Half-open part of one file of the model."""

    file: int
    start: int
    end: int


def file_ranges(spec: Spec, range_bytes: int) -> list[FileRange]:
    """All bytes of all files, headers too, in pieces of at most `range_bytes`, file after file."""
    return [
        FileRange(number, start, min(start + range_bytes, file.size_bytes))
        for number, file in enumerate(spec.files)
        for start in range(0, file.size_bytes, range_bytes)
    ]


class FileBuffers:
    """A buffer for each file, whole: fresh from the system, or touched before."""

    def __init__(self, spec: Spec, *, touched: bool) -> None:
        self._hold([np.empty(file.size_bytes, np.uint8) for file in spec.files])
        self.touched_bytes = spec.model_bytes if touched else 0
        if touched:
            for array in self._arrays:
                array.fill(1)  # not with what the files hold, or nothing delivered would pass for right

    @classmethod
    def over(cls, arrays: list[NDArray[np.uint8]]) -> FileBuffers:
        """The same for memory that a client brought, one array per file."""
        self = cls.__new__(cls)
        self._hold(arrays)
        self.touched_bytes = 0
        return self

    def _hold(self, arrays: list[NDArray[np.uint8]]) -> None:
        self._arrays = arrays
        self.views = [array.data for array in arrays]

    def tensors(self) -> dict[str, Any]:
        """All tensors by name, as views. Raises InvalidHeader when the buffers do not hold the files."""
        import torch

        return dict(self._views_of(torch))

    def _views_of(self, torch: Any) -> Iterator[tuple[str, Any]]:
        for array, view in zip(self._arrays, self.views, strict=True):
            whole = torch.from_numpy(array)
            for tensor in read_tensors(view):
                data = whole[tensor.start : tensor.end].view(torch_dtype(tensor.dtype))
                yield tensor.name, data.reshape(tensor.shape)


def keep_freed_memory() -> None:
    """Tell glibc's malloc to give nothing back: what is freed from now on is handed out again, touched.

    For loaders whose destination cannot be given: a second load in the process then finds its memory warm.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_ARENA_MAX, 1)  # what one thread freed serves the others
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
