"""`longshore doctor`: runs every check in order, and the checks of the Ray cluster itself.

run_checks -> host_checks    packages, memory, /dev/shm and the arena, GPUs and drivers of this machine
               -> disk_checks    the folder for chunks on disk
               -> cluster_checks Ray, its authentication, every node's packages and versions, resources
                  node_checks    of every node: GPUs, drivers, NCCL, /dev/shm, clock, the store from there
                  peer_checks    nodes reach each other where they serve chunks
               -> host_checks    the store answers with these credentials, clocks agree

A check returns its result. A check that raises counts as failed with its message, and the others still run.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.client import status
from cluster.config import Config
from cluster.doctor import host_checks
from cluster.doctor.host_checks import Check, name_of
from cluster.doctor.node_checks import bandwidth_here, check_each_node, judge_bandwidth
from cluster.errors import NoCoordinator
from cluster.joining.connection import disconnect
from cluster.joining.node_tasks import Node, living_nodes, lost_nodes, on_every_node, why_no_answer
from cluster.joining.ray_join import find_cluster
from cluster.joining.ray_private import NAMES
from cluster.units import show_bytes
from longshore.installation import probe
from storage.errors import LongshoreError
from storage.private_names import missing
from storage.problems import install_hint

SHOWN_LOST = 5
PROBE_TIMEOUT_S = 60.0  # the first task of a node starts a Python process
INSTALL_HINT = f"in the environment that this node's `ray start` runs in: {install_hint('cluster')}"


def check_cluster(
    address: str | None, uri: str | None = None, store_args: dict[str, Any] | None = None, *, bandwidth: bool = False
) -> Iterator[Check]:
    """Check that Ray answers, that all nodes have this version of Longshore, and list the resources.

    Of nodes with our version also what they have, and with `uri` whether they reach the store, and with `bandwidth`
    how fast.
    """
    try:
        yield Check("ray", "ok", version("ray"))
    except PackageNotFoundError:
        yield Check("ray", "fail", "not installed", install_hint("cluster"))
        return
    for gone in missing(NAMES):
        yield Check("ray", "fail", gone.message, gone.hint)
    yield check_authentication(os.environ)
    ray: Any = importlib.import_module("ray")
    ours = not ray.is_initialized()
    if ours:
        try:
            found = find_cluster(address)
            if found is None:
                yield Check("cluster", "skip", "none runs here and none was named; `longshore load` starts a local one")
                return
            ray.init(address=found, logging_level="ERROR", log_to_driver=False, configure_logging=False)
        except LongshoreError as error:
            yield Check("cluster", "fail", str(error))
            return
        except ConnectionError as error:
            yield Check("cluster", "fail", str(error).splitlines()[0], "see `ray status` on the head node")
            return
    try:
        nodes = living_nodes(ray)
        yield Check("cluster", "ok", f"{len(nodes)} nodes, head {ray.get_runtime_context().gcs_address}")
        yield from check_lost(lost_nodes(ray))
        same = []
        for node, check in check_nodes(ray, nodes):
            yield check
            if check.outcome in ("ok", "warn"):
                same.append(node)
        yield from check_each_node(ray, same, uri, store_args or {}, bandwidth=bandwidth)
        yield check_settings_in_force(address)
        yield check_resources(ray.cluster_resources(), ray.available_resources())
    finally:
        if ours:
            disconnect()
            ray.shutdown()


def check_settings_in_force(address: str | None) -> Check:
    """Return the settings of the running coordinator that are not defaults, with their sources."""
    name = "settings in force"
    try:
        settings = status(address).settings
    except NoCoordinator:
        return Check(name, "skip", "no coordinator runs; the next load starts one with those of the head's environment")
    except LongshoreError as error:
        return Check(name, "fail", str(error))
    given = [f"{setting.name}={setting.value} ({setting.source})" for setting in settings if not setting.is_default]
    return Check(name, "ok", ", ".join(given) or "all at their defaults")


def check_authentication(environ: Any) -> Check:
    """Return how Ray's token authentication is set here. The token itself is never shown."""
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


def check_lost(nodes: Sequence[Node]) -> Iterator[Check]:
    """Return checks about lost nodes, one by one if they are few."""
    for node in nodes[-SHOWN_LOST:]:
        why = node.get("DeathReasonMessage") or "Ray does not say why"
        hint = "it may come back; until then see its machine, or its pod's last state"
        yield Check(f"node {name_of(node)}", "warn", f"lost: {why}", hint)
    if len(nodes) > SHOWN_LOST:
        yield Check("lost nodes", "warn", f"{len(nodes)} since the head began; the last {SHOWN_LOST} are above")


def check_nodes(ray: Any, nodes: Sequence[Node]) -> Iterator[tuple[Node, Check]]:
    """Run `probe` on every node and compare it with this process."""
    here = probe()
    for node, found in on_every_node(ray, [(node, ()) for node in nodes], probe, PROBE_TIMEOUT_S):
        name = f"node {name_of(node)}"
        if isinstance(found, TimeoutError):
            yield node, Check(name, "fail", str(found), "see `ray status` and the node's logs")
        elif isinstance(found, BaseException):
            missing = "No module named 'longshore'" in str(found)
            detail = "longshore is not installed there" if missing else why_no_answer(found)
            yield node, Check(name, "fail", detail, INSTALL_HINT if missing else "")
        else:
            yield node, compare_probes(name, here, found)


def compare_probes(name: str, here: dict[str, Any], there: dict[str, Any]) -> Check:
    """Return whether a node that answered `there` can work with a client that is `here`."""
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
    """Return the GPUs, CPUs and memory that Ray knows of."""
    gpus, free_gpus = total.get("GPU", 0), free.get("GPU", 0)
    detail = f"{gpus:g} GPUs ({free_gpus:g} free), {total.get('CPU', 0):g} CPUs ({free.get('CPU', 0):g} free)"
    detail += f", {show_bytes(total.get('memory', 0))} memory"
    if gpus and not free_gpus:
        hint = "`longshore status` shows which models hold them; --wait-for-resources waits"
        return Check("resources", "warn", detail, hint)
    return Check("resources", "ok", detail)


def run_checks(
    uri: str | None = None, *, address: str | None = None, bandwidth: bool = False, **store_args: Any
) -> list[Check]:
    """Run every check, in the order in which a load depends on them. Never raises.

    `uri` is a model or bucket to read from; without it the store is not looked at. `bandwidth`: read from it for
    five seconds, on every node at once, or here where no cluster is. `store_args` are those of `cluster.load`:
    endpoint_url, region, profile, anonymous.
    """
    settings = guarded("settings", partial(host_checks.check_settings, os.environ))
    config = Config.from_env() if settings[0].outcome == "ok" else Config()
    checks: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("packages", host_checks.check_packages_here),
        ("memory", host_checks.check_memory),
        ("/dev/shm", partial(host_checks.check_arena, config)),
        ("stale arenas", host_checks.check_stale_arenas),
        (host_checks.NAME, partial(host_checks.check_disk_tier, config)),
        ("gpu driver", host_checks.check_driver),
        ("torch", host_checks.check_torch),
        ("ray", partial(check_cluster, address, uri, store_args, bandwidth=bandwidth)),
        ("store", partial(host_checks.check_store, uri, store_args)),
    ]
    found = settings + [check for name, run in checks for check in guarded(name, run)]
    if bandwidth and uri is not None and not any(check.name.startswith("bandwidth") for check in found):
        found += guarded("bandwidth", lambda: [judge_bandwidth("bandwidth", bandwidth_here(uri, store_args))])
    return found


def guarded(name: str, run: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return the result of `run`. If it raises, return a failed check `name` with the message."""
    found: list[Check] = []
    try:
        found.extend(run())
    except LongshoreError as error:
        found.append(Check(name, "fail", str(error)))
    except Exception as error:
        found.append(Check(name, "fail", f"{type(error).__name__}: {error}"))
    return found
