"""The verbs about a running cluster: status, release, release_warm, shutdown. None of them starts one."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import Config
from cluster.errors import ClusterLost, NoCoordinator
from cluster.joining.connection import Connection, connect
from cluster.joining.ray_join import import_ray
from cluster.model import LoadedModel, give_up_handles
from cluster.public_functions import checks_arguments, in_thread
from cluster.request import LoadRequest
from cluster.telemetry.chunk_map import ChunkMap
from cluster.telemetry.event_log import LoadEvent
from cluster.telemetry.rank_report import Jsonable
from cluster.telemetry.report import ClusterStatus

LONGEST_WAIT_S = 30.0  # for news, in one call


@checks_arguments
def status(address: str | None = None) -> ClusterStatus:
    """Models, ranks, arenas. Raises ClusterLost, as NoCoordinator when Ray is there and no coordinator runs."""
    found: ClusterStatus = _running(address).call("status")
    return found


@checks_arguments
def events(model_id: str, *, after: int = 0, wait_s: float = 0.0, address: str | None = None) -> tuple[LoadEvent, ...]:
    """What happened to a load or model since its event number `after`, oldest first; waits up to `wait_s` for news.

    Of a load the last 1000 are kept, until five minutes after its end. Raises ModelNotFound, ClusterLost.
    """
    found: tuple[LoadEvent, ...] = _running(address).call("events", model_id, after, min(wait_s, LONGEST_WAIT_S))
    return found


@checks_arguments
def chunk_map(model_id: str, *, address: str | None = None) -> ChunkMap:
    """Where each chunk of a load is now, on every node that has ranks of it. Raises ModelNotFound, ClusterLost."""
    found: ChunkMap = _running(address).call("chunks", model_id)
    return found


@checks_arguments
def request_of(model_id: str, *, address: str | None = None) -> LoadRequest:
    """What a model was loaded with, without credentials. Raises ModelNotFound, ClusterLost."""
    found: LoadRequest = _running(address).call("request_of", model_id)
    return found


@dataclass(frozen=True, slots=True)
class Released(Jsonable):
    """What `release` did."""

    model_id: str
    freed: bool  # the model's memory is free
    holders: int  # other processes that still hold the model; 0 when it was freed

    def __str__(self) -> str:
        if self.freed:
            return f"{self.model_id} is freed"
        others = "another process holds" if self.holders == 1 else f"{self.holders} other processes hold"
        return f"{self.model_id} is not kept any more, but {others} it"


@checks_arguments
def release(model: LoadedModel | str, *, force: bool = False, address: str | None = None) -> Released:
    """Give up every hold of this process on a model, and its keep flag: unless another process holds it, it is freed.

    With `keep=True` a model stays when nobody holds it; `LoadedModel.release` gives up one hold and leaves the flag.

    Args:
        model: What `load` returned, or the model's id. Every LoadedModel of this process that holds it is released, and
            its `with` block ends as usual.
        force: Free it whoever holds it; their calls fail.
        address: Of the Ray cluster, where this process has not joined it.

    Returns:
        Whether the memory is free now, else how many other processes still hold the model.

    Raises:
        ConfigError: `model` is neither a LoadedModel nor an id.
        ModelNotFound: There is no such model.
        ClusterLost: No cluster or no coordinator answers.
    """
    model_id = model.model_id if isinstance(model, LoadedModel) else model
    connection = _running(address)
    give_up_handles(model_id)
    connection.drop_all(model_id)
    if force:
        connection.call("release", model_id, None, force=True)
        return Released(model_id, True, 0)
    holders: int = connection.call("unkeep", model_id, connection.client_id)
    return Released(model_id, not holders, holders)


@checks_arguments
def release_warm(*, address: str | None = None) -> int:
    """End the workers of released models that wait for the next load; how many models' they were. Raises ClusterLost.

    They give way by themselves to a load that needs their place; other users of the GPUs need this.
    """
    ended: int = _running(address).call("release_warm")
    return ended


@checks_arguments
def shutdown(address: str | None = None) -> None:
    """End every model, agent and arena, and the coordinator. The Ray cluster stays. Raises ClusterLost."""
    connection = _running(address, any_version=True)  # it is how one gets rid of another version
    connection.call("shutdown")
    connection.end_coordinator()


def _running(address: str | None, *, any_version: bool = False) -> Connection:
    connection = connect(address, Config.from_env(), start=False, any_version=any_version)
    if connection is None and not import_ray().is_initialized():
        raise ClusterLost(
            "no Ray cluster runs here",
            hint="ray start --head starts one; --address or RAY_ADDRESS says which cluster elsewhere is meant",
        )
    if connection is None:
        raise NoCoordinator(
            "no Longshore coordinator runs in this cluster",
            hint="the first load starts one; --address or RAY_ADDRESS says which cluster is meant",
        )
    return connection


astatus = in_thread(status)
arelease = in_thread(release)
