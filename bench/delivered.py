"""Whether what a contender delivered is what the files hold: every byte of every tensor, outside the clock."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.spec import Spec
from storage.checkpoints.safetensors_header import LENGTH_BYTES, HeaderTensor, header_bytes, parse_header

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class WrongDelivery(Exception):
    """A contender left tensors out or delivered other bytes than the files hold. Its stats mean nothing."""


class Reference:
    """The model as its files are, mapped."""

    def __init__(self, spec: Spec) -> None:
        self.tensors: dict[str, tuple[int, HeaderTensor]] = {}  # name -> (index of the file, place in it)
        self._files: list[NDArray[np.uint8]] = []
        self._missing: set[str] = set()
        for number, file in enumerate(spec.files):
            with open(file.path, "rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
            self._files.append(np.frombuffer(mapped, np.uint8))
            for tensor in read_tensors(memoryview(mapped)):
                self.tensors[tensor.name] = (number, tensor)
        self._missing = set(self.tensors)

    def check(self, name: str, address: int, size_bytes: int) -> None:
        """Compare one tensor in host memory. Raises WrongDelivery."""
        number, tensor = self.tensors[name]
        if size_bytes != tensor.end - tensor.start:
            raise WrongDelivery(f"{name} has {size_bytes} bytes, the file {tensor.end - tensor.start}")
        here = self._files[number].ctypes.data + tensor.start
        if size_bytes and _libc.memcmp(address, here, size_bytes):
            raise WrongDelivery(f"{name} has other bytes than the file")
        self._missing.discard(name)

    def check_torch(self, named: Iterable[tuple[str, Any]]) -> None:
        """Compare tensors of torch on any device, each with its shape and dtype. Raises WrongDelivery."""
        for name, tensor in named:
            _, expected = self.tensors[name]
            dtype, shape = torch_dtype(expected.dtype), expected.shape
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise WrongDelivery(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
            host = tensor.detach().cpu().contiguous()
            self.check(name, host.data_ptr(), host.numel() * host.element_size())

    def check_complete(self) -> None:
        """Every tensor was compared at least once. Raises WrongDelivery."""
        if self._missing:
            raise WrongDelivery(f"{len(self._missing)} tensors were not delivered, {min(self._missing)} among them")


def check_tensors(spec: Spec, tensors: dict[str, Any]) -> None:
    """These tensors of torch are the whole model, byte by byte. Raises WrongDelivery."""
    reference = Reference(spec)
    reference.check_torch(tensors.items())
    reference.check_complete()


def torch_dtype(name: str) -> Any:
    """torch's dtype for one of safetensors' names. Raises KeyError for those that models for a CPU do not have."""
    import torch

    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64", "U8": "uint8", "BOOL": "bool"}
    return getattr(torch, names[name])


def read_tensors(file: memoryview) -> tuple[HeaderTensor, ...]:
    """What the header says that begins these bytes of a whole file. Raises InvalidHeader."""
    length = header_bytes(bytes(file[:LENGTH_BYTES]), len(file))
    return parse_header(bytes(file[:length]), len(file)).tensors
