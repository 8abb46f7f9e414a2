"""How a process joins a Ray cluster, or starts one of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
from typing import Any

from cluster.errors import ClusterLost, PackageMissing
from cluster.joining.head_watch import check_head
from cluster.joining.local_watch import watch
from cluster.joining.ray_private import address_here, heads_of_processes_here, logs_folder
from storage.problems import install_hint

LOCAL_OBJECT_STORE_BYTES = 100 << 20  # weights never pass through Ray's object store; results of `call` do

_watch: subprocess.Popen[bytes] | None = None  # ends the local cluster of this process, should this process be killed


def import_ray() -> Any:
    """The package. Raises PackageMissing."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise PackageMissing("ray is not installed here", hint=install_hint("cluster"), package="ray") from error


def address_of(ray: Any) -> str:
    """Of the cluster that this process has joined."""
    return str(ray.get_runtime_context().gcs_address)


def join(ray: Any, address: str | None, *, start: bool) -> str | None:
    """Connect this process to a Ray cluster: "joined", "local" for a new one, None for none. Raises ClusterLost."""
    found = find_cluster(address)
    if found is None:
        if not start:
            return None
        found = "local"
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        if found == "local":
            _start_local(ray, quiet)
            return "local"
        ray.init(address=found, **quiet)
        return "joined"
    except getattr(ray.exceptions, "AuthenticationError", ()) as error:  # not every Ray has it
        raise ClusterLost(
            "cannot join the Ray cluster: no valid token",
            hint="set RAY_AUTH_MODE as it was for `ray start`: disabled, or token with RAY_AUTH_TOKEN",
            address=found,
        ) from error
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, OSError) as error:
        raise ClusterLost(
            "cannot join the Ray cluster", hint="check the address and RAY_AUTH_MODE", address=found,
            cause=str(error)[:500],
        ) from error  # fmt: skip


def find_cluster(address: str | None) -> str | None:
    """Return HOST:PORT of the cluster that is meant, whose head answers. None: "local", or none runs on this machine.

    That is `address`, else RAY_ADDRESS, else a cluster with processes on this machine, as Ray finds it. Raises
    ConfigError, ClusterLost.
    """
    given = address or os.environ.get("RAY_ADDRESS") or None
    if given == "local":
        return None
    if given not in (None, "auto"):
        check_head(given)
        return given
    found = address_here()
    if found is not None:
        try:
            check_head(found)
            return found
        except ClusterLost as error:
            if heads_of_processes_here():  # else it is a note that a cluster has left which was killed
                raise ClusterLost(
                    "a Ray cluster has processes on this machine, and its head does not answer",
                    hint="if it is ending, call again when its processes are gone. address= or RAY_ADDRESS name "
                    'another cluster; address="local" starts one for this process',
                    **error.details,
                ) from error
    if given is None:
        return None
    raise ClusterLost("no Ray cluster runs here", hint="--address or RAY_ADDRESS says which cluster is meant")


def _start_local(ray: Any, quiet: dict[str, Any]) -> None:
    global _watch
    ray.init(address="local", include_dashboard=False, object_store_memory=LOCAL_OBJECT_STORE_BYTES, **quiet)
    _watch = watch(logs_folder())


def end_local(ray: Any) -> None:
    """End the local cluster that this process started."""
    global _watch
    ray.shutdown()
    if _watch is not None:
        _watch.terminate()
        _watch.wait()
        _watch = None
