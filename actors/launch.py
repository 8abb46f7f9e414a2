"""The coordinator's actor: found by name, or started when there is none.

`cluster.client` imports this module by name. It is the only import that points upward.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RaySystemError, RayTaskError

from actors.coordination.nodes import this_node
from actors.coordinator import Coordinator
from actors.links import COORDINATOR, NAMESPACE, process_of
from cluster.config import Config
from cluster.errors import ClusterError, ClusterLost, PackageMissing, VersionMismatch
from cluster.joining.patience import LOOK_S, UNLIMITED, Patience
from cluster.joining.ray_private import actor_table
from cluster.messages import check_version
from cluster.node_settings import NodeSettings
from cluster.telemetry.process_logs import KINDS, LogProcess
from longshore.installation import PackageShadowed, check_packages
from storage.errors import LongshoreError
from storage.problems import install_hint

_LOG = logging.getLogger("longshore.reader")
HEAD_RESOURCE = "node:__internal_head__"
START_S = 60.0  # how long to wait for Ray to start a process, for callers without a deadline


def find_coordinator() -> Any | None:
    """Return the running coordinator's handle, or None."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(COORDINATOR, namespace=NAMESPACE)
    return None


def ensure_coordinator(given: Config | None = None, patience: Patience = UNLIMITED) -> Any:
    """Return the coordinator's handle. Start a coordinator when none runs.

    Args:
        given: Settings of the program that started the Ray cluster, when this is that program. None: the coordinator
            reads the environment of its node.
        patience: How long the caller waits. Default: START_S for each process that is started.

    Raises:
        PackageMissing, PackageShadowed: A node cannot run it. Nothing was started there.
        VersionMismatch: The cluster has another version of Longshore.
        ConfigError: The environment of the head has bad settings.
        ClusterLost: The coordinator or the cluster does not answer.
        LoadTimeout, LoadCancelled: The caller's `patience` ended.
    """
    check_packages()
    handle = find_coordinator() or _start_coordinator(given, patience)
    hello = _answer(handle.ping.remote(), patience)
    check_version((hello["protocol"], hello["version"]), "the coordinator", "this process")
    return handle


def _start_coordinator(given: Config | None, patience: Patience) -> Any:
    """Return the handle of a new coordinator, or of one that another client has just started.

    Raises as `ensure_coordinator`.
    """
    _check_installed(patience)
    on_head = {"resources": {HEAD_RESOURCE: 0.001}}
    pinned = HEAD_RESOURCE in ray.cluster_resources()  # type: ignore[no-untyped-call]
    if pinned:
        config = given or _answer(ray.remote(_config_there).options(num_cpus=0, **on_head).remote(), patience)
        pinned = config.pin_coordinator_to_head
    handle: Any = (
        ray.remote(Coordinator)
        .options(
            name=COORDINATOR,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            **(on_head if pinned else {}),
            max_restarts=-1,
            max_concurrency=1000,
        )
        .remote(given)
    )
    return handle


def _config_there() -> Config:
    """Return the settings in the environment of the node that this task runs on. Raises ConfigError."""
    return NodeSettings.here(this_node()).config


def _answer(reference: Any, patience: Patience) -> Any:
    """Return the head's answer. Raises the reason why the coordinator cannot start."""
    try:
        return _wait(reference, patience)
    except (RayTaskError, RayActorError, RaySystemError) as error:
        if isinstance(cause := getattr(error, "cause", None), LongshoreError):
            raise cause from None
        raise diagnosed(error, "the coordinator could not start") from error
    except RayError as error:
        raise ClusterLost("the coordinator did not answer", cause=str(error)[:500]) from error


def start_agent_here(timeout_s: float) -> bool:
    """Start the agent of this process's node for a reader, if Ray has other nodes to share chunks with.

    Args:
        timeout_s: How long to wait for a coordinator and for Ray to start the agent.

    Returns:
        Whether the node has an agent. False: the reader does without one.
    """
    try:
        if sum(bool(node["Alive"]) for node in ray.nodes()) < 2:  # type: ignore[no-untyped-call]
            return False
        patience = Patience(time.monotonic() + timeout_s)
        node_id = ray.get_runtime_context().get_node_id()
        agent = _answer(ensure_coordinator(None, patience).agent_of.remote(node_id, True), patience)
        _wait(agent.__ray_ready__.remote(), patience)
    except (LongshoreError, PackageShadowed, RayError, TimeoutError) as error:
        _LOG.warning("this node's readers do not share chunks with other nodes: %s", error)
        return False
    return True


def processes() -> dict[tuple[str, int, str], LogProcess]:
    """Return (node id, pid, kind) -> which of our actors it is, for all that Ray remembers, dead ones included.

    A host gives the pid of an ended process to another one after a while, so the pid alone names no process.

    Raises DependencyChanged.
    """
    found = {}
    for actor in actor_table().values():
        process = process_of(actor["Name"]) if actor["ActorClassName"].rsplit(".", 1)[-1] in KINDS else None
        pid = int(actor.get("Pid") or actor["Address"].get("Pid") or 0)
        if process is not None and pid:
            found[actor["Address"]["NodeID"], pid, process.kind] = process
    return found


def _wait(reference: Any, patience: Patience) -> Any:
    """Return an answer of a process that Ray may have to start. Raises as `ray.get` and `patience` do."""
    deadline_s = time.monotonic() + (START_S if math.isinf(patience.left_s(math.inf)) else math.inf)
    while not ray.wait([reference], timeout=patience.left_s(LOOK_S))[0]:
        patience.check()
        if time.monotonic() > deadline_s:
            raise GetTimeoutError(f"no answer in {START_S:.0f} s")
    return ray.get(reference)


def _check_installed(patience: Patience) -> None:
    """Check that the cluster has this Longshore. The check leaves nothing there.

    Raises PackageMissing, PackageShadowed, VersionMismatch, ClusterLost, and as `patience` does.
    """
    on_head = {HEAD_RESOURCE: 0.001} if HEAD_RESOURCE in ray.cluster_resources() else None  # type: ignore[no-untyped-call]
    asked = ray.remote(_look_for_packages()).options(num_cpus=0, max_retries=0, resources=on_head).remote()
    try:
        found = _wait(asked, patience)
    except BaseException as error:
        with contextlib.suppress(RayError):
            ray.cancel(asked, force=True)
        if isinstance(error, RayError):
            raise ClusterLost("the Ray cluster runs no tasks", cause=str(error).strip()[-500:]) from error
        raise
    if (unfit := _unfit(found)) is not None:
        raise unfit


def _unfit(found: dict[str, Any] | None) -> Exception | None:
    """Return the error that says why nodes with these packages cannot run our actors. None: they can."""
    address = ray.get_runtime_context().gcs_address
    if found is None:
        return PackageMissing(
            "the cluster's nodes do not have longshore installed",
            hint=f"on every node, or in its image, run: {install_hint('cluster')}. To use another cluster, set "
            'address= or RAY_ADDRESS. address="local" starts a cluster for this process',
            address=address,
        )
    if found["problem"]:
        return PackageShadowed(str(found["problem"]))
    try:
        check_version((found["protocol"], found["version"]), f"the Ray cluster at {address}", "this process")
    except VersionMismatch as error:
        return error
    return None


def _look_for_packages() -> Callable[[], dict[str, Any] | None]:
    """Return the task that looks. It is a local function, so Ray sends its code and imports nothing of ours."""

    def look() -> dict[str, Any] | None:
        try:
            from longshore.installation import probe
        except ImportError:
            return None
        return probe()

    return look


def diagnosed(error: Exception, what: str) -> Exception:
    """Return why an actor of ours could not start. A plain task on the cluster reports what its Python finds."""
    try:
        found = ray.get(ray.remote(_look_for_packages()).options(num_cpus=0).remote(), timeout=START_S)
    except Exception:
        return ClusterError(what, cause=str(error)[:500])
    return _unfit(found) or ClusterError(what, cause=str(error)[:500])
