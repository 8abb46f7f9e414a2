"""Workers and placement groups of loads that nobody knows any more: found by their names, ended.

They are left when a coordinator is killed before it told any agent of the load, or together with the load's agents:
nobody hands its record back then, and detached actors would hold their GPUs for ever.
"""

from __future__ import annotations

import contextlib

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table

from actors import spawn
from actors.names import NAMESPACE, group_name, load_of_worker


def end_strays(known_loads: set[str], suspects: set[str]) -> set[str]:
    """End what belongs to no known load and was suspected the last time too; the suspects of this time.

    Twice, because a load that has just begun may be missing from `known_loads`. Blocks on Ray.
    """
    found = _workers() | _groups()
    strays = {name: (load_id, end) for name, (load_id, end) in found.items() if load_id not in known_loads}
    for name in strays.keys() & suspects:
        _end(name, strays[name][1])
    return set(strays)


def _workers() -> dict[str, tuple[str, str]]:
    """Actor name -> (load id, "")."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    return {name: (load_id, "") for name in names if (load_id := load_of_worker(name)) is not None}


def _groups() -> dict[str, tuple[str, str]]:
    """Group name -> (load id, Ray's id of the group)."""
    prefix = group_name("")
    return {
        table["name"]: (table["name"].removeprefix(prefix), group_id)
        for group_id, table in placement_group_table().items()
        if table["name"].startswith(prefix) and table["state"] != "REMOVED"
    }


def _end(name: str, group_id: str) -> None:
    if group_id:
        spawn.remove_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))
        return
    with contextlib.suppress(ValueError):
        spawn.end_actor(ray.get_actor(name, namespace=NAMESPACE))
