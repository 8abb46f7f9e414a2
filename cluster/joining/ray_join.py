"""How a process joins a Ray cluster, or starts one of its own."""

from __future__ import annotations

import importlib
import os
from typing import Any

from cluster.errors import ClusterLost, PackageMissing
from cluster.joining.ray_address import check_ray_address

LOCAL_OBJECT_STORE_BYTES = 100 << 20  # weights never pass through Ray's object store; results of `call` do


def import_ray() -> Any:
    """The package. Raises PackageMissing."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise PackageMissing(
            "ray is not installed here", hint='pip install "longshore[cluster]"', package="ray"
        ) from error


def address_of(ray: Any) -> str:
    """Of the cluster that this process has joined."""
    return str(ray.get_runtime_context().gcs_address)


def join(ray: Any, address: str | None, *, start: bool) -> str | None:
    """Connect this process to a Ray cluster: "joined", "local" for a new one, None for none. Raises ClusterLost."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    check_ray_address(address)
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        if address == "local":
            if not start:
                return None
            _start_local(ray, quiet)
            return "local"
        if address is not None:
            ray.init(address=address, **quiet)
            return "joined"
        try:
            ray.init(address="auto", **quiet)
            return "joined"
        except ConnectionError:
            if not start:
                return None
        _start_local(ray, quiet)
        return "local"
    except getattr(ray.exceptions, "AuthenticationError", ()) as error:  # not every Ray has it
        raise ClusterLost(
            "cannot join the Ray cluster: no valid token",
            hint="set RAY_AUTH_MODE as it was for `ray start`: disabled, or token with RAY_AUTH_TOKEN",
            address=address,
        ) from error
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, OSError) as error:
        raise ClusterLost(
            "cannot join the Ray cluster", hint="check the address and RAY_AUTH_MODE", address=address,
            cause=str(error)[:500],
        ) from error  # fmt: skip


def _start_local(ray: Any, quiet: dict[str, Any]) -> None:
    ray.init(address="local", include_dashboard=False, object_store_memory=LOCAL_OBJECT_STORE_BYTES, **quiet)
