"""Decides what a reader does next: a rank that gets chunks on demand, and keeps none of them. Pure.

    consumer -- want --> wanted -- update --> agent
                           |                   |
                           +<-- readable ------+ (also fetched by this reader, under leases)
    consumer -- begin_read(chunk) --> slot ... end_read(chunk) ... give_back(chunk) --> agent

A chunk that a consumer waits for is `awaited`. Until it is read it is either wanted or readable, whoever gives it back.

A reader holds the slot of a readable chunk until it gives the chunk back, so that small tensors of one chunk cost one
message. When the agent is short of slots, a reader that waits gives back what it has read, or else what it wants last.
Wanted chunks are wanted again after the agent was restarted. A reader that is not used for a while gives all back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from actors.rank.state import RankIdentity, RankState
from cluster.errors import ReaderClosed
from cluster.messages import ArenaAccess, Orders, RankHello, RankUpdate
from cluster.telemetry.stats import RankStats

IDLE_S = 5.0  # a reader that has read nothing for so long holds no slot
ASK_AGAIN_S = 0.01  # a reader that waits for other readers' fetches, and fetches itself, asks the agent this often
ANSWER_S = 0.05  # an agent without orders answers after this: meanwhile a reader can ask for nothing else


def closed() -> ReaderClosed:
    """Return the error for a read after `close`."""
    return ReaderClosed("the model was closed", hint="read inside the `with` block of safe_open")


class ReaderState(RankState):
    """Everything that a reader has in hand. `placed` stays empty: chunks are read, not placed."""

    def __init__(self, identity: RankIdentity, most: int, numbers: Iterator[int], *, heartbeat_s: float = 1.0) -> None:
        """See `RankState`."""
        super().__init__(identity, 0, most, numbers, heartbeat_s=heartbeat_s)
        self.wanted: dict[int, None] = {}  # chunks that somebody here needs and that are not readable, in order
        self.awaited: Counter[int] = Counter()  # chunk -> consumers that wait to begin to read it
        self.reads: Counter[int] = Counter()  # chunk -> reads of its slot under way
        self._unasked: dict[int, None] = {}  # of `wanted`, those that the agent was not asked for
        self._passed: list[tuple[int, int]] = []
        self._returned_unread: dict[int, None] = {}  # given back, which the agent does not know yet
        self._was_read: set[int] = set()  # readable chunks that were read once
        self._used_s = -math.inf  # when something was wanted, or a read began or ended, as far as updates have seen it
        self._was_used = True
        self._closed = False

    # -- consumers ---------------------------------------------------------------------------------------------

    def want(self, chunks: Iterable[int]) -> None:
        """Ask for chunks that are neither readable nor wanted already."""
        self._was_used = True
        for chunk in chunks:
            if chunk not in self.wanted and not self.is_readable(chunk):
                self.wanted[chunk] = self._unasked[chunk] = None

    def is_readable(self, chunk: int) -> bool:
        """Return whether `begin_read` would return a slot."""
        return chunk in self.readable and not self.draining

    def begin_read(self, chunk: int) -> int | None:
        """Return the slot that has the chunk, which stays until `end_read`. None when it is not readable."""
        if not self.is_readable(chunk):
            return None
        self._was_used = True
        self.readable.move_to_end(chunk)
        self.copying.add(chunk)
        self._was_read.add(chunk)
        self.reads[chunk] += 1
        return self.readable[chunk]

    def end_read(self, chunk: int) -> None:
        """End one read of the chunk's slot."""
        self.reads[chunk] -= 1
        if not self.reads[chunk]:
            del self.reads[chunk]
            self.copying.discard(chunk)
            if self.draining:
                self._drop_readable()

    def give_back(self, chunks: Iterable[int], now_s: float) -> None:
        """Give up chunks that nobody reads or awaits: readable ones, and wanted ones that have not come."""
        for chunk in chunks:
            if chunk in self.copying or self.awaited[chunk]:
                continue
            if chunk in self.wanted:
                del self.wanted[chunk]
                if chunk in self._unasked:
                    del self._unasked[chunk]
                    continue
            elif self.readable.pop(chunk, None) is None:
                continue
            if chunk in self._was_read:
                self._was_read.discard(chunk)
                self.results.placed.append(chunk)
            else:
                self._returned_unread[chunk] = None
            self.results.since_s = min(self.results.since_s, now_s)

    def pass_by(self, first: int, end: int) -> None:
        """Say that this reader will not ask for the chunks first .. end - 1, so that nobody keeps them for it."""
        if first < end:
            self._passed.append((first, end))

    def close(self) -> None:
        """Nobody reads any more. The reader drains and leaves."""
        self._closed = True
        self.wanted.clear()
        self._unasked.clear()

    @property
    def finished(self) -> bool:
        """True when nobody reads any more."""
        return self._closed

    # -- the conversation with the agent -----------------------------------------------------------------------

    def hello(self, others: ArenaAccess = ()) -> RankHello:
        """See `RankState.hello`. Everything that is wanted will be asked for again."""
        self._unasked = dict.fromkeys(self.wanted)
        self.results.placed.clear()  # an agent that gets a hello knows that nothing is held
        self._returned_unread.clear()
        self._was_read.clear()
        return super().hello(others)

    @property
    def update_due_s(self) -> float:
        """See `RankState.update_due_s`. A reader that wants nothing is silent between heartbeats."""
        if self._closed or self.draining or self.error is not None:
            return super().update_due_s
        fetches = bool(self.leases or self.begun)
        news = len(self.results) or self._returned_unread
        if self._unasked or self._passed or (self.wanted and (news or not fetches)):
            return -math.inf
        if self.wanted or self._returned_unread:
            return self._answered_s + ASK_AGAIN_S
        return super().update_due_s

    def update(
        self, now_s: float, *, leaving: bool = False, others: ArenaAccess = (), stats: RankStats | None = None
    ) -> RankUpdate:
        """See `RankState.update`. A reader that was not used for IDLE_S gives back all that it holds and wants."""
        if self._was_used or self.reads or self.awaited.total():
            self._was_used, self._used_s = False, now_s
        elif now_s - self._used_s > IDLE_S:
            self.give_back([*self.readable, *self.wanted], now_s)
        return super().update(now_s, leaving=leaving, others=others, stats=stats)

    def drain(self, now_s: float, *, finish: bool = False) -> None:
        """See `RankState.drain`. Slots that are being read stay until the reads end."""
        super().drain(now_s, finish=finish)
        self._drop_readable()

    # -- inside ------------------------------------------------------------------------------------------------

    def _take(self, orders: Orders, now_s: float) -> None:
        super()._take(orders, now_s)
        if self.draining:
            self._drop_readable()
            return
        unwanted = []
        for chunk, _ in orders.readable:
            self._returned_unread.pop(chunk, None)  # the agent has granted it before it knew of that
            if chunk in self.wanted:
                del self.wanted[chunk]
                self._unasked.pop(chunk, None)
            else:
                unwanted.append(chunk)
        # What was given back meanwhile, and the agent does not know of, may be enough.
        if orders.short_of == "slots" and self.wanted and not (self.results.placed or self._returned_unread):
            # Read ones first; else the one that came last, as it is wanted last. It has to be fetched again.
            spare = [chunk for chunk in self.readable if not self.awaited[chunk]]
            unwanted += [chunk for chunk in spare if chunk in self._was_read] or spare[-1:]
        self.give_back(unwanted, now_s)

    def _drop_readable(self) -> None:
        """Forget the slots that nobody reads. The message after the drain tells the agent that none is held."""
        for chunk in [chunk for chunk in self.readable if chunk not in self.copying]:
            del self.readable[chunk]
            if self.awaited[chunk]:
                self.want([chunk])

    def _take_wishes(self) -> dict[str, Any]:
        asks, self._unasked = tuple(self._unasked), {}
        passed, self._passed = tuple(self._passed), []
        unread, self._returned_unread = tuple(self._returned_unread), {}
        return {"asks": asks, "passed": passed, "returned_unread": unread}

    def _goes_on(self) -> bool:
        return bool(self.leases or self.begun)

    @property
    def _wait_s(self) -> float:
        return ANSWER_S if self.wanted else 0.0

    def _is_worth_a_message(self) -> bool:
        if self.error is not None or self.finished:
            return True
        if self.requests > self._reported_requests or self.results.throttled:
            return True
        return len(self.results) + len(self._returned_unread) >= self._batch()
