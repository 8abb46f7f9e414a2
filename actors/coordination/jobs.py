"""What agents and workers are told of a load. Pure.

The plan's shared tables go beside these messages: see `actors.coordination.load_run`.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.coordination.model_record import ModelRecord, Seat
from actors.coordination.saved_load import SavedLoad
from cluster.config import Config
from cluster.fit.needs import min_slots
from cluster.messages import FetchSettings, NodeJob, RankJob, SlotHolder
from cluster.telemetry.families import model_label
from storage.errors import ArenaBusy


def node_job(record: ModelRecord, node_id: str, attempt: int, config: Config) -> NodeJob:
    """One part of a node's share: the ranks that this attempt brought there.

    Those that are ready are told as done, for an agent that was restarted.
    """
    seats = [record.seats[rank] for rank in record.ranks_on(node_id, attempt)]
    return NodeJob(
        load_id=record.model_id,
        attempt=attempt,
        shared=b"",
        store_identity=record.request.store.ref.identity(),
        ranks=tuple(seat.rank for seat in seats),
        done=frozenset(seat.rank for seat in seats if seat.report is not None),
        min_slots=min_slots(len(seats)) if any(seat.report is None for seat in seats) else 0,
        chunk_attempts=config.chunk_attempts,
        lease_deadline_s=config.lease_deadline_s,
        placement=record.request.placement,
        record=SavedLoad.of(record).pack(),
        most_requests=config.fetch_threads,
        hedge_factor=config.hedge_factor,
        hedge_after_s=config.hedge_after_s,
        incarnations=tuple(seat.incarnation for seat in seats),
        again=(node_id, attempt) in record.begun,
        replaced=any(seat.replaced for seat in seats),
        model=model_label(record.request.uri),
    )


def slots_taken(job: NodeJob, host: str, waited_s: float, holders: Sequence[SlotHolder]) -> ArenaBusy:
    """The error of a load that has waited for its slots for as long as it may."""
    others = [str(holder) for holder in holders if holder.load_id != job.load_id]
    return ArenaBusy(
        "the load did not get its arena slots in time: other loads hold them",
        hint="wait for them, release one (`longshore release`) or end its process, raise LONGSHORE_ARENA_BYTES, or let "
        "loads wait longer (LONGSHORE_SLOTS_WAIT_S)",
        load=job.load_id,
        host=host,
        needed_slots=job.min_slots,
        waited_s=round(waited_s, 1),
        holders="; ".join(others) or "none any more",
    )


def rank_job(record: ModelRecord, seat: Seat, config: Config) -> RankJob:
    """One rank's share, for the worker that sits there now."""
    return RankJob(
        load_id=record.model_id,
        attempt=seat.attempt,
        rank=seat.rank,
        incarnation=seat.incarnation,
        shared=b"",
        store=record.request.store,
        fetch=fetch_settings(config),
        placement=record.request.placement,
        mapped=record.request.device_map is not None,
        offload_folder=record.request.device_map.offload_folder if record.request.device_map else "",
        logs=config.logs,
    )


def fetch_settings(config: Config) -> FetchSettings:
    """The part of the settings that a rank reads by."""
    return FetchSettings(config.fetch_threads, config.fetch_attempts, config.read_timeout_s, config.heartbeat_s)
