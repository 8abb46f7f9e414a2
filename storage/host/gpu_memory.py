"""How much memory the GPUs of this host have, and have free, and which driver: asked of it, without a CUDA context.

A context would take hundreds of megabytes of the very memory that is asked about. The driver's management library
(NVML) answers in milliseconds where it is installed; its command, nvidia-smi, takes a good part of a second.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NVML = "libnvidia-ml.so.1"
MOST_GPUS = 1024  # a count above it is not believed
_ASK = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One GPU's."""

    total_bytes: int
    free_bytes: int | None = None  # when it was asked; None: not known


def gpu_memory(library: str = NVML) -> tuple[GpuMemory, ...]:
    """Of each GPU of the host, in the order of the driver; empty where there is no driver, or it does not say."""
    try:
        return _ask_library(library)
    except (OSError, AttributeError, ValueError):
        return _ask_command()


@dataclass(frozen=True, slots=True)
class GpuDriver:
    """NVIDIA's, on this host."""

    version: str  # "580.95.05"
    cuda: str  # "13.0": the newest CUDA that it runs


def gpu_driver(library: str = NVML) -> GpuDriver | None:
    """None where there is no driver, or it does not work."""
    try:
        nvml = ctypes.CDLL(library)
        with _initialized(nvml):
            text, cuda = ctypes.create_string_buffer(96), ctypes.c_int()
            _check(nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))))
            _check(nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)))
        return GpuDriver(text.value.decode(errors="replace"), f"{cuda.value // 1000}.{cuda.value % 1000 // 10}")
    except (OSError, AttributeError):
        return None


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _ask_library(library: str) -> tuple[GpuMemory, ...]:
    nvml = ctypes.CDLL(library)
    with _initialized(nvml):
        count = ctypes.c_uint()
        _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        if count.value > MOST_GPUS:
            raise ValueError(f"{count.value} GPUs")
        found = []
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), _Memory()
            _check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
            _check(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
            found.append(GpuMemory(int(memory.total), min(int(memory.free), int(memory.total))))
    return tuple(found)


@contextmanager
def _initialized(nvml: ctypes.CDLL) -> Iterator[None]:
    _check(nvml.nvmlInit_v2())
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _check(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML error {code}")


def _ask_command() -> tuple[GpuMemory, ...]:
    try:
        answer = subprocess.run(_ASK, capture_output=True, text=True, timeout=_ASK_S, check=True)
        return tuple(_parsed(line) for line in answer.stdout.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def _parsed(line: str) -> GpuMemory:
    total, _, free = (part.strip() for part in line.partition(","))
    return GpuMemory(int(total) << 20, int(free) << 20 if free.isdecimal() else None)
