"""The verbs about a running cluster: status, release, release_warm, shutdown. None of them starts one."""

from __future__ import annotations

from cluster.async_twins import in_thread
from cluster.config import Config
from cluster.connection import Connection, connect
from cluster.errors import ClusterLost
from cluster.reports.report import ClusterStatus


def status(address: str | None = None) -> ClusterStatus:
    """Models, ranks, arenas. Raises ClusterLost when no coordinator runs."""
    found: ClusterStatus = _running(address).call("status")
    return found


def release(model_id: str, *, force: bool = False, address: str | None = None) -> None:
    """Take the keep flag from a model; it is freed when nobody holds it. With `force`, whoever holds it.

    Raises ModelNotFound, ClusterLost.
    """
    connection = _running(address)
    if force:
        connection.call("release", model_id, None, force=True)
    else:
        connection.call("unkeep", model_id)


def release_warm(*, address: str | None = None) -> int:
    """End the workers of released models that wait for the next load; how many models' they were. Raises ClusterLost.

    They give way by themselves to a load that needs their place; other users of the GPUs need this.
    """
    ended: int = _running(address).call("release_warm")
    return ended


def shutdown(address: str | None = None) -> None:
    """End every model, agent and arena, and the coordinator. The Ray cluster stays. Raises ClusterLost."""
    connection = _running(address, any_version=True)  # it is how one gets rid of another version
    connection.call("shutdown")
    connection.end_coordinator()


def _running(address: str | None, *, any_version: bool = False) -> Connection:
    connection = connect(address, Config.from_env(), start=False, any_version=any_version)
    if connection is None:
        raise ClusterLost(
            "no Longshore coordinator runs in this cluster",
            hint="the first load starts one; --address or RAY_ADDRESS says which cluster is meant",
        )
    return connection


astatus = in_thread(status)
arelease = in_thread(release)
