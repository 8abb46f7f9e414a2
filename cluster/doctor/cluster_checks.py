"""Checks of a Ray cluster: that it answers, that every node runs this Longshore, and what it has to offer."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.doctor.check import Check
from cluster.joining.ray_address import check_ray_address
from cluster.units import show_bytes
from longshore.install_check import probe
from storage.errors import LongshoreError

PROBE_TIMEOUT_S = 60.0  # a node's first task starts a Python process
INSTALL_HINT = "pip install 'longshore[cluster]' in the environment that this node's `ray start` runs in"


def check_cluster(address: str | None) -> Iterator[Check]:
    """Ray is installed and reachable, its nodes have our packages in our version, and what resources there are."""
    try:
        yield Check("ray", "ok", version("ray"))
    except PackageNotFoundError:
        yield Check("ray", "fail", "not installed", "pip install 'longshore[cluster]'")
        return
    yield check_authentication(os.environ)
    address = address or os.environ.get("RAY_ADDRESS") or None
    try:
        check_ray_address(address)
    except LongshoreError as error:
        yield Check("cluster", "fail", str(error))
        return
    ray: Any = importlib.import_module("ray")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(address=address or "auto", logging_level="ERROR", log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            if address in (None, "auto", "local"):
                yield Check("cluster", "skip", "none runs here and none was named; `longshore load` starts a local one")
            else:
                yield Check("cluster", "fail", str(error).splitlines()[0], "see `ray status` on the head node")
            return
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        yield Check("cluster", "ok", f"{len(nodes)} nodes, head {ray.get_runtime_context().gcs_address}")
        yield from check_nodes(ray, nodes)
        yield check_resources(ray.cluster_resources(), ray.available_resources())
    finally:
        if ours:
            ray.shutdown()


def check_authentication(environ: Any) -> Check:
    """How Ray's token authentication is set here. The token itself is never shown."""
    mode = environ.get("RAY_AUTH_MODE", "")
    sources = [name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if environ.get(name)]
    if (Path.home() / ".ray" / "auth_token").is_file():
        sources.append("the auth_token file under ~/.ray")
    found = f"RAY_AUTH_MODE={mode or 'not set'}, token from: {', '.join(sources) or 'nowhere'}"
    if mode == "token" and not sources:
        hint = "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token"
        return Check("ray authentication", "fail", found, hint)
    if not mode and sources:
        hint = "Ray may switch token authentication on by itself: set RAY_AUTH_MODE=token or disabled everywhere"
        return Check("ray authentication", "warn", found, hint)
    return Check("ray authentication", "ok", found)


def check_nodes(ray: Any, nodes: list[dict[str, Any]]) -> Iterator[Check]:
    """Run `probe` on every node and compare it with this process."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    task = ray.remote(num_cpus=0, max_retries=0)(probe)
    asked = {}
    for node in nodes:
        only_there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[task.options(scheduling_strategy=only_there).remote()] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_TIMEOUT_S)
    here = probe()
    for reference, node in asked.items():
        name = f"node {node['NodeManagerHostname']} {node['NodeID'][:8]}"
        if reference not in answered:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
            yield Check(name, "fail", f"no answer in {PROBE_TIMEOUT_S:.0f} s", "see `ray status` and the node's logs")
            continue
        try:
            found = ray.get(reference)
        except Exception as error:
            missing = "No module named 'longshore'" in str(error)
            detail = "longshore is not installed there" if missing else (str(error).strip().splitlines() or ["?"])[-1]
            yield Check(name, "fail", detail, INSTALL_HINT if missing else "")
            continue
        yield compare_probes(name, here, found)


def compare_probes(name: str, here: dict[str, Any], there: dict[str, Any]) -> Check:
    """Whether a node that answered `there` can work with a client that is `here`."""
    detail = f"longshore {there['version']}, Python {there['python']}, Ray {there['ray']}"
    if there["problem"]:
        return Check(name, "fail", str(there["problem"]))
    if (there["version"], there["protocol"]) != (here["version"], here["protocol"]):
        mine = f"; here longshore {here['version']} (protocol {here['protocol']}, there {there['protocol']})"
        return Check(name, "fail", detail + mine, "install the same version here and on every node")
    if there["python"].split(".")[:2] != here["python"].split(".")[:2] or there["ray"] != here["ray"]:
        mine = f"; here Python {here['python']}, Ray {here['ray']}"
        return Check(name, "warn", detail + mine, "Ray wants the same Python and Ray everywhere")
    return Check(name, "ok", detail)


def check_resources(total: dict[str, float], free: dict[str, float]) -> Check:
    """GPUs, CPUs and memory that Ray knows of."""
    gpus, free_gpus = total.get("GPU", 0), free.get("GPU", 0)
    detail = f"{gpus:g} GPUs ({free_gpus:g} free), {total.get('CPU', 0):g} CPUs ({free.get('CPU', 0):g} free)"
    detail += f", {show_bytes(total.get('memory', 0))} memory"
    if gpus and not free_gpus:
        hint = "`longshore status` shows which models hold them; --wait-for-resources waits"
        return Check("resources", "warn", detail, hint)
    return Check("resources", "ok", detail)
