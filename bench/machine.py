"""What a figure is worth nothing without: the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import psutil

from bench.range_server import NoRangeServer, nginx_version

PACKAGES = (
    *("longshore", "ray", "torch", "numpy", "blake3", "xxhash", "boto3", "safetensors"),
    *("runai-model-streamer", "runai-model-streamer-s3", "obstore", "awscrt", "s3torchconnector", "fastsafetensors"),
)
NOT_INSTALLED = "not installed"


def describe_machine() -> dict[str, str]:
    """Name and value of everything worth a line: processor, cores, memory, kernel, time."""
    memory = psutil.virtual_memory()
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory.total / 2**30:.0f} GiB",
        "kernel": platform.release().partition("-")[0],
        "load before": f"{os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
    }


def describe_versions() -> dict[str, str]:
    """Python, nginx and every package that takes part, by name."""
    found = {"python": platform.python_version()}
    try:
        found["nginx"] = nginx_version().rpartition("/")[2]
    except NoRangeServer:
        found["nginx"] = NOT_INSTALLED
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = NOT_INSTALLED
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
