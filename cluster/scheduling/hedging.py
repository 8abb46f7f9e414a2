"""When a chunk is fetched a second time, because its fetch is far slower than its peers. Pure.

    begun, ended   every fetch of a load on its node: those that brought their chunk say what is usual
    due            the oldest fetch, once it is `factor` times as old as usual, and `after_s` at least

The second fetch has a slot of its own; whichever brings the chunk first ends the other. A chunk is hedged once: if the
store is slow for good, a third request does not help, and deadlines and budgets (`cluster.scheduling.retry`) go on as
ever.
"""

from __future__ import annotations

from collections import deque
from statistics import median

RECENT = 64  # fetches that say what is usual
ENOUGH = 4  # with fewer, nothing is known


class Hedges:
    """The fetches of one load on one node. A fetch is a lease, by its id; `factor` 0: nothing is ever due."""

    def __init__(self, factor: float, after_s: float) -> None:
        self.count = 0  # chunks that were fetched a second time
        self.won = 0  # of those, how often the second fetch was the first to bring the chunk
        self._factor = factor
        self._after_s = after_s
        self._running: dict[str, tuple[int, float]] = {}  # lease -> chunk, since when; the oldest first
        self._hedged: set[int] = set()  # chunks
        self._seconds: set[str] = set()  # leases that are second fetches
        self._took_s: deque[float] = deque(maxlen=RECENT)

    def begun(self, lease_id: str, chunk: int, now_s: float, *, second: bool = False) -> None:
        """A fetch has begun; `second`: beside another one of the same chunk."""
        if second:
            self._hedged.add(chunk)
            self._seconds.add(lease_id)
            self.count += 1
        self._running[lease_id] = chunk, now_s

    def ended(self, lease_id: str, now_s: float, *, brought: bool = False) -> None:
        """The fetch has ended; `brought`: the chunk stands in the arena by it. Unknown ones are ignored."""
        chunk, since_s = self._running.pop(lease_id, (None, 0.0))
        second = lease_id in self._seconds
        self._seconds.discard(lease_id)
        if chunk is not None and brought:
            self._took_s.append(now_s - since_s)
            self.won += second

    def hedged(self, chunk: int) -> bool:
        """Whether the chunk was ever fetched by two at once."""
        return chunk in self._hedged

    def due(self, now_s: float) -> int | None:
        """The chunk to fetch a second time now."""
        if not self._factor or len(self._took_s) < ENOUGH:
            return None
        for chunk, since_s in self._running.values():
            if chunk not in self._hedged:
                # The others are younger.
                return chunk if now_s - since_s >= max(self._after_s, self._factor * median(self._took_s)) else None
        return None
