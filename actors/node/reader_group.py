"""What the readers of one model on one node may still read. Pure.

A reader asks for chunks when it needs them (`cluster.safe_open`). The readers of a group read the same model, often one
shortly after the other: the ranks of an inference engine. So a chunk that one reader asked for is *expected* by the
others. It stays in the window until each of them has read it, has passed it, or is idle:

    asked by one reader --> expected by the others that have neither read nor passed it
    asked by another    --> granted to it at once
    passed              --> this reader will not read it, as its rank has no part of it
    returned unread     --> expected by the reader itself, while nobody waits for a slot
    idle                --> no progress of this reader for `patience_s` while somebody waits for a slot

Patience begins when the first reader of the group reads or passes something. Engines open a model, and ask for its
first chunks, while they are not ready to read: nobody is late before somebody has begun.

A chunk that is no longer expected may be read again. Then it comes from the arena's kept slots, or once more from the
store.

Each reader has at most `most` chunks in hand: those that it was *admitted* to ask for, and its leases. What it asks for
beyond that waits. So a reader that stops takes its share of the window at most, and never more than `patience_s` from
the others:

    ask --> admitted (fetched, pinned, granted) --> read or returned: the next one that waits is admitted
        --> waits
    idle, and others wait for a slot: what was not granted waits again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray


class ReaderGroup:
    """The expectations of one group's readers. Ranks are the numbers of readers."""

    def __init__(self, needs: Mapping[int, NDArray[np.int64]], most: int, patience_s: float, now_s: float) -> None:
        """`needs` has the ids of all chunks, for each reader. `most`: chunks in hand of one reader."""
        size = 1 + max((int(ids[-1]) for ids in needs.values() if len(ids)), default=-1)
        self.asked_chunks: set[int] = set()  # by any reader, ever
        self.most = most
        self._admitted: dict[int, set[int]] = {rank: set() for rank in needs}
        self._waiting: dict[int, deque[int]] = {rank: deque() for rank in needs}
        self._patience_s = patience_s
        self._needs = {rank: frozenset(ids.tolist()) for rank, ids in needs.items()}
        self._unread = {rank: np.zeros(size, bool) for rank in needs}
        for rank, ids in needs.items():
            self._unread[rank][ids] = True
        self._expected: dict[int, set[int]] = {rank: set() for rank in needs}
        self._returned: set[tuple[int, int]] = set()  # (reader, chunk) of expectations after `returned`
        self._active_s = dict.fromkeys(needs, now_s)
        self._begun = False  # whether a reader has read or passed something

    def may_ask(self, rank: int, chunk: int) -> bool:
        """Return whether the chunk has tensors. A message may name any number."""
        return chunk in self._needs[rank]

    def expects(self, rank: int, chunk: int) -> bool:
        """Return whether the chunk waits for a reader that has not asked for it."""
        return chunk in self._expected[rank]

    def ask(self, rank: int, chunk: int) -> None:
        """Let a reader wait for the chunk, if it neither waits nor was admitted. `admit` follows."""
        if chunk not in self._admitted[rank] and chunk not in self._waiting[rank]:
            self._waiting[rank].append(chunk)

    def admit(self, rank: int) -> list[int]:
        """Return the chunks that the reader was admitted to just now."""
        found = []
        while self._waiting[rank] and len(self._admitted[rank]) < self.most:
            chunk = self._waiting[rank].popleft()
            self._admitted[rank].add(chunk)
            found.append(chunk)
        return found

    def waits(self, rank: int) -> bool:
        """Return whether the reader has more in hand than it may have, so that some of what it asked for waits."""
        return bool(self._waiting[rank])

    def asked(self, rank: int, chunk: int, now_s: float) -> list[int]:
        """Record that a reader was admitted to the chunk. Return the readers that expect it from now on."""
        self._active_s[rank] = now_s
        self.asked_chunks.add(chunk)
        self._settle(rank, chunk)
        self._unread[rank][chunk] = False
        found = [
            other
            for other in self._unread
            if other != rank and self._unread[other][chunk] and chunk not in self._expected[other]
            if not self._begun or now_s - self._active_s[other] <= self._patience_s
        ]
        for other in found:
            self._expected[other].add(chunk)
        return found

    def asked_elsewhere(self, chunk: int) -> list[int]:
        """Record that another node asks for the chunk. Return the readers here that expect it from now on.

        None if no reader here is going to read it. A reader without progress is not in the way: what it expects goes
        when a slot is needed (`drop`).
        """
        found = [
            rank
            for rank, unread in self._unread.items()
            if chunk < len(unread) and unread[chunk] and chunk not in self._expected[rank]
        ]
        for rank in found:
            self._expected[rank].add(chunk)
            self.asked_chunks.add(chunk)
        return found

    def read(self, rank: int, chunk: int, now_s: float) -> None:
        """Record that a reader has read the chunk."""
        self._goes_on(rank, now_s)
        self.withdraw(rank, chunk)
        self._settle(rank, chunk)
        if self.may_ask(rank, chunk):
            self._unread[rank][chunk] = False

    def withdraw(self, rank: int, chunk: int) -> None:
        """Record that a reader does not need the chunk now, although it asked for it."""
        self._admitted[rank].discard(chunk)
        if chunk in self._waiting[rank]:
            self._waiting[rank].remove(chunk)

    def returned(self, rank: int, chunk: int) -> None:
        """Record that a reader asked for the chunk too early. It is expected to ask again."""
        self._unread[rank][chunk] = True
        self._expected[rank].add(chunk)
        self._returned.add((rank, chunk))

    def passed(self, rank: int, first: int, end: int, now_s: float) -> list[int]:
        """Record that a reader will not read the chunks first .. end - 1. Return those that it expected, ascending."""
        self._goes_on(rank, now_s)
        self._unread[rank][max(first, 0) : max(end, 0)] = False
        found = sorted(chunk for chunk in self._expected[rank] if first <= chunk < end)
        for chunk in found:
            self._settle(rank, chunk)
        return found

    def forget(self, rank: int) -> None:
        """Drop what a reader expects and asked for, because its process is gone. Its successor begins to read anew."""
        self._admitted[rank].clear()
        self._waiting[rank].clear()
        for chunk in list(self._expected[rank]):
            self._settle(rank, chunk)

    def drop(
        self,
        rank: int,
        wanted: int,
        kept: Iterable[int],
        granted: Mapping[int, Iterable[int]],
        now_s: float,
        waiting: Collection[int] = (),
    ) -> list[tuple[int, int]]:
        """Drop expectations because the reader gets no slot for the `wanted` chunk. Return them as (reader, chunk).

        Those on chunks in `kept`, which the arena keeps besides, go first. If there are none, those that were returned
        go, one at a time but for those that lie behind their readers. Then goes the last that the reader itself
        expects, if it is the one that needs the chunk. Then go those of idle readers, with what these asked for and
        were not `granted`. A reader in `waiting` lives and has nothing to read: it is not idle if it asked for chunks.
        """
        cheap = set(kept)
        found = [(rank, chunk) for rank, chunks in self._expected.items() for chunk in chunks & cheap]
        if not found:
            found = [(rank, chunk) for rank, chunk in self._returned if chunk < min(self._admitted[rank], default=0)]
        if not found:
            found = self._last({chunk for _, chunk in self._returned})
        if not found and wanted in self._admitted[rank]:
            found = self._last(self._expected[rank])
        if not found:
            idle = [
                rank
                for rank, active_s in self._active_s.items()
                if now_s - active_s > self._patience_s and not (rank in waiting and self._admitted[rank])
            ]
            found = [(rank, chunk) for rank in idle for chunk in self._expected[rank]]
            for rank in idle:
                again = sorted(self._admitted[rank] - set(granted[rank]), reverse=True)
                self._admitted[rank] -= set(again)
                self._waiting[rank].extendleft(again)
                found += [(rank, chunk) for chunk in again]
        for rank, chunk in found:
            self._settle(rank, chunk)
        return sorted(found)

    def _last(self, chunks: set[int]) -> list[tuple[int, int]]:
        """Return all expectations on the last of these chunks whose slot is free without them."""
        free = chunks.difference(*self._admitted.values())
        return [(rank, max(free)) for rank, expected in self._expected.items() if free and max(free) in expected]

    def drop_returned(self) -> list[tuple[int, int]]:
        """Drop what was returned unread, because another load needs slots. Return it as (reader, chunk)."""
        found = sorted(self._returned)
        for rank, chunk in found:
            self._settle(rank, chunk)
        return found

    def all_expected(self) -> set[int]:
        """Return the chunks that any reader expects."""
        return set().union(*self._expected.values())

    def _goes_on(self, rank: int, now_s: float) -> None:
        if not self._begun:
            self._begun = True
            self._active_s = dict.fromkeys(self._active_s, now_s)
            self._returned.clear()  # they were not asked for too early: they will be read next
        self._active_s[rank] = now_s

    def _settle(self, rank: int, chunk: int) -> None:
        self._expected[rank].discard(chunk)
        self._returned.discard((rank, chunk))
