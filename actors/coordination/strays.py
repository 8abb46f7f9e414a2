"""Workers and placement groups of gangs that nobody knows any more: found by their names, ended.

They are left when a coordinator is killed before it told any agent of the load, or together with the load's agents:
nobody hands its record back then, and detached actors would hold their GPUs for ever. So are idle gangs of a
coordinator that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from actors.coordination import spawn
from actors.names import NAMESPACE, gang_of_worker, group_name
from cluster.joining.ray_private import placement_group_id
from storage.errors import DependencyChanged

_LOG = logging.getLogger("longshore.coordinator")


class StrayWatch:
    """Looks for them again and again, first when every agent has had `orphan_after_s` to tell of its loads."""

    def __init__(self, orphan_after_s: float) -> None:
        self._every_s = orphan_after_s / 4
        self._due_s = time.monotonic() + orphan_after_s
        self._suspects: set[str] = set()

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look again, by the monotonic clock."""
        return now_s > self._due_s

    async def look(self, known_gangs: set[str]) -> None:
        """End what no gang of these owned the last time either. A Ray that does not answer is asked the next time."""
        self._due_s = time.monotonic() + self._every_s
        with contextlib.suppress(RayError):
            self._suspects = await asyncio.to_thread(end_strays, known_gangs, self._suspects)


def end_strays(known_gangs: set[str], suspects: set[str]) -> set[str]:
    """End what belongs to no known gang and was suspected the last time too; the suspects of this time.

    Twice, because a load that has just begun may be missing from `known_gangs`. Blocks on Ray.
    """
    found = _workers() | _groups()
    strays = {name: (gang_id, end) for name, (gang_id, end) in found.items() if gang_id not in known_gangs}
    for name in sorted(strays.keys() & suspects):
        _end(name, strays[name][1])
    return set(strays)


def _workers() -> dict[str, tuple[str, str]]:
    """Actor name -> (gang id, "")."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    return {name: (gang_id, "") for name in names if (gang_id := gang_of_worker(name)) is not None}


def _groups() -> dict[str, tuple[str, str]]:
    """Group name -> (gang id, Ray's id of the group)."""
    prefix = group_name("")
    return {
        table["name"]: (table["name"].removeprefix(prefix), group_id)
        for group_id, table in placement_group_table().items()
        if table["name"].startswith(prefix) and table["state"] != "REMOVED"
    }


def _end(name: str, group_id: str) -> None:
    if group_id:
        try:
            spawn.remove_group(PlacementGroup(placement_group_id(group_id)))
        except DependencyChanged as error:  # all else works without it
            _LOG.warning("the placement group %s has no owner and stays: %s", name, error)
        return
    with contextlib.suppress(ValueError):
        spawn.end_actor(ray.get_actor(name, namespace=NAMESPACE))
