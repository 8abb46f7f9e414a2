"""What one node did in a load, and has. Plain frozen data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace

from cluster.reports.object_check import ObjectCheck, join_checks
from cluster.reports.rank_report import Jsonable

_OF_THE_AGENT = {"arena_bytes", "peak_host_bytes", "baseline_host_bytes", "disk_unkept_chunks"}


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """A node's arena and its disk tier at a moment."""

    arena_bytes: int
    committed_bytes: int
    leased_slots: int
    quarantined_slots: int
    disk_unkept_chunks: int = 0  # as in NodeReport


@dataclass(frozen=True, slots=True)
class NodeReport(Jsonable):
    """One node's share of a load."""

    node: str
    host: str
    needed_chunks: int  # chunks that any rank of the node touches
    needed_bytes: int
    store_chunks: int  # fetched from the store and committed
    store_bytes: int
    cached_chunks: int  # found in the arena
    cached_bytes: int
    refetched_chunks: int  # fetched, though had before: they had been evicted, or their holder died
    corrupt_chunks: int  # fetched and thrown away: digest mismatch
    retries: dict[str, int] = field(default_factory=dict)  # by cause
    arena_bytes: int = 0
    peak_host_bytes: int = 0  # the agent's own memory at its highest, the arena not counted
    baseline_host_bytes: int = 0  # and before the load
    overfetch_bytes: int = 0  # inside the needed chunks, wanted by no rank of the node
    direct_bytes: int = 0  # of store_bytes: received in the memory of ranks, past the arena
    refetched_bytes: int = 0  # had before: needed_bytes = store + disk + cached + unknown - refetched bytes
    hedges: int = 0  # chunks that were fetched by two at once, because the first was far slower than others
    hedges_won: int = 0  # of those, how often the second brought the chunk
    disk_chunks: int = 0  # read from the node's disk, verified and committed
    disk_bytes: int = 0
    disk_unkept_chunks: int = 0  # not written there for want of room or by a fault, of any load since the agent began
    unknown_chunks: int = 0  # had before the agent was restarted: fetched by a rank that is gone, or found in the arena
    unknown_bytes: int = 0
    objects: tuple[ObjectCheck, ...] = ()  # that any rank of the node touches, when there is no manifest

    def plus(self, later: NodeReport) -> NodeReport:
        """With another part of the load on the same node. A chunk that both parts need counts for each: one of them
        found it in the arena.
        """
        sums = {
            name: getattr(self, name) + getattr(later, name)
            for name in (item.name for item in fields(self))
            if isinstance(getattr(self, name), int) and name not in _OF_THE_AGENT
        }
        retries = dict(Counter(self.retries) + Counter(later.retries))
        return replace(self, **sums, retries=retries, objects=join_checks((*self.objects, *later.objects)))
