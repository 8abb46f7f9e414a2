"""What the coordinator leaves with the agents, so that it can find a load's actors after it was killed."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError

from actors import nodes, spawn
from actors.model_record import ModelRecord, Seat
from cluster import load_state
from cluster.holders import Holders
from cluster.messages import LoadRequest

ANSWER_S = 60.0  # a worker that is well answers at once


@dataclass(frozen=True, slots=True)
class SavedLoad:
    """What agents keep for a coordinator that loses its memory: enough to find every actor again."""

    request: LoadRequest
    attempt: int
    revision: str
    total_bytes: int
    seats: tuple[tuple[int, str, str], ...]  # (rank, node id, host)
    gang_id: str  # its workers are named by it
    group: Any  # our own placement group, or None
    has_credentials: bool  # the client passed some; they are not kept here

    @staticmethod
    def of(record: ModelRecord) -> SavedLoad:
        return SavedLoad(
            replace(record.request, store=record.request.store.without_credentials(), keep=record.holders.keep),
            record.life.attempt,
            record.revision,
            record.total_bytes,
            tuple((seat.rank, seat.node_id, seat.host) for seat in record.seats.values()),
            record.gang_id,
            record.group,
            record.request.store.credentials is not None or record.credentials_missing,
        )

    def pack(self) -> bytes:
        return pickle.dumps(self, protocol=5)

    @staticmethod
    def unpack(data: bytes) -> SavedLoad:
        saved: SavedLoad = pickle.loads(data)
        return saved

    def restore(self, load_id: str, now_s: float) -> ModelRecord:
        """The record as far as it is known. The client that asked is taken to hold it, until it lapses."""
        record = ModelRecord(
            model_id=load_id,
            request=self.request,
            life=load_state.Life.new(self.request.world_size),
            holders=Holders().hold(self.request.client_id, now_s, keep=self.request.keep),
            total_bytes=self.total_bytes,
            revision=self.revision,
            gang_id=self.gang_id,
            group=self.group,
            credentials_missing=self.has_credentials,
        )
        group = self.group or self.request.placement_group
        bundles = _bundles(group, self.request) if group is not None else None
        record.seats = {
            rank: Seat(rank, node_id, host, bundles[rank] if bundles else None) for rank, node_id, host in self.seats
        }
        return record


async def find_workers_again(record: ModelRecord, incarnations: dict[int, int]) -> None:
    """Seat the living workers by their names, and learn from one of them how the store is read.

    A rank without a worker is seated again later, under the incarnation (in `incarnations`) that its agent expects.
    """
    workers = await asyncio.to_thread(spawn.find_workers, record.gang_id)
    for seat in record.seats.values():
        seat.incarnation, seat.worker = workers.get(seat.rank, (incarnations.get(seat.rank, 0), None))
    await asyncio.gather(*(_ask(record, seat) for seat in record.seats.values() if seat.worker is not None))
    await record.touch()


async def _ask(record: ModelRecord, seat: Seat) -> None:
    """What the seat's worker works on, if on anything: a worker that idles is given its job (again) by who tends it."""
    with contextlib.suppress(RayError, TimeoutError):  # dead or not well: who tends it finds out
        asked = seat.worker.assignment.options(concurrency_group="control").remote()
        assignment = await asyncio.wait_for(asked, ANSWER_S)
        seat.started = assignment is not None and assignment[0] == record.model_id
        if seat.started:
            # A kept model may have no client that could say its credentials again.
            record.request = replace(record.request, store=assignment[1])
            record.credentials_missing = False


def _bundles(group: Any, request: LoadRequest) -> list[Any]:
    return [bundle for _, _, bundle in nodes.places_in_group(group, request)]
