"""Runs one rank's `RankState` for several threads: one lock, and a condition for each kind of thread.

    exchange loop    wait_for_update, update, answered    the conversation with the agent
    fetch threads    next_lease, pause, fetched           as many as the agent allows work at once, the others wait
    place thread     next_chunks, placed

Every method is thread-safe. Every wait ends when `stop` is called. A chunk wakes only the threads that it concerns, and
the exchange loop only when an update is due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.state import FetchedChunk, Next, RankState
from cluster.messages import ArenaAccess, JoinReply, LeaseOrder, Orders, RankHello, RankUpdate
from cluster.telemetry.stats import RankStats
from storage.errors import LongshoreError


class RankWork:
    """`state` is for reading by others; it changes under the lock only."""

    def __init__(self, state: RankState, fetcher: ChunkFetcher) -> None:
        self.state = state
        self._fetcher = fetcher
        fetcher.pause, fetcher.is_void = self._pause, state.is_void
        lock = threading.Lock()
        self._fetch = threading.Condition(lock)  # fetch threads: a lease, and a place to work on it
        self._again = threading.Condition(lock)  # fetch threads in a pause before another try
        self._place = threading.Condition(lock)  # the place thread
        self._exchange = threading.Condition(lock)  # the exchange loop
        self._due_s = 0.0  # when the exchange loop wakes by itself, if it waits

    # -- fetch threads -----------------------------------------------------------------------------------------

    def next_lease(self) -> LeaseOrder | None:
        """The next lease to fetch; None when the rank is to stop."""
        with self._fetch:
            self._fetch.wait_for(lambda: self.state.may_fetch or self.state.error is not None)
            return self.state.next_lease(time.monotonic())

    def fetched(self, result: FetchedChunk, size_bytes: int, fetch_s: float, placed_bytes: int = 0) -> None:
        """See `RankState.fetch_ended`."""
        with self._fetch:
            self.state.fetch_ended(result, size_bytes, fetch_s, time.monotonic(), placed_bytes)
            if self.state.is_returning:
                self._again.notify_all()
            self._wake_exchange()

    def _pause(self, cause: str, delay_s: float, arrived: bool = False) -> None:
        """Return when the calling thread may try again, or is to stop. `arrived`: a part of the chunk is there."""
        with self._again:
            self.state.pause_begun(cause, time.monotonic())
            self._fetch.notify()  # another thread may use the place
            self._exchange.notify_all()
            self._again.wait_for(lambda: self.state.ends_tries(arrived), delay_s)
            self.state.pause_over()
            self._again.wait_for(lambda: self.state.may_try or self.state.ends_tries(arrived))
            self.state.pause_ended(time.monotonic())

    # -- the place thread --------------------------------------------------------------------------------------

    def next_chunks(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` readable (chunk, slot); none when the rank is to stop."""
        with self._place:
            while self.state.error is None:
                now_s = time.monotonic()
                if chunks := self.state.next_chunks(most, now_s):
                    return chunks
                held_until_s = self.state.held_until_s
                self._exchange.notify_all()  # nothing is placed for a while
                self._place.wait(None if held_until_s is None else max(0.0, held_until_s - now_s))
            return []

    def placed(self, sizes_bytes: Mapping[int, int]) -> None:
        """See `RankState.chunks_placed`."""
        with self._place:
            self.state.chunks_placed(sizes_bytes, time.monotonic())
            self._wake_exchange()

    # -- the conversation with the agent -----------------------------------------------------------------------

    def drain(self) -> None:
        """Return when nothing of the arena is in use any more. Raises `stop`'s error."""
        with self._exchange:
            self._begin_drain(finish=False)
            self._exchange.wait_for(lambda: self.state.drained or self.state.error is not None)
            self._raise_if_stopped()

    def hello(self, others: ArenaAccess) -> RankHello:
        """See `RankState.hello`; after `drain`."""
        with self._exchange:
            return self.state.hello(others)

    def welcomed(self, hello: RankHello, reply: JoinReply) -> None:
        """See `RankState.welcomed`."""
        with self._exchange:
            self.state.welcomed(hello, reply, time.monotonic())

    def wait_for_update(self) -> bool:
        """Return when the next update is due: whether it is the last one. Raises `stop`'s error."""
        with self._exchange:
            while True:
                self._raise_if_stopped()
                if self.state.finished and not self.state.draining:
                    self._begin_drain(finish=True)
                self._due_s = self.state.update_due_s
                rest_s = self._due_s - time.monotonic()
                if rest_s <= 0:
                    return self.state.finished and self.state.drained
                self._exchange.wait(rest_s)

    def update(self, *, leaving: bool, others: ArenaAccess, stats: RankStats | None) -> RankUpdate:
        """See `RankState.update`."""
        with self._exchange:
            return self.state.update(time.monotonic(), leaving=leaving, others=others, stats=stats)

    def answered(self, update: RankUpdate, orders: Orders | None) -> Next:
        """See `RankState.answered`. Reads of leases that the agent has closed end."""
        with self._exchange:
            after = self.state.answered(update, orders, time.monotonic())
            if self.state.abandoned:
                self._fetcher.end_reads()
                self._again.notify_all()
            if orders is not None:
                self._fetcher.end_reads(orders.closed_leases)
                if self.state.leases:
                    self._fetch.notify_all()
                if self.state.is_returning:
                    self._again.notify_all()
                if orders.readable:
                    self._place.notify_all()
            return after

    def sleep(self, seconds: float) -> None:
        """Raises `stop`'s error."""
        with self._exchange:
            self._exchange.wait_for(lambda: self.state.error is not None, seconds)
            self._raise_if_stopped()

    def fetch_threads(self) -> int:
        """Return the number of fetch threads that have something to do."""
        with self._exchange:
            return min(self.state.requests, self.state.in_hand)

    def stop(self, error: LongshoreError) -> None:
        """Everything that waits here ends; the first error counts."""
        with self._exchange:
            self.state.stop(error)
            self._fetcher.end_reads()
            for condition in (self._fetch, self._again, self._place, self._exchange):
                condition.notify_all()

    def _wake_exchange(self) -> None:
        """Wake the exchange loop if something is due earlier than it knows: most chunks only add to the next update."""
        if self.state.draining or self.state.update_due_s < self._due_s:
            self._exchange.notify_all()

    def _begin_drain(self, *, finish: bool) -> None:
        self.state.drain(time.monotonic(), finish=finish)
        self._again.notify_all()
        self._place.notify_all()

    def _raise_if_stopped(self) -> None:
        if self.state.error is not None:
            raise self.state.error
