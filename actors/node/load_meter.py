"""What one part of a load did on its node, counted as it happens; for heartbeats. Pure.

`actors.node.chunk_sources` says for the report what was needed and where it was in the end, also across a restart of
the agent. Here counts only what this process of the agent saw: whoever adds up agents counts nothing twice.
"""

from __future__ import annotations

from collections import Counter

from cluster.messages import NodeJob, RankUpdate
from cluster.telemetry.figures import SOURCES, LoadCounters, RankFigures
from cluster.telemetry.rank_report import StageTimes


class LoadMeter:
    """Everything in here only grows."""

    def __init__(self, job: NodeJob) -> None:
        self.leases_granted = self.leases_taken_back = 0
        self.corrupt_chunks = 0
        self._throttles = 0
        self._bytes: Counter[str] = Counter()
        self._chunks: Counter[str] = Counter()
        # An agent that was restarted: these ranks may have said a part to the one before.
        self._former = set(zip(job.ranks, job.incarnations, strict=False)) if job.again else set()
        self._stages: dict[tuple[int, int], StageTimes] = {}  # (rank, incarnation) -> what it said last
        self._before = StageTimes()  # of `_former`: what they said first

    def had(self, source: str, size_bytes: int) -> None:
        """A chunk is there; `source` is one of SOURCES."""
        self._bytes[source] += size_bytes
        self._chunks[source] += 1

    def said(self, update: RankUpdate) -> None:
        """A rank's update that was taken in."""
        self._throttles += update.throttled
        self.corrupt_chunks += update.retries.get("digest_mismatch", 0)
        if update.figures is not None:
            self._stages_of(update.rank, update.incarnation, update.figures)

    def _stages_of(self, rank: int, incarnation: int, figures: RankFigures) -> None:
        who = rank, incarnation
        if who in self._former:
            self._former.discard(who)
            self._before += figures.stages
        self._stages[who] = figures.stages

    def counters(self, retries: Counter[str], hedges: int, hedges_won: int, *, digests: bool) -> LoadCounters:
        """All of it now. `digests`: chunks have any."""
        fetched = sum(self._chunks[source] for source in SOURCES if source != "arena")
        return LoadCounters(
            bytes_by_source={source: self._bytes[source] for source in SOURCES},
            chunks_by_source={source: self._chunks[source] for source in SOURCES},
            verified_chunks=fetched if digests else 0,
            corrupt_chunks=self.corrupt_chunks,
            retries=dict(retries),
            leases_granted=self.leases_granted,
            leases_taken_back=self.leases_taken_back,
            hedges=hedges,
            hedges_won=hedges_won,
            throttles=self._throttles,
            stages=sum(self._stages.values(), StageTimes()) - self._before,
        )
