"""What can happen to a load, as data; `cluster.scheduling.load_state` says what follows from it.

The docstring of each event is its line in `docs/load_states.md`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a load, in one attempt at it."""

    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """There is a plan, and it fits."""


@dataclass(frozen=True, slots=True)
class ResourcesMissing(Event):
    """Not all ranks have a place."""


@dataclass(frozen=True, slots=True)
class ResourcesGranted(Event):
    """All ranks have a place."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """Every rank has its worker."""


@dataclass(frozen=True, slots=True)
class RankProgress(Event):
    """A rank holds so many bytes of its slices."""

    rank: int
    incarnation: int
    placed_bytes: int


@dataclass(frozen=True, slots=True)
class RankReady(Event):
    """A rank holds all its slices."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RankLost(Event):
    """A rank's worker is dead or does not answer; what it held is gone."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RankReplaced(Event):
    """A rank has a new worker, which begins anew."""

    rank: int
    incarnation: int  # of the new worker


@dataclass(frozen=True, slots=True)
class Replanned(Event):
    """Ranks of a lost node get other places: a new attempt, of that number. Others keep what they have"""

    ranks: tuple[int, ...] = ()  # whose places are lost


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The load cannot go on."""

    error: str


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """Nobody wants the load any more, before it was ready."""


@dataclass(frozen=True, slots=True)
class Released(Event):
    """Nobody holds the model any more."""


EVENTS: tuple[type[Event], ...] = (
    Planned,
    ResourcesMissing,
    ResourcesGranted,
    Started,
    RankProgress,
    RankReady,
    RankLost,
    RankReplaced,
    Replanned,
    Failed,
    Cancelled,
    Released,
)
