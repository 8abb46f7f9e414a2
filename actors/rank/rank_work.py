"""What one rank has in hand, shared by its threads: leases to fetch, chunks to place, results to tell.

    agent's orders --take--> leases --> fetch threads --fetched-->
                             readable -> place thread -- placed --> told() -> the next update to the agent

So many fetch threads work at once as the agent says (it finds what is best for its node,
`cluster.scheduling.concurrency`); a thread above that is parked, and one that waits before another try lets somebody
else work. Every method is thread-safe; waiting ends when `stop` is called.

Chunks that stand verified in the arena for a rank to place, and which of them it places next.

In the order in which they came; but what would begin too many tensors that are converted on their way in is held back,
in its slot, until others have come to their end (`Staging.choose`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.rank.chunk_fetcher import ChunkFetcher, FetchedChunk
from cluster.messages import LeaseOrder, Orders
from cluster.scheduling.concurrency import START
from cluster.scheduling.retry import cause_of
from storage.errors import LongshoreError

Choose = Callable[[Iterable[int], int], list[int]]  # of these chunks, at most so many that may be placed now, in order


HOLD_S = 1.0  # with nothing of its own on the way, before a rank places one that is held back all the same


class Hold(NamedTuple):
    """Of the rank's work, what holding back depends on."""

    stopped: bool
    draining: bool  # the slots are to be given back
    fetches: bool  # something of its own is on the way


class ReadableChunks:
    """See above. `choose` None: nothing is ever held back. Used under the lock of the rank's work."""

    def __init__(self, choose: Choose | None = None) -> None:
        self._choose = choose
        self._chunks: deque[tuple[int, int]] = deque()  # (chunk, slot)
        self._held = False  # none of them may be placed now

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def placeable(self) -> bool:
        """Whether there is one that is not held back."""
        return bool(self._chunks) and not self._held

    def extend(self, chunks: Sequence[tuple[int, int]]) -> None:
        """More of them, as (chunk, slot)."""
        self._chunks.extend(chunks)
        self._held = self._held and not chunks

    def next(
        self, changed: threading.Condition, most: int, hold: Callable[[], Hold], on_hold: Callable[[], None]
    ) -> list[tuple[int, int]]:
        """Those to place now, when there are some; none when the rank is to stop. `on_hold`: all are held back.

        What it waits for may need the slots of those that are held, here or in another rank: so when nothing comes, the
        first of them in plan order goes on, whatever it begins. When the slots are to be given back, they are: the
        agent tells of them again.
        """
        while True:
            changed.wait_for(lambda: self._chunks or hold().stopped)
            if hold().stopped:
                return []
            if chunks := self._take(most):
                return chunks
            self._held = True
            on_hold()
            more = changed.wait_for(lambda: not self._held or hold().draining or hold().stopped, HOLD_S)
            if hold().draining:
                self._chunks.clear()
                on_hold()
            elif not (more or hold().fetches):
                return self._out([min(chunk for chunk, _ in self._chunks)])

    def _take(self, most: int) -> list[tuple[int, int]]:
        if self._choose is None:
            return [self._chunks.popleft() for _ in range(min(most, len(self._chunks)))]
        return self._out(self._choose((chunk for chunk, _ in self._chunks), most))

    def _out(self, chosen: list[int]) -> list[tuple[int, int]]:
        wanted = set(chosen)
        taken = [each for each in self._chunks if each[0] in wanted]
        self._chunks = deque(each for each in self._chunks if each[0] not in wanted)
        self._held = False
        return taken


@dataclass(slots=True)
class Results:
    """What happened since the agent was last told."""

    fetched: list[FetchedChunk] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)  # by cause
    requests: list[tuple[int, float, float]] = field(default_factory=list)  # bytes, seconds, when it ended
    throttled: int = 0

    def __len__(self) -> int:
        """Chunks that there is something to tell of; most are fetched and placed at once."""
        return max(len(self.fetched), len(self.placed))

    def add(self, result: FetchedChunk) -> None:
        """A lease ended."""
        self.fetched.append(result)
        self.retries.update(result.retries)


@dataclass(slots=True)
class FetchTime:
    """Seconds of the rank, each divided among the requests that it may have in flight; from `begin` on."""

    working_s: float = 0.0  # reading, verifying, and placing at once
    wait_retry_s: float = 0.0  # before another try
    wait_slot_s: float = 0.0  # the agent had no slot for a chunk
    wait_lease_s: float = 0.0  # the agent had not answered yet
    _until_s: float | None = None

    def begin(self, now_s: float) -> None:
        self._until_s = now_s

    def spend(self, now_s: float, requests: int, working: int, pausing: int, short_of: str) -> None:
        """Since the last call so many requests worked and paused; the others were short of "slots", "lease" or ""."""
        if self._until_s is None:
            return
        each_s = (now_s - self._until_s) / requests
        self._until_s = now_s
        working = min(working, requests)
        pausing = min(pausing, requests - working)
        free = requests - working - pausing
        self.working_s += working * each_s
        self.wait_retry_s += pausing * each_s
        if short_of == "slots":
            self.wait_slot_s += free * each_s
        elif short_of == "lease":
            self.wait_lease_s += free * each_s


TELL_S = 0.05  # no chunk is kept from the node's other ranks for longer


class RankWork:
    """The work of a rank that needs `needed` chunks, with `most` requests in flight at most."""

    def __init__(self, fetcher: ChunkFetcher, needed: int, most: int, choose: Choose | None = None) -> None:
        self.first_work_s: float | None = None  # when the agent first had something to do
        self.placed_bytes = 0
        self.batch = 1  # chunks worth a message to the agent; it says so in its JoinReply
        self.fetch_time = FetchTime()
        self._fetcher = fetcher
        fetcher.pause = self._pause
        self._needed = needed
        self._most = most
        self.requests = self.peak_requests = min(START, most)  # that may be in flight now
        self.throttles = self._told_requests = 0
        # One lock, and a condition for each kind of thread, so that a chunk wakes only those it concerns.
        lock = threading.Lock()
        self._fetch = threading.Condition(lock)  # fetch threads: a lease, and a place to work on it
        self._again = threading.Condition(lock)  # fetch threads that wait for another try
        self._place = threading.Condition(lock)  # the place thread
        self._tell = threading.Condition(lock)  # the conversation with the agent
        self._leases: deque[LeaseOrder] = deque()
        self._readable = ReadableChunks(choose)
        self._results = Results()
        self._placed: set[int] = set()
        self._in_hand = 0  # leases queued or being worked on
        self.working = 0  # fetch threads that read or verify
        self._pausing = 0  # fetch threads that wait before another try
        self._returning = 0  # those of them whose wait is over
        self._copying = 0  # readable chunks
        self._short_of = ""  # why the agent gave fewer leases than were wanted
        self._draining = self._finishing = False  # see `drain`
        self._error: LongshoreError | None = None

    # -- fetch threads -----------------------------------------------------------------------------------------

    def next_lease(self) -> LeaseOrder | None:
        """The next lease to fetch; None when the rank is to stop."""
        with self._fetch:
            self._fetch.wait_for(
                lambda: (self._leases and self.working + self._returning < self.requests) or self._error is not None
            )
            if self._error is not None:
                return None
            self._account()
            self.working += 1
            return self._leases.popleft()

    def fetched(self, result: FetchedChunk, size_bytes: int, fetch_s: float, placed_bytes: int = 0) -> None:
        """A lease ended, one way or another, `fetch_s` after it was taken up; `size_bytes` came of it, and
        `placed_bytes` of them are on the device already.
        """
        with self._fetch:
            now_s = self._account()
            self.working -= 1
            self._in_hand -= 1
            if result.commit is not None:
                self._results.requests.append((size_bytes, fetch_s, now_s))
            elif result.failure is not None and cause_of(result.failure.error) == "throttled":
                self._was_throttled()
            self._results.add(result)
            if placed_bytes and result.commit is not None and result.commit.chunk not in self._placed:
                self._note_placed([result.commit.chunk], placed_bytes)
            if self._returning:
                self._again.notify_all()
            self._tell.notify_all()

    def _pause(self, cause: str, delay_s: float, begun: bool = False) -> None:
        """A try of the calling thread has failed: returns when it may try again, or is to stop.

        `begun`: a part of the chunk has arrived.
        """

        def is_to_stop() -> bool:
            return self._error is not None or (self._draining and not (begun and self._finishing))

        with self._again:
            self._account()
            self.working -= 1
            self._pausing += 1
            if cause == "throttled":
                self._was_throttled()
            self._fetch.notify()  # somebody else may use the place
            self._tell.notify_all()
            self._again.wait_for(is_to_stop, delay_s)
            self._returning += 1
            self._again.wait_for(lambda: self.working < self.requests or is_to_stop())
            self._account()
            self._returning -= 1
            self._pausing -= 1
            self.working += 1

    # -- the place thread --------------------------------------------------------------------------------------

    def next_chunks(self, most: int) -> list[tuple[int, int]]:
        """Up to `most` readable (chunk, slot); none when the rank is to stop."""
        with self._place:
            chunks = self._readable.next(self._place, most, self._hold, self._tell.notify_all)
            self._copying += len(chunks)
            return chunks

    def placed(self, sizes_bytes: Mapping[int, int]) -> None:
        """These chunks are on the device, with so many bytes of each; nothing reads their slots any more."""
        with self._place:
            self._copying -= len(sizes_bytes)
            # One may have come in two ways: told by the agent, while a fetch of its own brought it too.
            moved_bytes = sum(size_bytes for chunk, size_bytes in sizes_bytes.items() if chunk not in self._placed)
            self._note_placed(sizes_bytes, moved_bytes)
            self._tell.notify_all()

    # -- the conversation with the agent -----------------------------------------------------------------------

    def take(self, orders: Orders) -> None:
        """What the agent wants done."""
        with self._tell:
            if (orders.leases or orders.readable) and self.first_work_s is None:
                self.first_work_s = time.monotonic()
                self.fetch_time.begin(self.first_work_s)
            self._account()
            self._fetcher.close_leases(set(orders.closed_leases))
            self._short_of = orders.short_of
            self._leases.extend(orders.leases)
            self._in_hand += len(orders.leases)
            self._readable.extend(orders.readable)
            if orders.requests:
                self.requests = min(orders.requests, self._most)
                self.peak_requests = max(self.peak_requests, self.requests)
            if orders.leases or self._leases:
                self._fetch.notify_all()
            if self._returning:
                self._again.notify_all()
            if orders.readable:
                self._place.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when there is something worth telling the agent, or after `timeout_s`. Raises `stop`'s error."""
        with self._tell:
            self._tell.wait_for(lambda: len(self._results) or self._worth_telling(), timeout_s)
            self._tell.wait_for(self._worth_telling, min(timeout_s, TELL_S))
            self._raise_if_stopped()

    def sleep(self, seconds: float) -> None:
        """Raises `stop`'s error."""
        with self._tell:
            self._tell.wait_for(lambda: self._error is not None, seconds)
            self._raise_if_stopped()

    def take_results(self) -> Results:
        """All results; they are no longer here."""
        with self._tell:
            results, self._results = self._results, Results()
            return results

    def want_leases(self) -> int:
        """How many more leases the rank can take on: enough to go on with while the agent is asked for more."""
        with self._tell:
            self._told_requests = self.requests
            return 0 if self._finished() else max(0, self.requests + self._batch() - self._in_hand)

    def fetch_threads(self) -> int:
        """How many fetch threads have something to do."""
        with self._tell:
            return min(self.requests, self._in_hand)

    @property
    def idle(self) -> bool:
        """Nothing goes on here: only the agent can have work."""
        with self._tell:
            return not (self._goes_on() or len(self._results))

    @property
    def finished(self) -> bool:
        """Every chunk is placed."""
        with self._tell:
            return self._finished()

    def placed_chunks(self) -> tuple[int, ...]:
        """Ids of the chunks that are on the device, ascending."""
        with self._tell:
            return tuple(sorted(self._placed))

    # -- the end -----------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None, *, finish: bool = False) -> bool:
        """Return when nothing of the arena is in use: leases not begun are given back, begun reads end by themselves,
        readable chunks are placed, or forgotten where they are held back. False: there still is after `timeout_s`, and
        no new read begins before a later call has returned True. Raises `stop`'s error.

        `finish`: chunks of which a part has arrived are fetched to their end, with further tries if need be.
        """
        with self._tell:
            while self._leases:
                self._in_hand -= 1
                self._results.add(FetchedChunk(self._leases.popleft().lease_id))
            self._fetcher.stop(finish=finish)
            self._draining, self._finishing = True, finish
            self._again.notify_all()
            self._place.notify_all()
            done = self._tell.wait_for(
                lambda: not (self._in_hand or self._copying or len(self._readable)) or self._error is not None,
                timeout_s,
            )
            self._raise_if_stopped()
            if done:
                self._draining = False
                self._fetcher.restart()
            return done

    def abandon(self) -> None:
        """What a drain waits for is not wanted: reads end at once, and no further try begins."""
        with self._tell:
            self._fetcher.stop(at_once=True)
            self._finishing = False
            self._again.notify_all()

    def forget_leases(self) -> None:
        """A hello is about to say that nothing is in use; how single leases ended does not matter then."""
        with self._tell:
            self._results.fetched.clear()

    def stop(self, error: LongshoreError) -> None:
        """Everything that waits here ends; the first error counts."""
        with self._tell:
            self._error = self._error or error
            self._fetcher.stop(at_once=True)
            for condition in (self._fetch, self._again, self._place, self._tell):
                condition.notify_all()

    # -- inside ------------------------------------------------------------------------------------------------

    def _account(self) -> float:
        """What goes on changes now. Returns the time."""
        now_s = time.monotonic()
        nothing_to_do = bool(self._leases) or self._finished() or self._short_of == "chunks"
        short_of = "" if nothing_to_do else self._short_of or "lease"
        self.fetch_time.spend(now_s, self.requests, self.working, self._pausing, short_of)
        return now_s

    def _raise_if_stopped(self) -> None:
        if self._error is not None:
            raise self._error

    def _finished(self) -> bool:
        return len(self._placed) == self._needed

    def _goes_on(self) -> bool:
        return bool(self._in_hand or self._copying or self._readable.placeable)

    def _hold(self) -> Hold:
        return Hold(self._error is not None, self._draining, bool(self._in_hand))

    def _batch(self) -> int:
        return max(self.requests, self.batch)

    def _worth_telling(self) -> bool:
        if self._error is not None or self._finished() or not self._goes_on():
            return True
        if self.requests > self._told_requests or self._results.throttled:
            return True  # it can take on more leases, or should take on fewer
        results = len(self._results)
        # Several chunks a call keep the agent's share of the CPU small; but not while a place for a request is free.
        starved = not self._leases and self.working + self._pausing < self.requests
        return results >= (1 if starved else self._batch())

    def _note_placed(self, chunks: Iterable[int], moved_bytes: int) -> None:
        self._placed.update(chunks)
        self._results.placed.extend(chunks)
        self.placed_bytes += moved_bytes

    def _was_throttled(self) -> None:
        self.throttles += 1
        self._results.throttled += 1
