"""How a model's workers part from it: they are ended, or stay as an idle *gang* for the next load of their shape.

    part(record, keep) -- recycle every worker --> agents forget the load --> idle gang, for Config.warm_workers_s
                       `- or one cannot be recycled, or nothing is to be kept --> killed, placement group removed
    take(gang_id)      --> the next load's seats (`actors.coordination.load_run`)

Which gang is taken or ended for whom is decided in `cluster.scheduling.warm_pool`; a gang that loses a worker ends
as a whole. A coordinator that is restarted knows of no gangs: their workers are strays then (see `strays`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from actors.coordination import spawn
from actors.coordination.model_record import ModelRecord, Seat
from cluster.scheduling.warm_pool import IdleGang
from cluster.telemetry.report import GangStatus

CALL_TIMEOUT_S = 60.0  # for calls to agents, which answer at once when they are well
FILES_REMOVED_S = 10.0  # what a load that did not end well has written goes with it
RECYCLE_S = 20.0  # a worker that has not let go of its model by then is ended


@dataclass(slots=True)
class Gang:
    """Idle workers with the places they hold."""

    idle: IdleGang
    seats: tuple[Seat, ...]  # by rank
    group: Any  # our own placement group, or None
    minder: asyncio.Task[None] | None = None


class Gangs:
    """The coordinator's idle gangs."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: how long a gang stays idle; 0: no workers are kept."""
        self._keep_s = keep_s
        self._idle: dict[str, Gang] = {}
        self._parting: set[str] = set()  # neither a model's any more nor idle yet

    @property
    def ids(self) -> set[str]:
        """Gangs that are nobody's and yet no strays."""
        return self._idle.keys() | self._parting

    def idle(self) -> list[IdleGang]:
        return [gang.idle for gang in self._idle.values()]

    def status(self) -> tuple[GangStatus, ...]:
        now_s = time.monotonic()
        return tuple(
            GangStatus(
                gang_id=gang.idle.gang_id,
                device=gang.idle.device,
                rank_hosts=tuple(seat.host for seat in gang.seats),
                kept_bytes=sum(gang.idle.kept_bytes.values()),
                idle_s=now_s - gang.idle.idle_since_s,
            )
            for gang in self._idle.values()
        )

    # -- a model is over ---------------------------------------------------------------------------------------

    async def part(self, record: ModelRecord, *, keep: bool) -> None:
        """Take a model's workers away from it; they are ended unless they can be kept. Never raises."""
        self._parting.add(record.gang_id)
        mapping = record.request.device_map
        try:
            seats = [seat for _, seat in sorted(record.seats.items()) if seat.worker is not None]
            kept = await self._recycled(record, seats) if keep and self._may_keep(record, seats) else None
            if kept is None:
                await _end_workers(seats, removes_files=bool(mapping and mapping.offload_folder))
                if len(seats) < len(record.seats):  # a restarted coordinator may have been about to look for them
                    await _end_by_name(record.gang_id)
            told = await asyncio.gather(
                *(_forget(node_id, record.model_id) for node_id in record.nodes), return_exceptions=True
            )
            if kept is not None and self._keep_s and not any(isinstance(answer, BaseException) for answer in told):
                self._add(record, seats, kept)
                return
            if kept is not None:  # an agent may still hand the load's record to a coordinator that lost its own
                await _end_workers(seats)
            if record.group is not None:
                await asyncio.to_thread(spawn.remove_group, record.group)
        finally:
            self._parting.discard(record.gang_id)

    def _may_keep(self, record: ModelRecord, seats: Sequence[Seat]) -> bool:
        """Places in the user's own placement group are the user's to free. Workers with several GPUs fit few loads."""
        if record.request.gpus_per_rank > 1:
            return False
        return bool(self._keep_s) and record.request.placement_group is None and len(seats) == len(record.seats) > 0

    async def _recycled(self, record: ModelRecord, seats: Sequence[Seat]) -> list[int] | None:
        """Bytes that each worker keeps; None when one of them cannot be used again."""
        asked = [seat.worker.recycle.options(concurrency_group="control").remote(record.model_id) for seat in seats]
        kept: list[int | BaseException | None] = await asyncio.gather(
            *(asyncio.wait_for(answer, RECYCLE_S) for answer in asked), return_exceptions=True
        )
        usable = [size for size in kept if isinstance(size, int)]
        return usable if len(usable) == len(seats) else None

    def _add(self, record: ModelRecord, seats: Sequence[Seat], kept: Sequence[int]) -> None:
        by_node: dict[str, int] = {}
        for seat, size_bytes in zip(seats, kept, strict=True):
            by_node[seat.node_id] = by_node.get(seat.node_id, 0) + size_bytes
        idle = IdleGang(
            gang_id=record.gang_id,
            device=record.request.device,
            node_ids=tuple(seat.node_id for seat in seats),
            kept_bytes=by_node,
            idle_since_s=time.monotonic(),
        )
        fresh = tuple(
            Seat(
                seat.rank,
                seat.node_id,
                seat.host,
                seat.bundle,
                incarnation=seat.incarnation,
                worker=seat.worker,
                is_up=True,
            )
            for seat in seats
        )
        gang = Gang(idle, fresh, record.group)
        self._idle[idle.gang_id] = gang
        gang.minder = asyncio.get_running_loop().create_task(self._mind(gang))

    async def _mind(self, gang: Gang) -> None:
        """Ends the gang when its time is over, or a worker of it dies."""
        watches = [
            asyncio.ensure_future(_until_busy(seat.worker.idleness.options(concurrency_group="wait").remote()))
            for seat in gang.seats
        ]
        try:
            await asyncio.wait(watches, timeout=self._keep_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
        gang.minder = None  # not to be cancelled from here on: it is this task
        await self.end([gang.idle.gang_id])

    # -- a gang is over ----------------------------------------------------------------------------------------

    def take(self, gang_id: str) -> Gang:
        """The gang is somebody's from now on."""
        gang = self._idle.pop(gang_id)
        if gang.minder is not None:
            gang.minder.cancel()
        return gang

    async def end(self, gang_ids: Iterable[str]) -> None:
        """Their workers are killed and their placement groups removed when this returns."""
        gangs = [self.take(gang_id) for gang_id in list(gang_ids) if gang_id in self._idle]
        await asyncio.gather(*(_end_gang(gang) for gang in gangs))

    async def end_all(self) -> int:
        """How many gangs there were."""
        count = len(self._idle)
        await self.end(list(self._idle))
        return count

    async def close(self) -> None:
        """End all; none is kept from now on."""
        self._keep_s = 0.0
        await self.end_all()


async def _until_busy(idleness: Any) -> None:
    with contextlib.suppress(RayError):  # dead
        await idleness


async def _end_gang(gang: Gang) -> None:
    await _end_actors(seat.worker for seat in gang.seats)
    if gang.group is not None:
        await asyncio.to_thread(spawn.remove_group, gang.group)


async def _end_workers(seats: Sequence[Seat], *, removes_files: bool = False) -> None:
    asked = []
    for seat in seats:
        # Asked first so that the rank's memory goes back in order; killed in any case.
        with contextlib.suppress(Exception):
            asked.append(seat.worker.stop.options(concurrency_group="control").remote())
    if removes_files:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), FILES_REMOVED_S)
    await _end_actors(seat.worker for seat in seats)


async def _end_by_name(gang_id: str) -> None:
    with contextlib.suppress(RayError):  # they are strays then
        found = await asyncio.to_thread(spawn.find_workers, gang_id)
        await _end_actors(worker for _, worker in found.values())


async def _end_actors(workers: Iterable[Any]) -> None:
    await asyncio.gather(*(asyncio.to_thread(spawn.end_actor, worker) for worker in workers))


async def _forget(node_id: str, load_id: str) -> None:
    agent = await asyncio.to_thread(spawn.find_agent, node_id)
    if agent is not None:
        await asyncio.wait_for(agent.end.remote(load_id), CALL_TIMEOUT_S)
