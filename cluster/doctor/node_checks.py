"""Checks of every node: GPUs and drivers, niceness, /dev/shm, clock, store, bandwidth. Functions that judge are pure.

The check that nodes reach each other is in `peer_checks`.

on_every_node --look_at_node, clock_now, bandwidth_here--> judge_* --> Check
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distributions, version
from itertools import islice
from typing import Any

from cluster.config import Config
from cluster.doctor.host_checks import (
    LISTED,
    PROGRAM_TIMEOUT_S,
    READ_TIMEOUT_S,
    TORCH_QUESTION,
    Bandwidth,
    Check,
    check_arena,
    check_settings,
    check_store,
    measure_bandwidth,
    name_of,
)
from cluster.doctor.peer_checks import check_peers
from cluster.joining.node_tasks import Node, on_every_node, why_no_answer
from cluster.node_settings import node_environment
from cluster.request import StoreOptions
from cluster.units import show_bytes, show_rate
from storage.arena.arena_files import taken_bytes
from storage.errors import LongshoreError
from storage.host.memory import gpu_driver, gpu_memory
from storage.stores.open_store import open_store


@dataclass(frozen=True, slots=True)
class NodeLook:
    """The facts of one node. An empty text means missing or not known."""

    host: str
    gpus: int  # GPUs that the driver finds
    driver: str
    cuda_driver: str  # newest CUDA that the driver supports
    torch: str
    nccl: str
    torch_gpus: int | None  # GPUs that torch finds; None: not checked without a driver
    niceness: int  # niceness of Ray's workers, taken from this task's process
    arena_bytes: int  # memory that arenas of a running cluster take
    shm: Check  # if an arena fits, when there is none yet
    settings: tuple[Check, ...]  # in the environment in which the node was started
    store: tuple[Check, ...]  # empty: no URI was given
    peer_port: int  # as in Config


def look_at_node(uri: str | None, store_args: dict[str, Any]) -> NodeLook:
    """Return the facts of this node. Takes seconds if there is a GPU, because torch starts in another process."""
    driver = gpu_driver()
    asked = _ask_torch() if driver is not None else None
    environ = node_environment()
    settings = _outcome("settings", lambda: check_settings(environ))
    config = Config.from_env(environ) if settings[0].outcome == "ok" else Config()
    (shm,) = check_arena(config)
    return NodeLook(
        host=os.uname().nodename,
        gpus=len(gpu_memory()) if driver is not None else 0,
        driver=driver.version if driver is not None else "",
        cuda_driver=driver.cuda if driver is not None else "",
        torch=str(asked["version"]) if asked else _version("torch"),
        nccl=str(asked["nccl"]) if asked else _nccl_package(),
        torch_gpus=len(asked["devices"]) if asked else None,
        niceness=os.getpriority(os.PRIO_PROCESS, 0),
        arena_bytes=taken_bytes(),
        shm=shm,
        settings=settings,
        store=_outcome("store", lambda: check_store(uri, store_args)) if uri is not None else (),
        peer_port=config.peer_port,
    )


def clock_now() -> float:
    """Return the node's time in seconds since the epoch."""
    return time.time()


def bandwidth_here(uri: str, store_args: dict[str, Any]) -> Bandwidth:
    """Return the bandwidth from the store to this node. Raises StoreError, InvalidUri or SourceRefused."""
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
    """Return torch's view of all GPUs, or None without torch. Ray hides GPUs from tasks that request none."""
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
    """Return the version of NCCL from torch's wheels."""
    for found in distributions():
        if (found.metadata["Name"] or "").startswith("nvidia-nccl"):
            return found.version
    return ""


LOOK_S = 90.0  # torch is imported where there is a GPU
BANDWIDTH_S = 60.0
CLOCK_S = 10.0
CLOCK_ROUNDS = 3
WARN_SKEW_S = 2.0  # logs and times of events begin to mislead
FAIL_SKEW_S = 300.0  # stores refuse signatures that are 15 minutes off


def check_each_node(
    ray: Any, nodes: Sequence[Node], uri: str | None, store_args: dict[str, Any], *, bandwidth: bool
) -> Iterator[Check]:
    """Return the checks of each node that runs this version, then those about all nodes together."""
    looks: list[NodeLook] = []
    heard: list[Node] = []
    for node, look in on_every_node(ray, [(node, (uri, store_args)) for node in nodes], look_at_node, LOOK_S):
        name = name_of(node)
        if isinstance(look, BaseException):
            yield Check(f"look {name}", "fail", why_no_answer(look), "see the node's logs")
            continue
        looks.append(look)
        heard.append(node)
        yield from (replace(check, name=f"{check.name} {name}") for check in look.settings)
        yield judge_gpus(name, look, int(node["Resources"].get("GPU", 0)))
        yield judge_niceness(name, look)
        yield judge_shm(name, look)
        if look.store:
            yield judge_store(name, look.store)
    yield from judge_alike(looks)
    yield from check_clocks(ray, heard)
    yield from check_peers(ray, [(node, look.peer_port) for node, look in zip(heard, looks, strict=True)])
    if bandwidth and uri is not None:
        yield from check_bandwidth(ray, heard, uri, store_args)


def check_clocks(ray: Any, nodes: Sequence[Node], clock: Callable[[], float] = time.time) -> Iterator[Check]:
    """Return the check of each node's clock against this machine's."""
    for node in nodes:
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            before_s = clock()
            ((_, there_s),) = on_every_node(ray, [(node, ())], clock_now, CLOCK_S)
            if isinstance(there_s, BaseException):
                break
            rounds.append((before_s, there_s, clock()))
        yield judge_clock(name_of(node), rounds)


def check_bandwidth(ray: Any, nodes: Sequence[Node], uri: str, store_args: dict[str, Any]) -> Iterator[Check]:
    """Return the bandwidth of all nodes, which read at the same time, as in a load."""
    total = 0.0
    measured = 0
    for node, found in on_every_node(ray, [(node, (uri, store_args)) for node in nodes], bandwidth_here, BANDWIDTH_S):
        if isinstance(found, BaseException):
            yield Check(f"bandwidth {name_of(node)}", "fail", why_no_answer(found))
            continue
        yield judge_bandwidth(f"bandwidth {name_of(node)}", found)
        total += found.read_bytes / found.elapsed_s if found.elapsed_s > 0 else 0.0
        measured += 1
    if measured > 1:
        yield Check("bandwidth", "ok", f"{show_rate(total, 1.0)} into {measured} nodes at once")


def judge_gpus(name: str, look: NodeLook, ray_gpus: int) -> Check:
    """Return whether Ray, driver and torch agree on the GPUs."""
    name = f"gpus {name}"
    torch = f"torch {look.torch or 'not installed'}, NCCL {look.nccl or 'none'}"
    if not look.driver:
        if ray_gpus:
            return Check(
                name,
                "fail",
                f"Ray counts {ray_gpus}, there is no NVIDIA driver; {torch}",
                "start the node without --num-gpus, or pass the driver into the container",
            )
        return Check(name, "skip", f"none; {torch}")
    detail = f"{look.gpus} GPUs, {ray_gpus} in Ray, driver {look.driver}, CUDA up to {look.cuda_driver}, {torch}"
    if look.torch_gpus is None:
        return Check(name, "fail", detail, "torch cannot be imported there: only workers need it, and this is one")
    if look.torch_gpus < ray_gpus:
        hint = "a CPU build of torch, or one for a newer CUDA than the driver runs"
        return Check(name, "fail", f"{detail}; torch sees {look.torch_gpus}", hint)
    if not look.nccl:
        return Check(name, "warn", detail, "without NCCL ranks of other engines cannot talk to each other on GPUs")
    if ray_gpus > look.gpus:
        return Check(name, "fail", detail, "more are promised than there are: start the node without --num-gpus")
    if ray_gpus < look.gpus:
        return Check(name, "warn", detail, "some GPUs are not offered to Ray")
    return Check(name, "ok", detail)


def judge_alike(looks: Sequence[NodeLook]) -> Iterator[Check]:
    """Return checks of the versions that nodes with GPUs must share."""
    with_gpus = [look for look in looks if look.driver]
    for what, versions in (
        ("nccl versions", {look.nccl or "none": look.host for look in with_gpus}),
        ("cuda drivers", {look.cuda_driver: look.host for look in with_gpus}),
        # Without the build suffix.
        ("torch versions", {look.torch.partition("+")[0]: look.host for look in looks if look.torch}),
    ):
        if len(versions) > 1:
            found = ", ".join(f"{version} (as on {host})" for version, host in sorted(versions.items()))
            yield Check(what, "warn", found, "collectives between nodes want the same everywhere")


def judge_niceness(name: str, look: NodeLook) -> Check:
    """Return whether the node's workers get processor time beside other processes of the machine."""
    detail = f"workers run with niceness {look.niceness}"
    if look.niceness <= 0:
        return Check(f"niceness {name}", "ok", detail)
    hint = (
        "beside a busy process loads starve: set RAY_worker_niceness=0 where `ray start` runs, and start the node anew"
    )
    return Check(f"niceness {name}", "warn", detail, hint)


def judge_shm(name: str, look: NodeLook) -> Check:
    """Return whether there is room for an arena. Memory of existing arenas does not count as missing."""
    if look.arena_bytes:
        return Check(
            f"/dev/shm {name}", "ok", f"{look.shm.detail}; arenas that are there: {show_bytes(look.arena_bytes)}"
        )
    return Check(f"/dev/shm {name}", look.shm.outcome, look.shm.detail, look.shm.hint)


def judge_store(name: str, checks: Sequence[Check]) -> Check:
    """Return the result of the store checks on that node: the first problem, or what was read."""
    for outcome in ("fail", "warn"):
        for check in checks:
            if check.outcome == outcome and check.name != "model":  # this machine has already reported the model
                return Check(f"store {name}", check.outcome, f"{check.name}: {check.detail}", check.hint)
    read = next((check.detail for check in checks if check.name == "read"), checks[-1].detail)
    return Check(f"store {name}", "ok", read)


def judge_clock(name: str, rounds: Sequence[tuple[float, float, float]]) -> Check:
    """Return the skew from rounds of (sent, the node's clock, received). The shortest round is most exact."""
    name = f"clock {name}"
    if not rounds:
        return Check(name, "fail", f"no answer in {CLOCK_S:.0f} s", "see the node's logs")
    asked_s, there_s, answered_s = min(rounds, key=lambda one: one[2] - one[0])
    skew_s = there_s - (asked_s + answered_s) / 2
    unsure_s = (answered_s - asked_s) / 2
    detail = f"{abs(skew_s):.3f} s {'ahead of' if skew_s > 0 else 'behind'} here, give or take {unsure_s:.3f} s"
    if abs(skew_s) - unsure_s > FAIL_SKEW_S:
        return Check(name, "fail", detail, "signed requests will be refused there, or are here: set clocks (NTP)")
    if abs(skew_s) - unsure_s > WARN_SKEW_S:
        return Check(name, "warn", detail, "times in logs and events mislead: set clocks (NTP)")
    return Check(name, "ok", detail)


def judge_bandwidth(name: str, found: Bandwidth) -> Check:
    """Return the bandwidth as a number without a verdict, as only the reader knows how much is enough."""
    if found.error:
        return Check(name, "fail", f"{found.text}, then: {found.error}")
    if not found.read_bytes:
        return Check(name, "warn", "nothing to read under this URI", "name a model")
    return Check(name, "ok", found.text)
