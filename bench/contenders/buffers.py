"""Parts of contenders: ranges of files, threads, memory that malloc keeps, Run:ai's streamer, the comparison."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness.contender import BenchFile, Spec
from storage.checkpoints.safetensors_header import LENGTH_BYTES, HeaderTensor, header_bytes, parse_header

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of malloc.h
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I64": "int64", "U8": "uint8", "BOOL": "bool"}

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class WrongDelivery(Exception):
    """A contender left tensors out or delivered other bytes than the files hold. Its measurements mean nothing."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Half-open part of one file of the model."""

    file: int
    start: int
    end: int


def file_ranges(spec: Spec, range_bytes: int) -> list[FileRange]:
    """Return all bytes of all files, headers included, in ranges of at most `range_bytes`, file after file."""
    return [
        FileRange(number, start, min(start + range_bytes, file.size_bytes))
        for number, file in enumerate(spec.files)
        for start in range(0, file.size_bytes, range_bytes)
    ]


def read_exactly(fd: int, target: memoryview, offset: int) -> None:
    """Fill `target` from that byte of the file. Raises EOFError."""
    at = 0
    while at < len(target):
        count = os.preadv(fd, [target[at:]], offset + at)
        if not count:
            raise EOFError(f"the file ends at {offset + at}")
        at += count


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Run `work` in `count` threads until all have ended. Raises the first error of any."""
    with ThreadPoolExecutor(count) as pool:
        for running in [pool.submit(work) for _ in range(count)]:
            running.result()


def keep_freed_memory() -> None:
    """Tell glibc's malloc to give nothing back: freed memory is handed out again, touched."""
    _libc.mallopt(_M_MMAP_MAX, 0)
    _libc.mallopt(_M_ARENA_MAX, 1)  # memory that one thread freed serves the others
    _libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def set_runai_variables(options: Mapping[str, Any]) -> None:
    """Set the streamer's variables that a setting names, before it is imported. Those of the user are dropped."""
    for name in [name for name in os.environ if name.startswith("RUNAI_STREAMER_")]:
        del os.environ[name]
    os.environ.update({name: str(value) for name, value in options.items() if name.startswith("RUNAI_STREAMER_")})


def runai_tensors(uris: list[str], device: str, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield all tensors, as the streamer delivers them to that device of torch."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(uris, device=device, **options)
        yield from streamer.get_tensors()


def file_tensors(file: memoryview, target: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of one file, as views of a tensor of bytes that holds a copy of it."""
    for tensor in read_header(file):
        data = target[tensor.start : tensor.end].view(_torch_dtype(tensor.dtype))
        yield tensor.name, data.reshape(tensor.shape)


def read_header(file: memoryview) -> tuple[HeaderTensor, ...]:
    """Return the tensors that the header of a whole file names. Raises InvalidHeader."""
    length = header_bytes(bytes(file[:LENGTH_BYTES]), len(file))
    return parse_header(bytes(file[:length]), len(file)).tensors


def map_file(file: BenchFile) -> mmap.mmap:
    """Map a file of the model, read-only."""
    with open(file.path, "rb") as opened:
        return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)


def check_tensors(spec: Spec, tensors: dict[str, Any] | Iterable[tuple[str, Any]]) -> None:
    """Compare tensors of torch on any device, each with its shape and dtype, with the model. Raises WrongDelivery."""
    files = [np.frombuffer(map_file(file), np.uint8) for file in spec.files]
    expected = {tensor.name: (file, tensor) for file in files for tensor in read_header(file.data)}
    missing = set(expected)
    for name, tensor in tensors.items() if isinstance(tensors, dict) else tensors:
        file, wanted = expected[name]
        dtype = _torch_dtype(wanted.dtype)
        if tensor.dtype != dtype or tuple(tensor.shape) != wanted.shape:
            raise WrongDelivery(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {wanted.shape}")
        host = tensor.detach().cpu().contiguous()
        if _libc.memcmp(host.data_ptr(), file.ctypes.data + wanted.start, wanted.end - wanted.start):
            raise WrongDelivery(f"{name} has other bytes than the file")
        missing.discard(name)
    if missing:
        raise WrongDelivery(f"{len(missing)} tensors were not delivered, {min(missing)} among them")


def _torch_dtype(name: str) -> Any:
    """Return torch's dtype for one of safetensors' names. Raises KeyError for those that no benchmark has."""
    import torch

    return getattr(torch, _DTYPES[name])
