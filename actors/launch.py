"""Where the coordinator becomes an actor: found by name, or started when there is none.

`cluster.client` imports this module by name: it is the one seam that points upward.
"""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray._private.state import actors
from ray.exceptions import RayActorError, RayError, RaySystemError

from actors.coordinator import Coordinator
from actors.names import COORDINATOR, NAMESPACE, process_of
from cluster.config import Config
from cluster.errors import ClusterError, ClusterLost, PackageMissing
from cluster.process_logs.log_files import KINDS
from cluster.process_logs.log_lines import LogProcess
from longshore.install_check import PackageShadowed, check_packages, probe
from storage.errors import LongshoreError

HEAD_RESOURCE = "node:__internal_head__"


def find_coordinator() -> Any | None:
    """The running coordinator's handle, or None."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(COORDINATOR, namespace=NAMESPACE)
    return None


def ensure_coordinator(config: Config) -> Any:
    """The coordinator's handle; starts one when none runs. Raises PackageMissing, PackageShadowed, ClusterLost."""
    check_packages()
    pinned = config.pin_coordinator_to_head and HEAD_RESOURCE in ray.cluster_resources()  # type: ignore[no-untyped-call]
    handle: Any = (
        ray.remote(Coordinator)
        .options(
            name=COORDINATOR,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={HEAD_RESOURCE: 0.001} if pinned else None,
            max_restarts=-1,
            max_concurrency=1000,
        )
        .remote(config)
    )
    try:
        ray.get(handle.ping.remote(), timeout=60)
    except LongshoreError:
        raise
    except (RayActorError, RaySystemError) as error:
        raise _diagnosed(error, "the coordinator could not start") from error
    except RayError as error:
        raise ClusterLost("the coordinator did not answer", cause=str(error)[:500]) from error
    return handle


def processes() -> dict[tuple[str, int], LogProcess]:
    """(node id, pid) -> which of our actors it is, as far as Ray remembers them: dead ones too."""
    found = {}
    for actor in actors().values():
        process = process_of(actor["Name"]) if actor["ActorClassName"].rsplit(".", 1)[-1] in KINDS else None
        pid = int(actor.get("Pid") or actor["Address"].get("Pid") or 0)
        if process is not None and pid:
            found[actor["Address"]["NodeID"], pid] = process
    return found


def _diagnosed(error: Exception, what: str) -> Exception:
    """Why an actor of ours could not be made: asks a plain task on the cluster what its Python finds."""
    try:
        found = ray.get(ray.remote(probe).options(num_cpus=0).remote(), timeout=60)
    except Exception as failed:
        if "longshore" in str(failed) and "No module" in str(failed):
            return PackageMissing(
                "the cluster's nodes do not have longshore installed",
                hint="pip install longshore[cluster] on every node, or build it into the image",
            )
        return ClusterError(what, cause=str(error)[:500])
    if found.get("problem"):
        return PackageShadowed(str(found["problem"]))
    return ClusterError(what, cause=str(error)[:500])
