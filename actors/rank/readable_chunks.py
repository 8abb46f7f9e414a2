"""Chunks that stand verified in the arena for a rank to place, and which of them it places next.

In the order in which they came; but what would begin too many tensors that are converted on their way in is held back,
in its slot, until others have come to their end (`Staging.choose`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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
