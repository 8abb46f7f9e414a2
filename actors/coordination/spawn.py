"""Makes, finds and ends agents, workers and placement groups, in steps that always end before their caller.

finished(step)       one step, which a cancellation does not cut in two, or nobody would know of an actor that it made
alongside(a, b, ..)  several at once; when one fails the others are cancelled, and have ended when the error comes out
settled(steps)       several at once, whatever becomes of each
tend_all(...)        one task per rank for as long as the model lives; ranks of a lost node move, and are tended there

All are named and detached, because an actor that owns another takes it along when it dies. They are ended explicitly:
by the coordinator, or by themselves when no coordinator has answered for long.

Orphans are workers and placement groups of worker groups that nobody knows any more. They are left when a coordinator
is killed before any agent has received the load, or together with the load's agents: nobody hands its record back then.
Idle worker groups of a coordinator that was killed are orphans too. `OrphanWatch` finds them by their names and ends
them, or they would hold their GPUs for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from actors.agent_actor import NodeAgent
from actors.coordination.model_record import Placement, stopped
from actors.gpu_worker import CONCURRENCY_GROUPS, GpuWorker
from actors.links import (
    NAMESPACE,
    RayCoordinatorLink,
    agent_name,
    group_name,
    group_of_worker,
    worker_group_of,
    worker_name,
)
from cluster.config import Config
from cluster.errors import ClusterLost, NodeLost
from cluster.joining.ray_private import placement_group_id
from cluster.messages import UNVERSIONED, check_version
from storage.errors import DependencyChanged

T = TypeVar("T")


async def finished(step: Coroutine[Any, Any, T]) -> T:
    """The step's result. When the caller is cancelled meanwhile, the step still ends first; what it notes, stands.

    However often it is cancelled: a gather that is cancelled cancels its tasks, and so does whoever tidies up after it.
    """
    task = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: nobody is told of it any more
        raise cancelled
    return task.result()


async def alongside(*steps: Coroutine[Any, Any, Any]) -> None:
    """Every step at once, until all have ended. Raises the first error, or the cancellation of the caller."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        await finished(stopped(tasks))


async def settled(steps: Iterable[Awaitable[Any]]) -> None:
    """Returns when every step has ended, well or not."""
    await asyncio.gather(*steps, return_exceptions=True)


async def tend_all(
    placements: Mapping[int, Placement],
    tend: Callable[[Placement], Coroutine[Any, Any, None]],
    move: Callable[[], Coroutine[Any, Any, set[int]]],
    joined: asyncio.Event,
) -> None:
    """Run `tend(placement)` for every rank, until all have ended.

    When one raises NodeLost, `move()` runs, once at a time: it places ranks anew, and returns which. When `joined` is
    set, there are placements that were never tended.
    Raises what they raise; nothing of it runs on then.
    """
    tends: dict[int, asyncio.Task[None]] = {}
    tended: dict[int, Placement] = {}
    homeless: set[int] = set()  # ranks whose tending ended because their node is lost
    moving: asyncio.Task[set[int]] | None = None
    joining = asyncio.create_task(joined.wait())

    async def begin(ranks: set[int]) -> None:
        for rank in ranks:
            if (stale := tends.pop(rank, None)) is not None:
                await finished(stopped([stale]))
            if rank in placements:  # it was not removed meanwhile
                tended[rank] = placements[rank]
                tends[rank] = asyncio.create_task(tend(placements[rank]))

    try:
        await begin(set(placements))
        while tends or moving is not None:
            running: list[asyncio.Task[Any]] = [*tends.values(), joining, *([moving] if moving else [])]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joined.clear()
                joining = asyncio.create_task(joined.wait())
                await begin({rank for rank in placements if tended.get(rank) is not placements[rank]})
            if moving is not None and moving.done():
                await begin(moving.result() | homeless)
                moving, homeless = None, set()
            for rank in [rank for rank, task in tends.items() if task.done()]:
                task = tends.pop(rank)
                if not isinstance(task.exception(), NodeLost):
                    task.result()
                    continue
                homeless.add(rank)
                moving = moving or asyncio.create_task(move())
    finally:
        await finished(stopped([*tends.values(), joining, *([moving] if moving else [])]))


REMOVE_TRIES = 10
SHUT_S = 10.0  # an agent that is well has ended all by then
NAME_FREE_S = 5.0  # Ray gives the name of a dead actor back within moments, of one on a dead node when it knows that
AGENT_CALLS = 256  # calls an agent answers at once: every rank of the node may be waiting for orders


@functools.cache
def _agent_class() -> Any:
    """Return Ray's class of agents. Ray pickles and stores each class that it is given, which takes 20 ms."""
    return ray.remote(NodeAgent)


@functools.cache
def _worker_class() -> Any:
    return ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(GpuWorker)  # type: ignore[call-overload]


def start_agent(node_id: str, host: str, given: Config | None) -> Any:
    """The agent of a node; makes one when there is none. Returns at once, but for one that is just dying.

    `given`: settings of the program that started the cluster; None: the agent reads the environment of its node.

    Raises ClusterLost when the name stays taken by nobody who can be found: the node died, as a rule.
    """
    give_up_s = time.monotonic() + NAME_FREE_S
    while True:
        try:
            return _find_or_make_agent(node_id, host, given)
        except ValueError as error:  # Ray found the name taken, and when it looked whose it is, that one was dead
            if time.monotonic() > give_up_s:
                raise ClusterLost("a node's agent can neither be found nor made", host=host or node_id) from error
            time.sleep(0.1)


def _find_or_make_agent(node_id: str, host: str, given: Config | None) -> Any:
    return (
        _agent_class()
        .options(
            name=agent_name(node_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=AGENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(given, ray.get_runtime_context().gcs_address, node_id, host, RayCoordinatorLink())
    )


def agent_node_ids() -> set[str]:
    """Nodes that have an agent, one that is being restarted included."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in named if actor["namespace"] == NAMESPACE}
    prefix = agent_name("")
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def find_agent(node_id: str) -> Any | None:
    """Return the handle of the node's agent; None when it has none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(agent_name(node_id), namespace=NAMESPACE)
    return None


def start_worker(
    worker_group_id: str,
    rank: int,
    incarnation: int,
    *,
    node_id: str,
    device: str,
    bundle: tuple[PlacementGroup, int] | None,
    orphan_after_s: float,
    gpus: int = 1,
) -> Any:
    """A new worker process with so many GPUs. Returns at once; its first answer says whether it could start."""
    strategy: Any = (
        PlacementGroupSchedulingStrategy(bundle[0], placement_group_bundle_index=bundle[1])
        if bundle
        else NodeAffinitySchedulingStrategy(node_id, soft=False)
    )
    return (
        _worker_class()
        .options(
            name=worker_name(worker_group_id, rank, incarnation),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            num_gpus=gpus if device == "cuda" else 0,
            max_restarts=0,  # a replacement is a new incarnation under a new name, made by the coordinator
            scheduling_strategy=strategy,
        )
        .remote(node_id, device, orphan_after_s)
    )


async def meet_worker(worker: Any, host: str, timeout_s: float) -> None:
    """Return when the worker's process is up, however long ago it was started.

    Raises VersionMismatch when it runs another Longshore, RayError when it died, TimeoutError.
    """
    hello = getattr(worker, "hello", None)
    asked = hello and hello.options(concurrency_group="control").remote()
    version = await asyncio.wait_for(asked, timeout_s) if asked else UNVERSIONED
    check_version(version, f"a worker on {host}", "the coordinator")


async def answer_of(
    worker: Any, host: str, call: Awaitable[T], patience_s: float, check: Callable[[], None] = lambda: None
) -> T:
    """Return the answer to a call of a worker, which may take as long as it needs while its process is well.

    Every `patience_s` seconds `check()` runs, which may raise, and the process is asked for a sign of life.
    Raises TimeoutError when none comes within `patience_s` seconds, RayError when it died, and the call's error.
    """
    asked = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({asked}, timeout=patience_s))[0]:
            check()
            await meet_worker(worker, host, patience_s)
        return await asked
    finally:
        asked.cancel()
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())


def find_workers(worker_group_id: str) -> dict[int, tuple[int, Any]]:
    """rank -> (incarnation, handle) of the worker group's living workers, the last incarnation of each rank."""
    found: dict[int, tuple[int, Any]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE or group_of_worker(actor["name"]) != worker_group_id:
            continue
        rank, incarnation = (int(part) for part in actor["name"].rsplit("-", 2)[1:])
        if rank not in found or incarnation > found[rank][0]:
            with contextlib.suppress(ValueError):
                found[rank] = incarnation, ray.get_actor(actor["name"], namespace=NAMESPACE)
    return found


def create_group(
    worker_group_id: str, number: int, gpus_per_bundle: list[int], node_ids: Sequence[str] = ()
) -> PlacementGroup:
    """Create a worker group's placement group of that number, with bundles of this many GPUs each.

    `node_ids`: the node of each bundle; without them Ray chooses.
    """
    group: PlacementGroup = placement_group(
        [{"GPU": float(gpus)} for gpus in gpus_per_bundle],
        strategy="PACK",
        name=group_name(worker_group_id, number),
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids] or None,
    )
    return group


def remove_group(group: PlacementGroup) -> None:
    """Give its bundles back. Asked again until Ray says that it is gone: on a busy head the call can be lost in time,
    and the GPUs would be held for ever.
    """
    for attempt in range(REMOVE_TRIES):
        time.sleep(0.1 * attempt)
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(group)
            if placement_group_table(group).get("state") in (None, "REMOVED"):
                return


async def shut_agent(node_id: str, *, only_idle: bool = False) -> bool:
    """End a node's agent, which gives its arena back. With `only_idle` it says itself whether it has no load.

    Return whether it was ended.
    """
    agent = find_agent(node_id)
    if agent is not None:
        try:
            ended = await asyncio.wait_for(agent.shutdown.remote(only_idle=only_idle), SHUT_S)
        except RayActorError:
            ended = True  # it is dead
        except Exception:
            ended = not only_idle  # who does not answer may have a load
        if not ended:
            return False
        end_actor(agent)
    return True


def end_actor(handle: Any) -> None:
    """Kill an actor for good; nothing happens when it is dead already."""
    with contextlib.suppress(RayError, ValueError):
        ray.kill(handle, no_restart=True)


_LOG = logging.getLogger("longshore.coordinator")


class OrphanWatch:
    """Looks for them again and again, first when every agent has had `orphan_after_s` to tell of its loads."""

    def __init__(self, orphan_after_s: float) -> None:
        self._every_s = orphan_after_s / 4
        self._due_s = time.monotonic() + orphan_after_s
        self._suspects: set[str] = set()

    def is_due(self, now_s: float) -> bool:
        """Return whether the next look is due, by the monotonic clock."""
        return now_s > self._due_s

    async def look(self, known_worker_groups: set[str]) -> None:
        """End what none of these worker groups owns, nor owned the last time. If Ray does not answer, try next time."""
        self._due_s = time.monotonic() + self._every_s
        with contextlib.suppress(RayError):
            self._suspects = await asyncio.to_thread(end_orphans, known_worker_groups, self._suspects)


def end_orphans(known_worker_groups: set[str], suspects: set[str]) -> set[str]:
    """End what belongs to no known worker group and was suspected the last time too; the suspects of this time.

    Twice, because a load that has just begun may be missing from `known_worker_groups`. Blocks on Ray.
    """
    found = _workers() | _groups()
    orphans = {
        name: (worker_group_id, end)
        for name, (worker_group_id, end) in found.items()
        if worker_group_id not in known_worker_groups
    }
    for name in sorted(orphans.keys() & suspects):
        _end(name, orphans[name][1])
    return set(orphans)


def _workers() -> dict[str, tuple[str, str]]:
    """Actor name -> (worker group id, "")."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    return {name: (worker_group_id, "") for name in names if (worker_group_id := group_of_worker(name)) is not None}


def _groups() -> dict[str, tuple[str, str]]:
    """Group name -> (worker group id, Ray's id of the group)."""
    return {
        table["name"]: (worker_group_id, group_id)
        for group_id, table in placement_group_table().items()
        if (worker_group_id := worker_group_of(table["name"])) is not None and table["state"] != "REMOVED"
    }


def _end(name: str, group_id: str) -> None:
    if group_id:
        try:
            remove_group(PlacementGroup(placement_group_id(group_id)))
        except DependencyChanged as error:  # all else works without it
            _LOG.warning("the placement group %s has no owner and stays: %s", name, error)
        return
    with contextlib.suppress(ValueError):
        end_actor(ray.get_actor(name, namespace=NAMESPACE))
