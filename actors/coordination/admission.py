"""Whether a load's plan fits where its ranks sit, beside what others were promised; idle gangs give way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from actors.coordination import nodes, spawn
from actors.coordination.gangs import Gangs
from actors.coordination.model_record import ModelRecord, Seat
from actors.coordination.nodes import NodeAgents
from actors.coordination.tending import finished, settled
from cluster.config import Config
from cluster.errors import DoesNotFit, DoesNotFitNow
from cluster.fit.needs import WORKER_BYTES, Claim, PlannedRanks, check_fit, host_bytes, larger_claims
from cluster.plans.packed_plan import PackedPlan
from cluster.request import LoadRequest
from cluster.scheduling.topology import NodeInfo
from cluster.scheduling.warm_pool import IdleGang, in_the_way, with_kept_memory


def claims_of(models: Iterable[ModelRecord], but: ModelRecord) -> list[Claim]:
    """Return what all models but one are still to take, by node: ranks that are replaced take theirs again."""
    return [
        Claim(record.model_id, node_id, record.pools.get(node_id, ()), size_bytes)
        for record in models
        if record is not but and not record.life.is_over
        for node_id in record.nodes
        if (size_bytes := _to_take(record, [seat for seat in record.seats.values() if seat.node_id == node_id]))
    ]


def new_workers(seats: Mapping[int, Seat]) -> set[int]:
    """Ranks whose processes are still to be started, or just are."""
    return {rank for rank, seat in seats.items() if not (seat.is_up or seat.started or seat.report)}


def promise(record: ModelRecord, ranks: Mapping[int, int], nodes: Iterable[NodeInfo]) -> None:
    """Note that these ranks (and the memory that each takes of its host) have been found to fit on the nodes."""
    record.host_bytes = {**record.host_bytes, **ranks}
    for node in nodes:
        record.pools[node.node_id] = tuple(pool.pool_id for pool in node.pools)
        record.kept_bytes[node.node_id] = node.kept_bytes


def _to_take(record: ModelRecord, seats: list[Seat]) -> int:
    here = {seat.rank: seat for seat in seats}
    left = [seat for seat in seats if seat.report is None]  # the others have it all
    wanted = sum(record.host_bytes.get(seat.rank, 0) for seat in left)
    taken = sum(_taken(record, seat) for seat in left)
    kept = record.kept_bytes.get(seats[0].node_id, 0) if seats else 0
    return max(0, wanted - max(taken, kept)) + WORKER_BYTES * len(new_workers(here))


def _taken(record: ModelRecord, seat: Seat) -> int:
    """Return what a rank has of its host's memory at least, by what it placed: that may be on its other devices, and
    takes less when it is converted.
    """
    host_bytes = record.host_bytes.get(seat.rank, 0)
    if record.plan is None:  # after the coordinator was restarted
        return min(seat.placed_bytes, host_bytes)
    facts = record.plan.ranks[seat.rank]
    elsewhere_bytes = facts.device_bytes - (host_bytes - facts.staging_bytes)
    there_bytes = facts.device_bytes * seat.placed_bytes // max(1, facts.read_bytes)
    return min(host_bytes, max(0, there_bytes - elsewhere_bytes))


STARTING_S = 30.0  # workers are up by then
FREED_S = 5.0  # the memory of a process that was killed is free again by then


@dataclass(frozen=True, slots=True)
class Room:
    """Where a load's ranks are to sit, and what there is for them at this moment."""

    rank_nodes: dict[int, int]  # rank -> index into `infos`
    infos: list[NodeInfo]
    claims: tuple[Claim, ...]  # of other loads
    new_workers: set[int]

    def misfit(self, plan: PlannedRanks, request: LoadRequest, config: Config) -> DoesNotFit | None:
        """The error, if the ranks do not fit there."""
        return check_fit(
            plan,
            self.rank_nodes,
            self.infos,
            config,
            request.device,
            self.claims,
            self.new_workers,
            request.fit,
        )


async def room_of(
    record: ModelRecord,
    seats: Mapping[int, Seat],
    agents: NodeAgents,
    others: Collection[ModelRecord],
    taken: IdleGang | None = None,
) -> Room:
    """As the agents say. It holds until somebody else runs: a promise is made at once."""
    order = sorted(await agents.of({seat.node_id: seat.host for seat in seats.values()}))
    before = claims_of(others, record)
    facts = await nodes.facts_of(order, agents.ask)
    claims = larger_claims(before, claims_of(others, record))
    infos = with_kept_memory([facts[node_id] for node_id in order], taken)
    return Room({rank: order.index(seat.node_id) for rank, seat in seats.items()}, infos, claims, new_workers(seats))


async def fit_on(
    record: ModelRecord,
    seats: Mapping[int, Seat],
    plan: PlannedRanks,
    agents: NodeAgents,
    config: Config,
    others: Collection[ModelRecord],
    taken: IdleGang | None = None,
) -> DoesNotFit | None:
    """Whether the ranks that are to sit there fit; if so, what they take is theirs from here on. Else the error.

    Raises what an agent raises: ArenaTooLarge...
    """
    room = await room_of(record, seats, agents, others, taken)
    # From there to the promise nothing else runs, or two loads could be promised the same memory.
    misfit = room.misfit(plan, record.request, config)
    if misfit is None:
        device = record.request.device
        promise(record, {rank: host_bytes(plan.ranks[rank], device) for rank in seats}, room.infos)
    return misfit


async def come_up(seats: Iterable[Seat]) -> bool:
    """Wait for workers that are just starting: until one has answered nobody knows how much of its memory it has taken
    already, and all of it is counted. True when one has come up.
    """
    coming = [seat for seat in seats if seat.worker is not None and not (seat.is_up or seat.started or seat.report)]
    await settled(_up(seat) for seat in coming)
    return any(seat.is_up for seat in coming)


async def _up(seat: Seat) -> None:
    worker = seat.worker
    await spawn.meet_worker(worker, seat.host, STARTING_S)
    seat.is_up = seat.is_up or seat.worker is worker


async def fit_in(
    record: ModelRecord,
    plan: PackedPlan,
    agents: NodeAgents,
    config: Config,
    gangs: Gangs,
    others: Collection[ModelRecord],
    taken: IdleGang | None,
) -> None:
    """Returns when every device and host has the memory. `taken`: the gang whose workers the load has.

    Raises DoesNotFit, and what an agent raises: ArenaTooLarge...
    """
    # Models that have just ended may not have given back yet what they had.
    freed_s = time.monotonic() + FREED_S  # nor other processes that have just ended
    ended_s = [other.ended_s for other in others if other.life.is_over and other.host_bytes]
    give_up_s = max(ended_s, default=0.0) + FREED_S
    starting_s = time.monotonic() + STARTING_S
    while True:
        misfit = await fit_on(record, record.seats, plan, agents, config, others, taken)
        if misfit is None:
            return
        if ending := in_the_way(gangs.idle(), record.nodes):
            await finished(gangs.end(ending))
            give_up_s = time.monotonic() + FREED_S
        elif time.monotonic() < starting_s and await _may_fit(record, plan, agents, config, others, taken):
            if not await come_up(record.seats.values()):
                raise misfit
        elif time.monotonic() >= (max(give_up_s, freed_s) if isinstance(misfit, DoesNotFitNow) else give_up_s):
            raise misfit
        else:
            await asyncio.sleep(0.1)


async def _may_fit(
    record: ModelRecord,
    plan: PlannedRanks,
    agents: NodeAgents,
    config: Config,
    others: Collection[ModelRecord],
    taken: IdleGang | None,
) -> bool:
    """Whether only the memory of its own workers is missing, of which some are just starting and may have taken it."""
    room = await room_of(record, record.seats, agents, others, taken)
    starting = {rank for rank in room.new_workers if record.seats[rank].worker is not None}
    settled_room = replace(room, new_workers=room.new_workers - starting)
    return bool(starting) and settled_room.misfit(plan, record.request, config) is None
