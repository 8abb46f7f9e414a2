"""What an agent's heartbeat says of its loads and ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from actors.node.node_load import NodeLoad
from cluster.messages import LoadBeat, RankBeat
from cluster.telemetry.figures import EndedPart


def load_beats(loads: Iterable[NodeLoad]) -> tuple[LoadBeat, ...]:
    """A line per part of a load."""
    return tuple(
        LoadBeat(
            load.load_id,
            load.job.attempt,
            load.store_bytes,
            load.error,
            load.complete,
            load.job.model,
            load.counters(),
        )
        for load in loads
    )


def rank_beats(loads: Collection[NodeLoad], now_s: float) -> tuple[RankBeat, ...]:
    """A line per rank."""
    return tuple(
        RankBeat(
            load.load_id,
            load.job.attempt,
            place.rank,
            place.incarnation,
            place.process.pid if place.process else 0,
            place.placed_bytes,
            silent_s=now_s - place.heard_s,
            done=not load.awaited(place),
            requests=place.figures.requests if place.figures else 0,
            allowed_requests=place.figures.allowed_requests if place.figures else 0,
        )
        for load in loads
        for place in load.ranks.values()
    )


def ended_parts(loads: Iterable[NodeLoad]) -> tuple[EndedPart, ...]:
    """The last word on loads that are over."""
    return tuple(EndedPart(load.load_id, load.job.attempt, load.job.model, load.counters()) for load in loads)
