"""The counters of a load on one node: those of this agent's process, and the sources of the load's chunks. Pure.

`LoadMeter` counts events in this process of the agent. A load's meter begins at 0. Its counts are the growth of the
agent's counters of the model between the begin and the end of the load.

`ChunkSources` finds for the report where the needed chunks came from: the store, the disk, or the arena, which had them
before. An agent that was restarted during the load begins with the ranks' own reports (`RankHello.fetched`). A rank
that is gone reports nothing. It may have fetched a chunk of the arena, or the chunk may have been there before. The
report counts such a chunk as "unknown".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cluster.messages import ARENA_READ, DISK_READ, PEER_READ, NodeJob, RankHello, RankUpdate
from cluster.telemetry.stats import SOURCES, LoadCounters, RankStats, StageTimes
from storage.checkpoints.model_index import ChunkTable


class LoadMeter:
    """Counters of one load. They only grow."""

    def __init__(self, job: NodeJob) -> None:
        self.leases_granted = self.leases_taken_back = 0
        self.corrupt_chunks = 0
        self._throttles = 0
        self._bytes: Counter[str] = Counter()
        self._chunks: Counter[str] = Counter()
        # After an agent's restart, these ranks may have reported some of it to the previous agent.
        self._former = set(zip(job.ranks, job.incarnations, strict=False)) if job.again else set()
        self._stages: dict[tuple[int, int], StageTimes] = {}  # (rank, incarnation) -> reported last
        self._before = StageTimes()  # of `_former`: reported first

    def had(self, source: str, size_bytes: int) -> None:
        """Count a chunk that is now in the arena or placed. `source` is one of SOURCES."""
        self._bytes[source] += size_bytes
        self._chunks[source] += 1

    def reported(self, update: RankUpdate) -> None:
        """Count a rank's update."""
        self._throttles += update.throttled
        self.corrupt_chunks += update.retries.get("digest_mismatch", 0)
        if update.stats is not None:
            self._stages_of(update.rank, update.incarnation, update.stats)

    def _stages_of(self, rank: int, incarnation: int, stats: RankStats) -> None:
        who, stages = (rank, incarnation), stats.stages.exact()
        if who in self._former:
            self._former.discard(who)
            self._before += stages
        self._stages[who] = stages

    def counters(self, retries: Counter[str], hedges: int, hedges_won: int, *, digests: bool) -> LoadCounters:
        """Return all counters. `digests`: whether the chunks have digests."""
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


# `direct`: past the arena, into a rank's own memory; `arena`: read from a kept slot
STORE, DISK, STORE_DIRECT, ARENA, PEER = "store", "disk", "direct", "arena", "peer"
# in reports
METERED = {STORE: "store_via_arena", DISK: "disk", STORE_DIRECT: "store_direct", ARENA: "arena", PEER: "peer"}


class ChunkSources:
    """The sources of a load's chunks. A chunk that is fetched again counts again, and as `refetched`."""

    def __init__(self, job: NodeJob, chunks: ChunkTable, meter: LoadMeter) -> None:
        self.store_bytes = 0
        self._job = job
        self._chunks = chunks
        self._meter = meter
        self._store: set[int] = set()
        self._disk: set[int] = set()
        self._peer: set[int] = set()
        self._cached: set[int] = set()
        self._disk_bytes = self._direct_bytes = self._peer_bytes = 0
        self._refetched_chunks = self._refetched_bytes = 0
        incarnations = job.incarnations or (0,) * len(job.ranks)
        # Ranks that have not yet reported their fetches from before the agent's restart.
        self._silent = dict(zip(job.ranks, incarnations, strict=True)) if job.again else {}

    def in_arena(self, chunk: int) -> None:
        """Note that the arena has the chunk, although this agent did not order it for this load."""
        if not self._knows(chunk):
            self._cached.add(chunk)
            if not self._job.again:  # else this load may have fetched it before the restart
                self._meter.had("arena", self._chunks.byte_range(chunk).size_bytes)

    def fetched(self, chunk: int, source: str) -> None:
        """Note that the chunk was fetched and committed."""
        if source == ARENA:
            self.in_arena(chunk)
            return
        size_bytes = self._chunks.byte_range(chunk).size_bytes
        if self._knows(chunk):
            self._refetched_chunks += 1
            self._refetched_bytes += size_bytes
        self._add(chunk, source)
        self._meter.had(METERED[source], size_bytes)

    def _add(self, chunk: int, source: str) -> None:
        size_bytes = self._chunks.byte_range(chunk).size_bytes
        if source == DISK:
            self._disk.add(chunk)
            self._disk_bytes += size_bytes
            return
        if source == PEER:
            self._peer.add(chunk)
            self._peer_bytes += size_bytes
            return
        self._store.add(chunk)
        self.store_bytes += size_bytes
        self._direct_bytes += size_bytes if source == STORE_DIRECT else 0

    def late(self, chunk: int, source: str) -> None:
        """Note a chunk that came too late to be committed. The rank may still have placed it."""
        known = self._knows(chunk)
        self.reported({source: (chunk,)})
        if not known:
            self._meter.had(METERED[source], self._chunks.byte_range(chunk).size_bytes)

    def reported(self, fetched: Mapping[str, tuple[int, ...]]) -> None:
        """Note a rank's fetches, even unknown ones: a lease may have ended meanwhile, or a message may be lost."""
        for source, chunks in fetched.items():
            for chunk in chunks:
                if source == ARENA:
                    if not self._knows(chunk):
                        self._cached.add(chunk)
                elif self._job.again and chunk in self._cached:
                    self._cached.remove(chunk)  # this load fetched it, before the restart
                    self._add(chunk, source)
                elif not self._knows(chunk):
                    self._add(chunk, source)

    def hello(self, hello: RankHello) -> None:
        """Note the fetches that a rank reports in its hello."""
        self.reported(hello.fetched)
        if self._silent.get(hello.rank) == hello.incarnation:
            del self._silent[hello.rank]

    def stats(self, needed: list[int]) -> dict[str, Any]:
        """Return the counts of a complete load, by their names in NodeReport."""
        cached, unknown = self._cached, {chunk for chunk in needed if not self._knows(chunk)}
        if self._job.again and (self._silent or self._job.replaced):
            cached, unknown = set(), cached | unknown
        elif self._job.again:  # every rank has reported, so chunks that none of them fetched were in the arena
            cached, unknown = cached | unknown, set()
        return {
            "store_chunks": len(self._store),
            "store_bytes": self.store_bytes,
            "direct_bytes": self._direct_bytes,
            "disk_chunks": len(self._disk),
            "disk_bytes": self._disk_bytes,
            "peer_chunks": len(self._peer),
            "peer_bytes": self._peer_bytes,
            "cached_chunks": len(cached),
            "cached_bytes": self._size_bytes(cached),
            "unknown_chunks": len(unknown),
            "unknown_bytes": self._size_bytes(unknown),
            "refetched_chunks": self._refetched_chunks,
            "refetched_bytes": self._refetched_bytes,
        }

    def _knows(self, chunk: int) -> bool:
        return chunk in self._store or chunk in self._disk or chunk in self._peer or chunk in self._cached

    def _size_bytes(self, chunks: set[int]) -> int:
        return int(self._chunks.sizes_bytes()[sorted(chunks)].sum())


def source_of(lease_id: str, source: str) -> str:
    """Return the source of a committed chunk; `source` is as in `Commit`."""
    if source == DISK_READ:
        return DISK
    if source == ARENA_READ:
        return ARENA
    if source == PEER_READ:
        return PEER
    return STORE_DIRECT if lease_id.startswith("direct-") else STORE


def by_source(sources: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Return the chunks of each source, for `RankHello.fetched`."""
    return {source: tuple(c for c, of in sources.items() if of == source) for source in set(sources.values())}
