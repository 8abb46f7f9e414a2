"""A second lease on a chunk whose fetch is far slower than its peers: always in another slot. Pure.

    second lease ----commit----> first come, first kept: `close_losers` takes every other lease on the chunk back
                                 loser: told to close; its slot is fenced until it says that it has, or is dead

Whether one is due `cluster.scheduling.concurrency` says.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.node.rank_place import ChunkKeys, RankPlace
from cluster.messages import NodeJob
from cluster.scheduling.concurrency import Hedges
from cluster.scheduling.lease_queue import ChunkState, LeaseQueue
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Lease


class SecondLeases(Hedges):
    """Hedges of one load on one node. What goes straight into a rank's memory is not among its fetches: there would be
    no other slot.
    """

    def __init__(self, job: NodeJob, cache: ChunkCache, keys: ChunkKeys, queue: LeaseQueue) -> None:
        super().__init__(job.hedge_factor, job.hedge_after_s)
        self._job, self._cache, self._keys, self._queue = job, cache, keys, queue

    def lease(self, place: RankPlace, now_s: float) -> tuple[int, Lease] | None:
        """(chunk, lease) for a rank that has nothing else to fetch; None when nothing is due, or no slot is free."""
        chunk, owner = self.due(now_s), self._job.part
        if chunk is None or place.process is None or not self._cache.shares.may_claim(owner):
            return None
        lease = self._cache.lease(self._keys[chunk], place.process, now_s + self._job.lease_deadline_s, owner=owner)
        if lease is None:
            self._cache.shares.satisfied(owner)  # it can do without
            return None
        self.begun(lease.lease_id, chunk, now_s, second=True)
        return chunk, lease

    def close_losers(self, places: Iterable[RankPlace], chunk: int, now_s: float) -> None:
        """The chunk may be there: then whoever still fetches it is told to stop.

        Slots count as taken back at the lease's own deadline: nobody is killed earlier for having been hedged.
        """
        if not self.hedged(chunk) or self._queue.state(chunk) is ChunkState.LEASED:
            return
        deadlines = {lease.lease_id: lease.deadline_s for lease in self._cache.in_flight(self._keys[chunk])}
        for place in places:
            for lease_id in [lease_id for lease_id, fetched in place.leases.items() if fetched == chunk]:
                del place.leases[lease_id]
                self.ended(lease_id, now_s)
                self._cache.revoke(lease_id, deadlines.get(lease_id, now_s))
                place.taken_back.add(lease_id)
                place.to_close.append(lease_id)
