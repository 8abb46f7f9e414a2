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
    workers = await asyncio.to_thread(spawn.find_workers, record.model_id)
    for seat in record.seats.values():
        seat.incarnation, seat.worker = workers.get(seat.rank, (incarnations.get(seat.rank, 0), None))
    for _, worker in workers.values():
        # A kept model may have no client that could say its credentials again.
        with contextlib.suppress(RayError, TimeoutError):
            asked = worker.store_access.options(concurrency_group="control").remote()
            access = await asyncio.wait_for(asked, ANSWER_S)
            if access is not None:
                record.request = replace(record.request, store=access)
                record.credentials_missing = False
                break
    await record.touch()


def _bundles(group: Any, request: LoadRequest) -> list[Any]:
    return [bundle for _, _, bundle in nodes.places_in_group(group, request)]
