"""What a node of the cluster has, as plain data. Runs there, as a Ray task; compares nothing with anything."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from itertools import islice
from typing import Any

from cluster.config import Config
from cluster.doctor.bandwidth import Bandwidth, measure_bandwidth
from cluster.doctor.check import Check
from cluster.doctor.host_checks import PROGRAM_TIMEOUT_S, TORCH_QUESTION, check_arena, check_settings
from cluster.doctor.store_checks import LISTED, READ_TIMEOUT_S, check_store
from cluster.node_settings import node_environment
from cluster.request import StoreOptions
from storage.arena.arena_files import ARENA_PREFIX, SHM_DIRECTORY
from storage.errors import LongshoreError
from storage.host.gpu_memory import gpu_driver, gpu_memory
from storage.stores.open_store import open_store


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One node. Empty text: not there, or not known."""

    host: str
    gpus: int  # that the driver sees
    driver: str
    cuda_driver: str  # newest CUDA that the driver runs
    torch: str
    nccl: str
    torch_gpus: int | None  # that torch sees; None: not asked, as there is no driver
    niceness: int  # of Ray's workers: that of the process which looks
    arena_bytes: int  # of arenas that are there: a cluster runs
    shm: Check  # whether an arena fits, when there is none yet
    settings: tuple[Check, ...]  # in the environment in which the node was started
    store: tuple[Check, ...]  # empty: no URI was given


def look_at_node(uri: str | None, store_args: dict[str, Any]) -> NodeLook:
    """Takes seconds where there is a GPU, as torch is asked then, in a process of its own; else some milliseconds."""
    driver = gpu_driver()
    asked = _ask_torch() if driver is not None else None
    environ = node_environment()
    settings = _outcome("settings", lambda: check_settings(environ))
    (shm,) = check_arena(Config.from_env(environ) if settings[0].outcome == "ok" else Config())
    return NodeLook(
        host=os.uname().nodename,
        gpus=len(gpu_memory()) if driver is not None else 0,
        driver=driver.version if driver is not None else "",
        cuda_driver=driver.cuda if driver is not None else "",
        torch=str(asked["version"]) if asked else _version("torch"),
        nccl=str(asked["nccl"]) if asked else _nccl_package(),
        torch_gpus=len(asked["devices"]) if asked else None,
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        arena_bytes=sum(os.path.getsize(path) for path in glob.glob(f"{SHM_DIRECTORY}/{ARENA_PREFIX}*")),
        shm=shm,
        settings=settings,
        store=_outcome("store", lambda: check_store(uri, store_args)) if uri is not None else (),
    )


def clock_now() -> float:
    """The node's, in seconds since the epoch."""
    return time.time()


def bandwidth_here(uri: str, store_args: dict[str, Any]) -> Bandwidth:
    """Of this node from the store. Raises StoreError when it cannot be listed, InvalidUri, SourceRefused."""
    ref, _ = StoreOptions(**store_args).resolve(uri)
    Config.from_env().source_rules().check(ref)
    with closing(open_store(ref, read_timeout_s=READ_TIMEOUT_S)) as store:
        return measure_bandwidth(store, list(islice(store.list(), LISTED)))


def _outcome(name: str, look: Callable[[], Iterable[Check]]) -> tuple[Check, ...]:
    found: list[Check] = []
    try:
        found.extend(look())
    except LongshoreError as error:
        found.append(Check(name, "fail", str(error)))
    return tuple(found)


def _ask_torch() -> Mapping[str, Any] | None:
    """None when torch cannot be imported. Ray hides GPUs from tasks that ask for none: torch is asked about all."""
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_QUESTION],
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_S,
            check=True,
            env=environ,
        )
        found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _nccl_package() -> str:
    """Version of the NCCL that torch's wheels bring."""
    for found in distributions():
        if (found.metadata["Name"] or "").startswith("nvidia-nccl"):
            return found.version
    return ""
