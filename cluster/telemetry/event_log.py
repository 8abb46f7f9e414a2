"""A load's events, in order, for people who watch it: bounded, numbered, never with a secret. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.telemetry.stats import Jsonable
from cluster.units import printable

if TYPE_CHECKING:
    from cluster.scheduling.load_state import Life

MAX_EVENTS = 1000  # of one load; older ones are forgotten
MAX_TEXT = 500  # characters of one event's message


@dataclass(frozen=True, slots=True)
class LoadEvent(Jsonable):
    """One thing that happened to a load."""

    number: int  # from 1 on, without gaps: a gap seen by a reader is what was forgotten
    at_s: float  # seconds since the epoch, by the clock of the coordinator's host
    kind: str  # "state", "rank_ready", "rank_lost", "rank_replaced", "moved", "note"
    message: str
    rank: int | None = None
    host: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """The last MAX_EVENTS events of one load."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self._events: deque[LoadEvent] = deque(maxlen=most)
        self._numbers = itertools.count(1)
        self._note = ""

    @property
    def last_number(self) -> int:
        """Return the number of the newest event; 0 if there is none."""
        return self._events[-1].number if self._events else 0

    def add(
        self, at_s: float, kind: str, message: str, *, rank: int | None = None, host: str = "", **details: Any
    ) -> None:
        """One more event. Text that came from elsewhere loses its control characters, and what is too long of it."""
        text = printable(message)[:MAX_TEXT]
        self._events.append(LoadEvent(next(self._numbers), at_s, kind, text, rank, host, details))

    def note(self, at_s: float, message: str) -> None:
        """Note what the load waits for. The same text again, or an empty one, adds no event."""
        if message and message != self._note:
            self.add(at_s, "note", message)
        self._note = message

    def moved(self, at_s: float, before: Life, after: Life, hosts: Mapping[int, str]) -> None:
        """All that differs between two moments of the load's life. `hosts`: where each rank sits."""
        if after.attempt > before.attempt:
            self.add(at_s, "moved", "ranks of a lost node get other places", attempt=after.attempt)
        for rank, (was, now) in enumerate(zip(before.ranks, after.ranks, strict=True)):
            for kind, message in _of_rank(was.ready, was.lost, was.incarnation, now.ready, now.lost, now.incarnation):
                self.add(at_s, kind, message, rank=rank, host=hosts.get(rank, ""), incarnation=now.incarnation)
        if after.state is not before.state:
            words = f"{before.state.value} -> {after.state.value}"
            self.add(at_s, "state", f"{words}: {after.error}" if after.error else words, state=after.state.value)

    def after(self, number: int) -> tuple[LoadEvent, ...]:
        """Events with a higher number, oldest first."""
        return tuple(event for event in self._events if event.number > number)


def _of_rank(
    was_ready: bool, was_lost: bool, was: int, is_ready: bool, is_lost: bool, incarnation: int
) -> Iterator[tuple[str, str]]:
    if is_lost and not was_lost:
        yield "rank_lost", "its worker is gone"
    if incarnation > was and not is_lost:
        yield "rank_replaced", "it has a new worker, which loads its slices again"
    if is_ready and not was_ready:
        yield "rank_ready", "it holds all its slices"
