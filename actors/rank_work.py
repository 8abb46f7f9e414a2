"""What one rank has in hand, shared by its threads: leases to fetch, chunks to place, results to tell.

    agent's orders --take--> leases --> fetch threads --fetched-->
                             readable -> place thread -- placed --> told() -> the next update to the agent

Every method is thread-safe; waiting ends when `stop` is called.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from actors.chunk_fetcher import ChunkFetcher, FetchedChunk
from cluster.messages import LeaseOrder, Orders
from storage.errors import LongshoreError


@dataclass(slots=True)
class Results:
    """What happened since the agent was last told."""

    fetched: list[FetchedChunk] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)  # by cause


class RankWork:
    """The work of a rank that needs `needed` chunks, with `threads` of them on the way at once."""

    def __init__(self, fetcher: ChunkFetcher, needed: int, threads: int) -> None:
        self.first_work_s: float | None = None  # when the agent first had something to do
        self.placed_bytes = 0
        self._fetcher = fetcher
        self._needed = needed
        self._threads = threads
        self._changed = threading.Condition()  # guards everything here
        self._leases: deque[LeaseOrder] = deque()
        self._readable: deque[tuple[int, int]] = deque()  # (chunk, slot)
        self._results = Results()
        self._placed: set[int] = set()
        self._in_hand = 0  # leases queued or being fetched
        self._unplaced = 0  # readable chunks queued or being copied
        self._error: LongshoreError | None = None

    # -- threads -----------------------------------------------------------------------------------------------

    def next_lease(self) -> LeaseOrder | None:
        """The next lease to fetch; None when the rank is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._leases or self._error is not None)
            return None if self._error is not None else self._leases.popleft()

    def next_chunks(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` readable (chunk, slot); none when the rank is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._readable or self._error is not None)
            if self._error is not None:
                return []
            return [self._readable.popleft() for _ in range(min(most, len(self._readable)))]

    def fetched(self, result: FetchedChunk) -> None:
        """A lease ended, one way or another."""
        with self._changed:
            self._in_hand -= 1
            self._add(result)
            self._changed.notify_all()

    def placed(self, chunks: list[int], moved_bytes: int) -> None:
        """These chunks are on the device; nothing reads their slots any more."""
        with self._changed:
            self._unplaced -= len(chunks)
            self._placed.update(chunks)
            self._results.placed.extend(chunks)
            self.placed_bytes += moved_bytes
            self._changed.notify_all()

    # -- the conversation with the agent -----------------------------------------------------------------------

    def take(self, orders: Orders) -> None:
        """What the agent wants done."""
        with self._changed:
            if (orders.leases or orders.readable) and self.first_work_s is None:
                self.first_work_s = time.monotonic()
            self._fetcher.close_leases(set(orders.closed_leases))
            self._leases.extend(orders.leases)
            self._in_hand += len(orders.leases)
            self._readable.extend(orders.readable)
            self._unplaced += len(orders.readable)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when there is something worth telling the agent, or after `timeout_s`. Raises `stop`'s error."""
        with self._changed:
            self._changed.wait_for(self._worth_telling, timeout_s)
            self._raise_if_stopped()

    def sleep(self, seconds: float) -> None:
        """Raises `stop`'s error."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, seconds)
            self._raise_if_stopped()

    def take_results(self) -> Results:
        """All results; they are no longer here."""
        with self._changed:
            results, self._results = self._results, Results()
            return results

    def want_leases(self) -> int:
        """How many more leases the rank can take on: as many again as its threads work on wait in the queue."""
        with self._changed:
            return 0 if self._finished() else max(0, 2 * self._threads - self._in_hand)

    @property
    def idle(self) -> bool:
        """Nothing goes on here: only the agent can have work."""
        with self._changed:
            return not (self._in_hand or self._unplaced or self._results.fetched or self._results.placed)

    @property
    def finished(self) -> bool:
        """Every chunk is placed."""
        with self._changed:
            return self._finished()

    def placed_chunks(self) -> tuple[int, ...]:
        """Ids of the chunks that are on the device, ascending."""
        with self._changed:
            return tuple(sorted(self._placed))

    # -- the end -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Return when nothing of the arena is in use: leases not begun are given back, begun reads end by themselves,
        readable chunks are placed. Raises `stop`'s error.
        """
        with self._changed:
            while self._leases:
                self._in_hand -= 1
                self._add(FetchedChunk(self._leases.popleft().lease_id))
            self._fetcher.stop()
            self._changed.wait_for(lambda: not (self._in_hand or self._unplaced) or self._error is not None)
            self._raise_if_stopped()
            self._fetcher.restart()

    def forget_leases(self) -> None:
        """A hello is about to say that nothing is in use; how single leases ended does not matter then."""
        with self._changed:
            self._results.fetched.clear()

    def stop(self, error: LongshoreError) -> None:
        """Everything that waits here ends; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._fetcher.stop()
            self._changed.notify_all()

    def _raise_if_stopped(self) -> None:
        if self._error is not None:
            raise self._error

    def _finished(self) -> bool:
        return len(self._placed) == self._needed

    def _worth_telling(self) -> bool:
        if self._error is not None or self._finished() or not (self._in_hand or self._unplaced):
            return True
        # Several chunks a call keep the agent's share of the CPU small; half the leases are still in hand.
        return len(self._results.fetched) + len(self._results.placed) >= self._threads

    def _add(self, result: FetchedChunk) -> None:
        self._results.fetched.append(result)
        self._results.retries.update(result.retries)
