"""Ends a model's workers, or keeps them as an idle *worker group* for the next load of their shape.

    part(record, keep) -- recycle every worker --> agents forget the load --> idle group, for Config.warm_workers_s
                       `- or one cannot be recycled, or nothing is to be kept --> killed, placement groups removed
    take(worker_group_id)      --> the next load's placements (`actors.coordination.load_run`)

`cluster.scheduling.topology` decides which group is taken or ended for whom. A group that loses a worker ends
as a whole. A coordinator that is restarted knows of no worker groups: their workers are orphans then (see `orphans`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.coordination import nodes, spawn
from actors.coordination.model_record import ModelRecord, Placement
from cluster.scheduling.topology import IdleWorkerGroup
from cluster.telemetry.report import WorkerGroupStatus

CALL_TIMEOUT_S = 60.0  # for calls to agents, which answer at once when they are well
FILES_REMOVED_S = 10.0  # what a load that did not end well has written goes with it
RECYCLE_S = 20.0  # a worker that has not let go of its model by then is ended
FREED_S = 10.0  # Ray counts a GPU as free when the process that used it has ended, which takes seconds


@dataclass(slots=True)
class WorkerGroup:
    """Idle workers with the places they hold."""

    idle: IdleWorkerGroup
    placements: tuple[Placement, ...]  # by rank
    groups: tuple[Any, ...]  # our own placement groups
    minder: asyncio.Task[None] | None = None


class WorkerGroups:
    """The coordinator's idle worker groups."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: how long a worker group stays idle; 0: no workers are kept."""
        self._keep_s = keep_s
        self._idle: dict[str, WorkerGroup] = {}
        self._parting: set[str] = set()  # neither a model's any more nor idle yet
        self._given_back: deque[tuple[float, int]] = deque()  # when a placement group was removed, and its GPUs

    @property
    def ids(self) -> set[str]:
        """Worker groups that are nobody's and yet no orphans."""
        return self._idle.keys() | self._parting

    def idle(self) -> list[IdleWorkerGroup]:
        """Return the idle worker groups."""
        return [worker_group.idle for worker_group in self._idle.values()]

    def status(self) -> tuple[WorkerGroupStatus, ...]:
        """Return one status for each idle worker group."""
        now_s = time.monotonic()
        return tuple(
            WorkerGroupStatus(
                worker_group_id=worker_group.idle.worker_group_id,
                device=worker_group.idle.device,
                rank_hosts=tuple(placement.host for placement in worker_group.placements),
                kept_bytes=sum(worker_group.idle.kept_bytes.values()),
                idle_s=now_s - worker_group.idle.idle_since_s,
            )
            for worker_group in self._idle.values()
        )

    # -- a model is over ---------------------------------------------------------------------------------------

    async def part(self, record: ModelRecord, *, keep: bool) -> None:
        """Take a model's workers away from it; they are ended unless they can be kept. Never raises."""
        self._parting.add(record.worker_group_id)
        mapping = record.request.device_map
        try:
            placements = [
                placement for _, placement in sorted(record.placements.items()) if placement.worker is not None
            ]
            kept = await self._recycled(record, placements) if keep and self._may_keep(record, placements) else None
            if kept is None:
                await end_workers(placements, removes_files=bool(mapping and mapping.offload_folder))
                if len(placements) < len(
                    record.placements
                ):  # a restarted coordinator may have been about to look for them
                    await _end_by_name(record.worker_group_id)
            answers = await asyncio.gather(
                *(_forget(node_id, record.model_id) for node_id in record.nodes), return_exceptions=True
            )
            if kept is not None and self._keep_s and not any(isinstance(answer, BaseException) for answer in answers):
                self._add(record, placements, kept)
                return
            if kept is not None:  # an agent may still hand the load's record to a coordinator that lost its own
                await end_workers(placements)
            await self.give_back(record.groups)
        finally:
            self._parting.discard(record.worker_group_id)

    def _may_keep(self, record: ModelRecord, placements: Sequence[Placement]) -> bool:
        """Places in the user's own placement group are the user's to free. Workers with several GPUs fit few loads. A
        model with fewer replicas than at first may have GPUs in a group that no load of its shape would use.
        """
        if record.request.gpus_per_rank > 1:
            return False
        if len(nodes.bundles_of_ranks(record.groups)) > len(placements):
            return False
        return (
            bool(self._keep_s)
            and record.request.placement_group is None
            and len(placements) == len(record.placements) > 0
        )

    async def _recycled(self, record: ModelRecord, placements: Sequence[Placement]) -> list[int] | None:
        """Bytes that each worker keeps; None when one of them cannot be used again."""
        asked = [
            placement.worker.recycle.options(concurrency_group="control").remote(record.model_id)
            for placement in placements
        ]
        kept: list[int | BaseException | None] = await asyncio.gather(
            *(asyncio.wait_for(answer, RECYCLE_S) for answer in asked), return_exceptions=True
        )
        usable = [size for size in kept if isinstance(size, int)]
        return usable if len(usable) == len(placements) else None

    def _add(self, record: ModelRecord, placements: Sequence[Placement], kept: Sequence[int]) -> None:
        by_node: dict[str, int] = {}
        for placement, size_bytes in zip(placements, kept, strict=True):
            by_node[placement.node_id] = by_node.get(placement.node_id, 0) + size_bytes
        idle = IdleWorkerGroup(
            worker_group_id=record.worker_group_id,
            device=record.request.device,
            node_ids=tuple(placement.node_id for placement in placements),
            kept_bytes=by_node,
            idle_since_s=time.monotonic(),
        )
        fresh = tuple(
            Placement(
                placement.rank,
                placement.node_id,
                placement.host,
                placement.bundle,
                incarnation=placement.incarnation,
                worker=placement.worker,
                is_up=True,
            )
            for placement in placements
        )
        worker_group = WorkerGroup(idle, fresh, record.groups)
        self._idle[idle.worker_group_id] = worker_group
        worker_group.minder = asyncio.get_running_loop().create_task(self._mind(worker_group))

    async def _mind(self, worker_group: WorkerGroup) -> None:
        """Ends the worker group when its time is over, or a worker of it dies."""
        watches = [
            asyncio.ensure_future(_until_busy(placement.worker.idleness.options(concurrency_group="wait").remote()))
            for placement in worker_group.placements
        ]
        try:
            await asyncio.wait(watches, timeout=self._keep_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
        worker_group.minder = None  # not to be cancelled from here on: it is this task
        await self.end([worker_group.idle.worker_group_id])

    # -- a worker group is over ----------------------------------------------------------------------------------------

    def take(self, worker_group_id: str) -> WorkerGroup:
        """The worker group is somebody's from now on."""
        worker_group = self._idle.pop(worker_group_id)
        if worker_group.minder is not None:
            worker_group.minder.cancel()
        return worker_group

    async def end(self, worker_group_ids: Iterable[str]) -> None:
        """Their workers are killed and their placement groups removed when this returns."""
        worker_groups = [
            self.take(worker_group_id) for worker_group_id in list(worker_group_ids) if worker_group_id in self._idle
        ]
        await asyncio.gather(*(self._end_worker_group(worker_group) for worker_group in worker_groups))

    async def end_all(self) -> int:
        """End all idle worker groups. Return how many there were."""
        count = len(self._idle)
        await self.end(list(self._idle))
        return count

    async def close(self) -> None:
        """End all; none is kept from now on."""
        self._keep_s = 0.0
        await self.end_all()

    async def _end_worker_group(self, worker_group: WorkerGroup) -> None:
        await _end_actors(placement.worker for placement in worker_group.placements)
        await self.give_back(worker_group.groups)

    async def give_back(self, groups: Iterable[Any]) -> None:
        """Remove these placement groups, whose workers have ended."""
        for group in groups:
            gpus = sum(await asyncio.to_thread(nodes.bundle_sizes, group))
            await asyncio.to_thread(spawn.remove_group, group)
            self._given_back.append((time.monotonic(), gpus))

    def may_free(self, gpus: int) -> bool:
        """Return whether so many GPUs were given back so lately that Ray may not count them as free yet."""
        while self._given_back and self._given_back[0][0] < time.monotonic() - FREED_S:
            self._given_back.popleft()
        return gpus <= sum(given_back for _, given_back in self._given_back)


async def _until_busy(idleness: Any) -> None:
    with contextlib.suppress(RayError):  # dead
        await idleness


async def end_workers(placements: Sequence[Placement], *, removes_files: bool = False) -> None:
    """End these workers. `removes_files`: wait a while until they have removed their files."""
    asked = []
    for placement in placements:
        # Asked first so that the rank's memory goes back in order; killed in any case.
        with contextlib.suppress(Exception):
            asked.append(placement.worker.stop.options(concurrency_group="control").remote())
    if removes_files:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), FILES_REMOVED_S)
    await _end_actors(placement.worker for placement in placements)


async def _end_by_name(worker_group_id: str) -> None:
    with contextlib.suppress(RayError):  # they are orphans then
        found = await asyncio.to_thread(spawn.find_workers, worker_group_id)
        await _end_actors(worker for _, worker in found.values())


async def _end_actors(workers: Iterable[Any]) -> None:
    await asyncio.gather(*(asyncio.to_thread(spawn.end_actor, worker) for worker in workers))


async def _forget(node_id: str, load_id: str) -> None:
    agent = await asyncio.to_thread(spawn.find_agent, node_id)
    if agent is not None:
        await asyncio.wait_for(agent.end.remote(load_id), CALL_TIMEOUT_S)
