"""Checks of the machine that `longshore doctor` runs on. Nothing here needs Ray or a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cluster.config import Config
from cluster.fit.needs import min_slots, planned_arena_bytes, planned_window_bytes
from cluster.units import show_bytes
from longshore.installation import probe
from storage.arena.arena_files import SHM_DIRECTORY, sweep
from storage.disk.tier import DiskTier
from storage.host.memory import available_host_bytes, free_bytes, huge_pages, is_memory_backed
from storage.problems import install_hint

Outcome = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    outcome: Outcome
    detail: str  # what was found, with numbers
    hint: str = ""  # what to do about it

    def as_dict(self) -> dict[str, str]:
        """Return plain strings, ready for `json.dumps`."""
        return asdict(self)


PROGRAM_TIMEOUT_S = 60.0
LITTLE_MEMORY_BYTES = 2 << 30
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
# asked of a process of its own: a broken driver can end the process, and a CUDA context would take device memory
TORCH_QUESTION = """
import json, warnings
warnings.simplefilter("ignore")
import torch
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


def check_packages_here() -> Iterator[Check]:
    """Check that the packages are Longshore's, and that Longshore supports this Python."""
    found = probe()
    if found["problem"]:
        yield Check("packages", "fail", str(found["problem"]))
    else:
        yield Check("packages", "ok", f"longshore {found['version']} from {Path(found['origins']['cluster']).parent}")
    yield Check("python", "ok", f"{found['python']} at {sys.executable}")


def check_settings(environ: Mapping[str, str]) -> Iterator[Check]:
    """Return the settings of the environment, and variables that only look like settings. Raises ConfigError."""
    changed = Config.from_env(environ).model_dump(exclude_unset=True)
    shown = ", ".join(f"{name}={value}" for name, value in changed.items())
    yield Check("settings", "ok", shown or "all at their defaults")
    if unknown := Config.unknown_variables(environ):
        known = "docs/settings.md lists the settings; these change nothing"
        yield Check("unknown settings", "warn", ", ".join(unknown), known)


def check_memory() -> Iterator[Check]:
    """Return the memory that a load may take, of the host or the container, whichever has less."""
    available = available_host_bytes()
    enough = available >= LITTLE_MEMORY_BYTES
    yield Check(
        "memory",
        "ok" if enough else "warn",
        f"{show_bytes(available)} available",
        "" if enough else "a worker needs about 0.3 GB before the first byte of a model, and the arena comes on top",
    )


def check_arena(config: Config, directory: str = SHM_DIRECTORY) -> Iterator[Check]:
    """Check that /dev/shm has room for the arena of these settings."""
    free = free_bytes(directory)
    available = available_host_bytes() if is_memory_backed(directory) else None
    room = free if available is None else min(free, available)
    detail = f"{show_bytes(free)} free in {directory}"
    enlarge = "enlarge it: docker --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    arena, window = planned_arena_bytes(room, config), planned_window_bytes(room, config)
    if window > room:
        yield Check(
            "/dev/shm",
            "fail",
            f"{detail}, the arena's window takes {show_bytes(window)}",
            f"set LONGSHORE_WINDOW_BYTES or LONGSHORE_ARENA_BYTES to less than {room}, or {enlarge}",
        )
        return
    slots = window // config.slot_bytes
    detail += f", arena up to {show_bytes(arena)}, window {slots} slots of {show_bytes(config.slot_bytes)}"
    detail += f", mounted with huge={huge_pages(directory)}"
    if slots < min_slots(1):
        yield Check("/dev/shm", "fail", f"{detail}, too few for one rank", enlarge)
    elif arena > room:
        hint = f"set LONGSHORE_ARENA_BYTES to less than {room}, or {enlarge}"
        yield Check("/dev/shm", "warn", f"{detail}; it will keep fewer chunks than that, for lack of memory", hint)
    elif slots < min_slots(config.cpu_ranks_per_node):
        yield Check("/dev/shm", "warn", f"{detail}, too few for {config.cpu_ranks_per_node} ranks at once", enlarge)
    else:
        yield Check("/dev/shm", "ok", detail)


def check_stale_arenas(directory: str = SHM_DIRECTORY) -> Iterator[Check]:
    """Remove arenas that no process has mapped, because a killed cluster cannot do it itself."""
    swept = sweep(directory)
    freed = sum(arena.freed_bytes for arena in swept)
    detail = f"removed {len(swept)}, {show_bytes(freed)} freed" if swept else "none"
    yield Check("stale arenas", "ok", detail)


def check_driver() -> Iterator[Check]:
    """Return NVIDIA's driver and the GPUs that it finds here."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if DRIVER_VERSION_FILE.exists():
            yield Check("gpu driver", "warn", "a driver is loaded, nvidia-smi is not on PATH", "look at the image")
        else:
            yield Check("gpu driver", "skip", "no NVIDIA driver here; device='cpu' works without")
        return
    done = subprocess.run(
        [program, "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        message = (done.stderr.strip() or done.stdout.strip() or "no GPU listed").splitlines()[0]
        yield Check("gpu driver", "fail", f"nvidia-smi: {message}", "the driver is missing, too old or not passed in")
        return
    yield Check("gpu driver", "ok", f"{len(lines)} GPU: " + "; ".join(lines))


def check_torch(python: str = sys.executable) -> Iterator[Check]:
    """Check that torch is installed, and finds the GPUs that the driver finds."""
    done = subprocess.run(
        [python, "-c", TORCH_QUESTION], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
    )
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        if "No module named 'torch'" in message:
            hint = f"only workers need it, on the nodes: {install_hint('cluster')}"
            yield Check("torch", "warn", "not installed here", hint)
        else:
            yield Check("torch", "fail", message, "import torch by hand to see the whole error")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    devices = found["devices"]
    detail = f"{found['version']}, " + (", ".join(devices) if devices else "no CUDA device")
    detail += f", NCCL {found['nccl']}" if found.get("nccl") else ""
    if not devices and shutil.which("nvidia-smi"):
        build = "this is a CPU build" if found["cuda"] is None else f"built for CUDA {found['cuda']}"
        yield Check("torch", "warn", detail, f"a driver is here, but torch sees no device: {build}")
    else:
        yield Check("torch", "ok", detail)


NAME = "disk tier"


def check_disk_tier(config: Config) -> Iterator[Check]:
    """Open the disk tier as an agent does. It removes leftovers of killed writers, but never a chunk."""
    if config.disk_folder is None:
        yield Check(NAME, "skip", "off; LONGSHORE_DISK_CACHE_DIR names a folder that keeps chunks for the next cluster")
        return
    tier = DiskTier(config.disk_folder, config.disk_cache_bytes)  # its exception becomes the check's result
    try:
        free = free_bytes(tier.path)
        detail = (
            f"{len(tier)} chunks in {tier.path}, {show_bytes(tier.used_bytes)} of {show_bytes(tier.budget_bytes)}, "
            f"{show_bytes(free)} free"
        )
        if is_memory_backed(tier.path):
            yield Check(
                NAME, "warn", f"{detail}, in memory", "name a folder on a disk: this one takes the host's memory"
            )
        elif tier.budget_bytes - tier.used_bytes > free:
            yield Check(NAME, "warn", detail, "the disk is full before the budget is: set LONGSHORE_DISK_CACHE_BYTES")
        elif tier.budget_bytes < config.slot_bytes:
            yield Check(NAME, "warn", detail, "no chunk fits: raise LONGSHORE_DISK_CACHE_BYTES, or free some space")
        else:
            yield Check(NAME, "ok", detail)
    finally:
        tier.close()
