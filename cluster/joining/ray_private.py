"""All private names of Ray that Longshore uses. No other module uses any. Ray is imported in the functions.

Each function raises DependencyChanged when the installed Ray lacks its private name.
"""

from __future__ import annotations

import contextlib
from typing import Any

from storage.errors import DependencyChanged
from storage.private_names import PrivateName, attribute

_ACTORS = PrivateName("ray._private.state", "actors", "`longshore logs`")
_FREE = PrivateName("ray._private.state", "available_resources_per_node", "placing ranks on nodes")
_WORKER = PrivateName("ray._private.worker", "global_worker", "`longshore logs`")
_IS_HEAD = PrivateName("ray._private.node", "Node.is_head", "knowing a local cluster of this process")
_GROUP_ID = PrivateName("ray._raylet", "PlacementGroupID", "ending placement groups that nobody owns")
_ADDRESS = PrivateName("ray._private.services", "canonicalize_bootstrap_address", "finding a cluster on this machine")
_HEADS = PrivateName("ray._private.services", "find_gcs_addresses", _ADDRESS.needed_for)
_HEADS_CACHE = PrivateName("ray._private.services", "_cached_find_gcs_addresses.cache_clear", _ADDRESS.needed_for)
_CALLBACK = PrivateName("ray.llm._internal.common.callbacks.base", "CallbackBase", "Ray Serve LLM with Longshore")
NAMES = (
    _ACTORS,
    _FREE,
    _WORKER,
    _IS_HEAD,
    PrivateName("ray._private.node", "Node.get_logs_dir_path", "`longshore logs`"),
    _GROUP_ID,
    PrivateName("ray._raylet", "PlacementGroupID.from_hex", _GROUP_ID.needed_for),
    _ADDRESS,
    _HEADS,
)


def actor_table() -> dict[str, dict[str, Any]]:
    """Return Ray's data about every actor by id, including dead ones that Ray remembers."""
    found: dict[str, dict[str, Any]] = _ACTORS.find()()
    return found


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each node: node id -> resource -> amount."""
    found: dict[str, dict[str, float]] = _FREE.find()()
    return found


def placement_group_id(hex_id: str) -> Any:
    """Return Ray's id of a placement group, from its text in `placement_group_table`."""
    return _GROUP_ID.find().from_hex(hex_id)


def serve_llm_callback() -> type[Any]:
    """Return the base class of callbacks of Ray Serve LLM."""
    found: type[Any] = _CALLBACK.find()
    return found


def logs_folder() -> str:
    """Return the folder of the Ray session's logs. To be called in a worker process."""
    node = attribute(_WORKER.find(), _WORKER.module, "Worker.node", _WORKER.needed_for)
    return str(attribute(node, "ray._private.node", "Node.get_logs_dir_path", _WORKER.needed_for)())


def started_here() -> bool:
    """Return whether this process started its Ray cluster, and did not only join it."""
    node = attribute(_WORKER.find(), _WORKER.module, "Worker.node", _IS_HEAD.needed_for)
    return node is not None and bool(attribute(node, _IS_HEAD.module, _IS_HEAD.name, _IS_HEAD.needed_for)())


def address_here() -> str | None:
    """Return HOST:PORT of the cluster that `ray.init(address="auto")` would join, whether or not it answers."""
    with contextlib.suppress(DependencyChanged):  # other versions of Ray keep no address
        _HEADS_CACHE.find()()
    try:
        return str(_ADDRESS.find()("auto"))
    except ConnectionError:
        return None


def heads_of_processes_here() -> set[str]:
    """Return HOST:PORT of the heads of all clusters that have processes on this machine."""
    return set(_HEADS.find()())
