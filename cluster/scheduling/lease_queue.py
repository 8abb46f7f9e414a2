"""The chunks of one load on one node: which rank fetches which chunk next, and which ranks still need it. Pure.

    PENDING --leased--> LEASED --committed--> COMMITTED --every rank placed it--> DONE
       ^                  |                      |                                 |
       +--requeue, failed-+<------- evicted -----+          restart_rank ----------+
       +--waiting_for-- WAITING: another lease is fetching the same bytes

A rank fetches the chunks that it needs itself first, in plan order, so that it places them while they are warm in the
processor's cache. A rank that is far ahead helps the others first. Otherwise it would leave once it has everything, and
a slow rank would fetch the rest alone. A rank that failed on a chunk does not get it again while another rank of the
node has not tried it.

Where ranks read on demand (`cluster.safe_open`), a rank needs no chunk until it asks for it, and may ask again for one
that it has placed.

Every operation is O(log n) in the chunks, times the ranks of one node. `restart_rank` and `rank_lost` cost more.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.scheduling.retry import Fail, Retry, decide


class RankNeeds:
    """The chunks that each rank has not placed. All ranks are present at the start.

    It takes one byte per rank and chunk. Every question is O(ranks of the node).
    """

    def __init__(self, positions: Mapping[int, NDArray[np.int64]], count: int, *, on_demand: bool = False) -> None:
        """`positions` has the positions of the chunks that each rank touches, out of `count` in all.

        `on_demand`: a rank needs none of them until it asks.
        """
        self.present = set(positions)
        self._on_demand = on_demand
        self.left = dict.fromkeys(positions, 0)  # number of chunks that the rank has not placed
        self._wants = {rank: np.unique(touched) for rank, touched in positions.items()}
        self._outstanding = {rank: np.zeros(count, np.uint8) for rank in positions}  # 1: not placed
        for rank in positions:
            self.begin_anew(rank)

    @property
    def complete(self) -> bool:
        """Return whether every rank is present and has placed everything."""
        return len(self.present) == len(self.left) and not any(self.left.values())

    @property
    def share_left(self) -> float:
        """Return which part of what the ranks touch is not placed: 1.0 at the beginning, 0.0 at the end."""
        return sum(self.left.values()) / max(1, sum(map(len, self._wants.values())))

    def begin_anew(self, rank: int) -> None:
        """Mark the rank as present, with nothing placed, and nothing asked for."""
        self.present.add(rank)
        self._outstanding[rank][self._wants[rank]] = 0 if self._on_demand else 1
        self.left[rank] = 0 if self._on_demand else len(self._wants[rank])

    def ask(self, rank: int, position: int) -> bool:
        """Let the rank need the chunk, whether it has placed it before or not. Return False if it needs it already."""
        if self.needs(rank, position):
            return False
        self._outstanding[rank][position] = 1
        self.left[rank] += 1
        return True

    def placed(self, rank: int, position: int) -> bool:
        """Record that the rank has placed the chunk. Return False if it was not needed or the rank is absent."""
        if not self.needs(rank, position):
            return False
        self._outstanding[rank][position] = 0
        self.left[rank] -= 1
        return True

    def needs(self, rank: int, position: int) -> bool:
        """Return whether the rank is present and has not placed the chunk it needs."""
        return rank in self.present and bool(self._outstanding[rank][position])

    def needing(self, position: int) -> tuple[int, ...]:
        """Return the present ranks that have not placed the chunk, ascending."""
        return tuple(rank for rank in sorted(self.present) if self._outstanding[rank][position])

    def wants(self, rank: int) -> NDArray[np.int64]:
        """Return the positions that the rank touches, placed or not, ascending."""
        return self._wants[rank]

    def wanted_by(self, position: int) -> tuple[int, ...]:
        """Return the ranks that touch the chunk, present or not, placed or not, ascending."""
        return tuple(rank for rank in sorted(self._wants) if _holds(self._wants[rank], position))

    def missing(self, rank: int) -> list[int]:
        """Return the positions that the rank has not placed, ascending."""
        found: list[int] = np.flatnonzero(self._outstanding[rank]).tolist()
        return found


def _holds(ascending: NDArray[np.int64], position: int) -> bool:
    index = int(np.searchsorted(ascending, position))
    return index < len(ascending) and int(ascending[index]) == position


@dataclass(slots=True)
class _Failures:
    """The failures of one chunk so far."""

    by_rank: Counter[int] = field(default_factory=Counter)
    by_cause: Counter[str] = field(default_factory=Counter)
    log: list[tuple[int, str]] = field(default_factory=list)  # (rank, cause), in order


class FailureLog:
    """The failures of each chunk that ever failed. Any number may identify a chunk."""

    def __init__(self) -> None:
        self._chunks: dict[int, _Failures] = {}

    def __contains__(self, chunk: int) -> bool:
        """Return whether the chunk ever failed."""
        return chunk in self._chunks

    def __iter__(self) -> Iterator[int]:
        """Iterate over the chunks that ever failed."""
        return iter(self._chunks)

    def add(self, chunk: int, rank: int, cause: str, chunk_attempts: int | None, fraction: float) -> Retry | Fail:
        """Record that `rank` could not get the chunk, and return the decision.

        It is Fail when the cause's budget (`cluster.scheduling.retry`) is spent, or after `chunk_attempts` failures of
        any cause. `fraction` in [0, 1) spreads the delays.
        """
        failures = self._chunks.setdefault(chunk, _Failures())
        failures.by_rank[rank] += 1
        failures.by_cause[cause] += 1
        failures.log.append((rank, cause))
        decision = decide(cause, failures.by_cause[cause], fraction)
        if isinstance(decision, Retry) and chunk_attempts is not None and len(failures.log) >= chunk_attempts:
            return Fail(f"{cause.replace('_', ' ')}, after {len(failures.log)} workers' attempts")
        return decision

    def has_failed(self, chunk: int, rank: int) -> bool:
        """Return whether this rank ever failed on the chunk."""
        failures = self._chunks.get(chunk)
        return failures is not None and failures.by_rank[rank] > 0

    def of(self, chunk: int) -> tuple[tuple[int, str], ...]:
        """Return (rank, cause) of every failure of the chunk, in order."""
        failures = self._chunks.get(chunk)
        return () if failures is None else tuple(failures.log)


class ChunkState(enum.Enum):
    """The states of a needed chunk."""

    PENDING = "pending"  # to be fetched, or taken from the cache
    WAITING = "waiting"  # another lease is fetching the same bytes
    LEASED = "leased"  # being fetched, perhaps by more than one rank
    COMMITTED = "committed"  # in the arena; some rank has not placed it
    DONE = "done"  # every present rank that needs it has placed it


class LeaseQueue:
    """The chunks of one load on one node, and the ranks that need them.

    `needs` maps each rank of the node to the ids of the chunks it touches. After `rank_lost` a rank counts as absent
    until `restart_rank`.
    """

    def __init__(
        self,
        needs: Mapping[int, NDArray[np.int64]],
        chunk_ids: NDArray[np.int64] | None = None,
        *,
        on_demand: bool = False,
    ) -> None:
        """`chunk_ids` gives the plan order; the default is ascending. Raises ValueError if it lacks a needed chunk.

        `on_demand`: a rank needs a chunk when it has asked for it (`ask`).
        """
        wanted = np.unique(np.concatenate([*needs.values(), np.empty(0, np.int64)]))
        order = wanted if chunk_ids is None else np.asarray(chunk_ids)
        if not np.isin(wanted, order).all():
            raise ValueError("a rank needs a chunk that the plan's order does not name")
        order = order[np.isin(order, wanted)]
        by_id = np.argsort(order)
        self._order: list[int] = order.tolist()
        # All lists share one int object per position. There may be 100,000 positions, times the ranks.
        numbers = list(range(len(order)))
        self._position = dict(zip(self._order, numbers, strict=True))
        self._ranks = RankNeeds(
            {rank: by_id[np.searchsorted(order, ids, sorter=by_id)] for rank, ids in needs.items()},
            len(order),
            on_demand=on_demand,
        )
        self._on_demand = on_demand
        self._state = [ChunkState.DONE if on_demand else ChunkState.PENDING] * len(order)
        self._leases = [0] * len(order)  # running leases per position
        # `_fresh` and `_own` are heaps of chunks that never failed. Stale entries are skipped.
        self._fresh = [] if on_demand else numbers.copy()
        self._own = {rank: [numbers[position] for position in self._ranks.missing(rank)] for rank in needs}
        self._ahead = 8 * len(needs)  # positions that a rank may be ahead of the first chunk without a lease
        self._assigned: dict[int, int] = {}  # position -> the only rank that may fetch it
        self._retries: dict[int, list[int]] = {rank: [] for rank in needs}  # rank -> heap of failed positions
        self._delayed: list[tuple[float, int]] = []  # (not before, position), a heap
        self._failures = FailureLog()  # by position
        self._waiting: defaultdict[Hashable, set[int]] = defaultdict(set)

    # --- what to do next -----------------------------------------------------------------------------------

    def next_for(self, rank: int, now_s: float = 0.0) -> int | None:
        """Return the chunk that this rank should fetch now, or None.

        It is the first in plan order of the chunks that the rank needs, or that failed before. A rank that needs none,
        or is far ahead, gets the first of all chunks. Nothing changes until the caller reports what happened to the
        chunk with `leased`, `wait_for` or `committed`.
        """
        self._wake_delayed(now_s)
        own, fresh, retries = self._own[rank], self._fresh, self._retries[rank]
        while own and not (self._is_fresh(own[0]) and self._assigned.get(own[0], rank) == rank):
            heapq.heappop(own)
        while fresh and not (self._is_fresh(fresh[0]) and fresh[0] not in self._assigned):
            heapq.heappop(fresh)
        while retries and not (self._is_pending(retries[0]) and self._may_try(rank, retries[0])):
            heapq.heappop(retries)
        near = own[:1] if not fresh or (own and own[0] - fresh[0] <= self._ahead) else []
        heads = near + retries[:1] or fresh[:1]
        return self._order[min(heads)] if heads else None

    def assign(self, rank: int, chunks: Iterable[int]) -> None:
        """Let only `rank` fetch those of `chunks` that it needs, while it is present and has not failed on them."""
        for position in sorted(self._position[chunk] for chunk in chunks if self.needs(rank, chunk)):
            self._assigned[position] = rank
            if self._is_fresh(position):
                heapq.heappush(self._own[rank], position)

    def chunks(self) -> list[int]:
        """Return all chunks of the load on this node, in plan order."""
        return list(self._order)

    def states(self) -> Iterator[tuple[int, ChunkState]]:
        """Iterate over every chunk and its state, in plan order."""
        return zip(self._order, self._state, strict=True)

    def pending(self) -> list[int]:
        """Return every chunk that no rank is fetching yet, in plan order. O(n)."""
        return [chunk for chunk, state in self.states() if state is ChunkState.PENDING]

    def knows(self, chunk: int) -> bool:
        """Return whether a rank of the node touches the chunk."""
        return chunk in self._position

    def fresh_before(self, chunk: int) -> int:
        """Return about how many chunks are before this one, in plan order, that no rank has begun to fetch."""
        return max(0, self._position[chunk] - self._fresh[0]) if self._fresh else 0

    def state(self, chunk: int) -> ChunkState:
        """Return the state of the chunk. Raises KeyError for a chunk that no rank of the node touches."""
        return self._state[self._position[chunk]]

    def needing(self, chunk: int) -> tuple[int, ...]:
        """Return the present ranks that have not placed the chunk, ascending."""
        return self._ranks.needing(self._position[chunk])

    def wanted_by(self, chunk: int) -> tuple[int, ...]:
        """Return the ranks of the node that touch the chunk, present or not, placed or not, ascending."""
        return self._ranks.wanted_by(self._position[chunk])

    def needs(self, rank: int, chunk: int) -> bool:
        """Return whether the rank is present and has not placed the chunk it needs."""
        return self._ranks.needs(rank, self._position[chunk])

    def outstanding(self, rank: int) -> list[int]:
        """Return the chunks that the rank has not placed, in plan order. O(n)."""
        return [self._order[position] for position in self._ranks.missing(rank)]

    def left(self, rank: int) -> int:
        """Return how many chunks the rank has not placed."""
        return self._ranks.left[rank]

    def placed_chunks(self, rank: int) -> int:
        """Return how many chunks the rank has placed. With `on_demand` that is not counted: 0."""
        return 0 if self._on_demand else len(self._ranks.wants(rank)) - self._ranks.left[rank]

    @property
    def share_left(self) -> float:
        """Return which part of what the ranks touch is not placed: 1.0 at the beginning, 0.0 at the end."""
        return self._ranks.share_left

    @property
    def complete(self) -> bool:
        """Return whether every rank of the node is present and has placed everything."""
        return self._ranks.complete

    # --- what happened to chunks ---------------------------------------------------------------------------

    def leased(self, chunk: int, rank: int) -> None:
        """Record that `rank` fetches the chunk. A hedge leases the chunk a second time."""
        position = self._position[chunk]
        if self._state[position] not in (ChunkState.PENDING, ChunkState.LEASED):
            raise ValueError(f"chunk {chunk} is {self._state[position].value}, and cannot be leased")
        self._state[position] = ChunkState.LEASED
        self._leases[position] += 1

    def committed(self, chunk: int) -> tuple[int, ...]:
        """Record that the chunk is in the arena, fetched or found there. Return the ranks to notify."""
        position = self._position[chunk]
        self._leases[position] = 0
        ranks = self.needing(chunk)
        self._state[position] = ChunkState.COMMITTED if ranks else ChunkState.DONE
        return ranks

    def placed(self, rank: int, chunk: int) -> bool:
        """Record that the rank has copied its part of the chunk. Return False if it did not need the chunk."""
        if (position := self._position.get(chunk)) is None or not self._ranks.placed(rank, position):
            return False
        if self._state[position] is not ChunkState.LEASED and not self.needing(chunk):
            self._state[position] = ChunkState.DONE
        if not self._ranks.left[rank]:
            self._offer_again()
        return True

    def ask(self, rank: int, chunk: int) -> bool:
        """Let the rank need the chunk, also one that it has placed before. Return False if it needs it already.

        Raises KeyError for a chunk that no rank touches.
        """
        position = self._position[chunk]
        if rank not in self._ranks.present or not self._ranks.ask(rank, position):
            return False
        if self._state[position] is ChunkState.DONE:
            self._to_pending(position)
        elif self._is_fresh(position):
            heapq.heappush(self._own[rank], position)
        return True

    def evicted(self, chunk: int) -> None:
        """Record that the arena has lost the chunk. It is fetched again if a present rank needs it."""
        position = self._position[chunk]
        if self._state[position] is ChunkState.COMMITTED:
            self._to_pending(position)

    def wait_for(self, chunk: int, key: Hashable) -> None:
        """Set the chunk aside while another lease fetches the bytes with this key, until `waiting_for(key)`."""
        if self._is_pending(position := self._position[chunk]):
            self._state[position] = ChunkState.WAITING
            self._waiting[key].add(position)

    def waiting_for(self, keys: Iterable[Hashable]) -> list[int]:
        """Make the chunks that waited for these keys pending, and return them. Call it on any end of a lease."""
        woken = []
        for key in keys:
            for position in self._waiting.pop(key, ()):
                if self._state[position] is ChunkState.WAITING:
                    self._to_pending(position)
                    woken.append(position)
        return [self._order[position] for position in sorted(woken)]

    # --- what went wrong -----------------------------------------------------------------------------------

    def requeue(
        self, chunk: int, rank: int | None, cause: str, *, now_s: float = 0.0, fraction: float = 0.0
    ) -> Retry | Fail:
        """Record that a lease ended without the chunk, and return the decision.

        A returned lease has the cause "" and is no failure. Otherwise the budget of the cause decides. `rank` held the
        lease; None means that no rank is at fault. On Retry the chunk is pending again after the delay.
        """
        if rank is None or not cause:
            self._end_lease(self._position[chunk], now_s)
            return Retry(0.0)
        return self.failed(chunk, rank, cause, None, now_s=now_s, fraction=fraction)

    def failed(
        self,
        chunk: int,
        rank: int,
        cause: str,
        chunk_attempts: int | None = None,
        *,
        now_s: float = 0.0,
        fraction: float = 0.0,
    ) -> Retry | Fail:
        """Record that `rank` could not get the chunk, and return the decision. The chunk is pending in either case.

        It is Fail after `chunk_attempts` such reports, or when the cause's budget (`cluster.scheduling.retry`) is
        spent.
        """
        position = self._position[chunk]
        decision = self._failures.add(position, rank, cause, chunk_attempts, fraction)
        self._end_lease(position, now_s + (decision.delay_s if isinstance(decision, Retry) else 0.0))
        return decision

    def failures(self, chunk: int) -> tuple[tuple[int, str], ...]:
        """Return (rank, cause) of every failure of the chunk, in order."""
        return self._failures.of(self._position[chunk])

    # --- ranks come and go ---------------------------------------------------------------------------------

    def rank_lost(self, rank: int) -> None:
        """Mark the rank as absent and stop fetching for it. The caller must `requeue` the chunks it was fetching."""
        if rank not in self._ranks.present:
            return
        self._ranks.present.remove(rank)
        for position in self._ranks.missing(rank):
            if self._state[position] is not ChunkState.LEASED and not self.needing(self._order[position]):
                self._state[position] = ChunkState.DONE
        for position in [position for position, only in self._assigned.items() if only == rank]:
            del self._assigned[position]
            if self._is_fresh(position):
                self._to_pending(position)
        self._offer_again()

    def restart_rank(self, rank: int) -> list[int]:
        """Mark the rank as present with nothing placed, and return the chunks that are in the arena for other ranks.

        The caller pins each of these chunks and notifies the rank, or calls `evicted`.
        """
        self._ranks.begin_anew(rank)
        readable = []
        for position in self._ranks.missing(rank):
            if self._state[position] is ChunkState.COMMITTED:
                readable.append(self._order[position])
            elif self._state[position] is ChunkState.DONE:
                self._to_pending(position)
        self._offer_again()
        return readable

    # --- inside --------------------------------------------------------------------------------------------

    def _is_pending(self, position: int) -> bool:
        return self._state[position] is ChunkState.PENDING

    def _is_fresh(self, position: int) -> bool:
        return self._is_pending(position) and position not in self._failures

    def _may_try(self, rank: int, position: int) -> bool:
        """Return whether the rank has not failed on the chunk, or every rank with work left has."""
        if not self._failures.has_failed(position, rank):
            return True
        # A rank that has everything may have stopped asking, so the chunk does not wait for it.
        return all(
            self._failures.has_failed(position, other) for other in self._ranks.present if self._ranks.left[other]
        )

    def _end_lease(self, position: int, not_before_s: float) -> None:
        self._leases[position] = max(0, self._leases[position] - 1)
        if self._state[position] is ChunkState.LEASED and not self._leases[position]:
            self._to_pending(position, not_before_s)

    def _to_pending(self, position: int, not_before_s: float = 0.0) -> None:
        if not self.needing(self._order[position]):
            self._state[position] = ChunkState.DONE
            return
        self._state[position] = ChunkState.PENDING
        if position in self._failures:
            heapq.heappush(self._delayed, (not_before_s, position))
            return
        heapq.heappush(self._fresh, position)
        for rank in self.needing(self._order[position]):
            heapq.heappush(self._own[rank], position)

    def _wake_delayed(self, now_s: float) -> None:
        while self._delayed and self._delayed[0][0] <= now_s:
            _, position = heapq.heappop(self._delayed)
            for rank in self._ranks.present:
                if self._is_pending(position) and self._may_try(rank, position):
                    heapq.heappush(self._retries[rank], position)

    def _offer_again(self) -> None:
        """Offer the failed chunks again, because a change of the ranks may let another rank try them."""
        waiting = {position for _, position in self._delayed}
        for position in self._failures:
            if self._is_pending(position) and position not in waiting:
                heapq.heappush(self._delayed, (0.0, position))
