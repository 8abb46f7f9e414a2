"""The error of a load that could not have one of its chunks."""

from __future__ import annotations

from actors.node.rank_place import RankPlace
from cluster.errors import ChunkFailed
from cluster.messages import FetchFailure
from cluster.plans.packed_plan import SharedTables
from storage.errors import IntegrityError, LongshoreError, ObjectChanged, ObjectNotFound


def never_brought(reason: str, tables: SharedTables, chunk: int, rank: int, cause: str, load_id: str) -> LongshoreError:
    """Of workers that have said nothing: they died, or their leases ended."""
    return ChunkFailed(
        f"a chunk could not be had: {reason}",
        hint="workers died of it, or were slower than LONGSHORE_LEASE_DEADLINE_S: see their logs and the store",
        shard=tables.shards[tables.chunks.shard[chunk]].key,
        chunk=chunk,
        range=str(tables.chunks.byte_range(chunk)),
        rank=rank,
        cause=cause,
        load=load_id,
    )


def given_up(failure: FetchFailure, place: RankPlace, load_id: str) -> LongshoreError:
    """Of a worker that has said why, the last of those that tried: names shard, chunk, worker and cause."""
    where = {"rank": place.rank, "pid": place.process.pid if place.process else None, "tries": failure.tries}
    if isinstance(failure.error, IntegrityError):
        return failure.error.with_details(**where)
    cause = type(failure.error).__name__
    if deeper := failure.error.details.get("cause"):  # of a connection: what the socket said
        cause = f"{cause} ({deeper})"
    details = {**failure.error.details, **where, "cause": cause, "load": load_id}
    return ChunkFailed(f"a chunk could not be had: {failure.error.message}", hint=_hint(failure.error), **details)


def _hint(error: LongshoreError) -> str:
    """What to do: what the error says, or what its kind means for a load."""
    if not error.hint and isinstance(error, ObjectChanged):
        return "the object was replaced under the load: load again, which reads the new version whole"
    if not error.hint and isinstance(error, ObjectNotFound):
        return "the object was deleted, or never was there: `longshore verify` lists what is missing"
    return error.hint
