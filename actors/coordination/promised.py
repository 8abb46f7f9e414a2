"""Host memory that loads were promised and have not taken yet, from the coordinator's notes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from actors.coordination.model_record import ModelRecord, Seat
from cluster.fit.needs import WORKER_BYTES, Claim
from cluster.scheduling.topology import NodeInfo


def claims_of(models: Iterable[ModelRecord], but: ModelRecord) -> list[Claim]:
    """What all models but one are still to take, by node: ranks that are replaced take theirs again."""
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
    """What a rank has of its host's memory at least, by what it has placed: that may be on its other devices, and
    takes less when it is converted.
    """
    host_bytes = record.host_bytes.get(seat.rank, 0)
    if record.plan is None:  # after the coordinator was restarted
        return min(seat.placed_bytes, host_bytes)
    facts = record.plan.ranks[seat.rank]
    elsewhere_bytes = facts.device_bytes - (host_bytes - facts.staging_bytes)
    there_bytes = facts.device_bytes * seat.placed_bytes // max(1, facts.read_bytes)
    return min(host_bytes, max(0, there_bytes - elsewhere_bytes))
