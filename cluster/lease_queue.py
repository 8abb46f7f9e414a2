"""Which chunk of a load is fetched next on one node, and who still needs what. Pure; time is passed in.

    PENDING --leased--> LEASED --committed--> COMMITTED --evicted--> PENDING
       ^  |                |
       |  +--wait_for--> WAITING (the same bytes are on their way under another lease)
       +--requeue, failed--+

Chunks go out in plan order, so that all ranks advance through the model together and a chunk is used soon after it
came. Calls are O(log n) or O(ranks).
"""

from __future__ import annotations

import enum
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from cluster.retry import Fail, Retry, decide_elsewhere


class ChunkState(enum.Enum):
    """Where a chunk of the load stands on this node."""

    PENDING = "pending"  # somebody may lease it, now or after a pause
    WAITING = "waiting"  # another lease is fetching the same bytes
    LEASED = "leased"
    COMMITTED = "committed"


class LeaseQueue:
    """The chunks of one load on one node."""

    def __init__(self, needs: Mapping[int, NDArray[np.int64]]) -> None:
        """`needs[rank]`: the chunk ids that the rank touches."""
        self._needs = {rank: frozenset(chunks.tolist()) for rank, chunks in needs.items()}
        self._left = {rank: set(chunks) for rank, chunks in self._needs.items()}
        chunks = sorted(frozenset[int]().union(*self._needs.values()))
        self._states = dict.fromkeys(chunks, ChunkState.PENDING)
        self._ready = chunks  # a heap; entries whose chunk is not PENDING any more are dropped when they come up
        self._paused: list[tuple[float, int]] = []  # a heap of (when, chunk)
        self._waiting: defaultdict[bytes, set[int]] = defaultdict(set)
        self._failed_by: defaultdict[int, list[int]] = defaultdict(list)  # chunk -> ranks that gave it up

    def __len__(self) -> int:
        """Chunks of the load on this node."""
        return len(self._states)

    @property
    def complete(self) -> bool:
        """True when every rank has placed all it needs."""
        return not any(self._left.values())

    def state(self, chunk: int) -> ChunkState:
        return self._states[chunk]

    def pending(self) -> list[int]:
        """Chunks nobody works on, in plan order."""
        return [chunk for chunk, state in self._states.items() if state is ChunkState.PENDING]

    def needing(self, chunk: int) -> tuple[int, ...]:
        """Ranks that have not placed the chunk yet."""
        return tuple(rank for rank, left in self._left.items() if chunk in left)

    # -- fetching ----------------------------------------------------------------------------------------------

    def next_for(self, rank: int, now_s: float) -> int | None:
        """The chunk that `rank` should lease now; it stays PENDING until `leased`. None when there is none.

        A rank gets a chunk that it gave up only when every rank of the node has.
        """
        while self._paused and self._paused[0][0] <= now_s:
            heapq.heappush(self._ready, heapq.heappop(self._paused)[1])
        set_aside: list[int] = []
        found = None
        while self._ready:
            chunk = self._ready[0]
            if self._states[chunk] is not ChunkState.PENDING or not self.needing(chunk):
                heapq.heappop(self._ready)
            elif self._should_avoid(chunk, rank):
                set_aside.append(heapq.heappop(self._ready))
            else:
                found = chunk
                break
        for chunk in set_aside:
            heapq.heappush(self._ready, chunk)
        return found

    def leased(self, chunk: int) -> None:
        self._states[chunk] = ChunkState.LEASED

    def committed(self, chunk: int) -> None:
        self._states[chunk] = ChunkState.COMMITTED

    def requeue(self, chunk: int) -> None:
        """A lease came back without the chunk: returned unused, expired, or its holder died."""
        if self._states[chunk] is ChunkState.LEASED:
            self._make_pending(chunk)

    def failed(
        self, chunk: int, rank: int, cause: str, *, now_s: float, chance: float, most_workers: int
    ) -> Retry | Fail:
        """`rank` gave the chunk up. Retry: it is pending again after the pause, for another rank when there is one."""
        self._failed_by[chunk].append(rank)
        decision = decide_elsewhere(cause, len(self._failed_by[chunk]), chance, most_workers=most_workers)
        if self._states[chunk] is ChunkState.LEASED:
            self._states[chunk] = ChunkState.PENDING
            delay_s = decision.delay_s if isinstance(decision, Retry) else 0.0
            heapq.heappush(self._paused, (now_s + delay_s, chunk))
        return decision

    def wait_for(self, chunk: int, key: bytes) -> None:
        """The bytes named `key` are being fetched under another lease; `wake` brings the chunk back."""
        self._states[chunk] = ChunkState.WAITING
        self._waiting[key].add(chunk)

    def wake(self, keys: Iterable[bytes]) -> Iterator[int]:
        """The fetches of these keys have ended, well or not: chunks that waited for them are pending again."""
        for key in keys:
            for chunk in sorted(self._waiting.pop(key, ())):
                if self._states[chunk] is ChunkState.WAITING:
                    self._make_pending(chunk)
                    yield chunk

    def evicted(self, chunk: int) -> bool:
        """A committed chunk that is still needed is not in the cache any more. False when it was not committed."""
        if self._states[chunk] is not ChunkState.COMMITTED:
            return False
        self._make_pending(chunk)
        return True

    # -- placing -----------------------------------------------------------------------------------------------

    def placed(self, rank: int, chunk: int) -> None:
        """The rank has copied what it wants of the chunk. Repeated reports change nothing."""
        self._left[rank].discard(chunk)

    def restart_rank(self, rank: int) -> list[int]:
        """A new process has the rank and nothing placed: it needs everything again. All its chunks, in plan order."""
        self._left[rank] = set(self._needs[rank])
        for chunk in self._needs[rank]:
            if self._states[chunk] is ChunkState.PENDING:
                heapq.heappush(self._ready, chunk)  # it may have been dropped when nobody needed it
        return sorted(self._needs[rank])

    def left(self, rank: int) -> int:
        """Chunks the rank has not placed yet."""
        return len(self._left[rank])

    # -- inside ------------------------------------------------------------------------------------------------

    def _make_pending(self, chunk: int) -> None:
        self._states[chunk] = ChunkState.PENDING
        heapq.heappush(self._ready, chunk)

    def _should_avoid(self, chunk: int, rank: int) -> bool:
        failed_by = self._failed_by.get(chunk)
        return failed_by is not None and rank in failed_by and any(other not in failed_by for other in self._needs)
