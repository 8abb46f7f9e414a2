"""Decides which chunks a reader wants before they are read, and which it gives back. Pure.

Chunks are numbered in file order, and most programs read a model in that order. Without reading ahead every tensor
would cost a round trip to the store.

    read so far     wanted, in order
    ...#########|+++++++++........          + as many as the run of reads so far was long, up to the limit
                ^ the chunk that is read now

A read far from the run so far begins a new run. A program that knows its reads names them (`plan`); then these are
wanted, and nothing is guessed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

KEPT = 4  # chunks that were read stay, because the next small tensors are often in them; at most `limit`


class ReadAhead:
    """What one reader wants beyond the chunk that it reads. Not thread-safe."""

    def __init__(self, chunks: Sequence[int], limit: int = 1) -> None:
        """`chunks` has the ids of all chunks with tensors, ascending. `limit`: chunks wanted ahead, at least 1."""
        self.limit = limit
        self._chunks = chunks
        self._number = {chunk: number for number, chunk in enumerate(chunks)}
        self._first = self._high = -1  # of the run: numbers of its first and its last chunk
        self._planned: deque[int] = deque()
        self._ahead: dict[int, None] = {}  # wanted and not read
        self._read: OrderedDict[int, None] = OrderedDict()  # read and not given back, the last read last

    def plan(self, chunks: Iterable[int]) -> None:
        """Name chunks that will be read, in this order, after those named before."""
        self._planned.extend(chunk for chunk in chunks if chunk in self._number)

    def next_planned(self) -> list[int]:
        """Return the planned chunks that may be fetched now."""
        found = list(self._planned)[: self.limit]
        self._ahead.update(dict.fromkeys(found))
        return found

    def wanted(self, chunk: int, following: Iterable[int] = ()) -> list[int]:
        """Return what to want now: the chunk that is read, what the same read needs after it, and a guess."""
        number = self._number.get(chunk)
        if number is None:  # of a header
            return [chunk]
        if self._first <= number <= self._high + 2 and self._high >= 0:
            self._high = max(self._high, number)
        else:
            self._first = self._high = number
        found = {chunk: None} | dict.fromkeys(following)
        while self._planned and self._planned[0] in found:
            self._planned.popleft()
        if self._planned:
            guess: Iterable[int] = list(self._planned)[: self.limit]
        else:
            run = self._high - self._first
            guess = self._chunks[self._high + 1 : self._high + 1 + min(run, self.limit)]
        ahead = [each for each in (*found, *guess) if each != chunk][: self.limit]
        self._ahead.update(dict.fromkeys([chunk, *ahead]))
        return [chunk, *ahead]

    def read(self, chunk: int, following: Iterable[int] = ()) -> list[int]:
        """Record that a chunk was read. Return the chunks to give back: read ones, and those of an ended run.

        `following`: what the same read needs after it.
        """
        self._ahead.pop(chunk, None)
        self._read[chunk] = None
        self._read.move_to_end(chunk)
        gone = [self._read.popitem(last=False)[0] for _ in range(len(self._read) - min(KEPT, self.limit))]
        high = self._high
        keep = {*following, *list(self._planned)[: self.limit], *self._chunks[high + 1 : high + 1 + self.limit]}
        ended = [each for each in self._ahead if each not in keep]
        for each in ended:
            del self._ahead[each]
        return gone + ended
