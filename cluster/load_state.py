"""The life of a model as one table and one pure function.

Rule: everything that changes the state of a load is in this file. `advance(life, event)` looks the event up in
`TRANSITIONS`; when every rank is ready, the joint condition `_settled` moves the load on. Events of an older attempt,
or of a rank's earlier incarnation, change nothing, nor do events after the end; a repeated report is a self-loop.
`docs/load_states.md` is printed from the table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from cluster.errors import LoadError


class State(enum.Enum):
    """Where a load stands."""

    PLANNING = "planning"  # the manifest is read, the plan made
    STARTING = "starting"  # places, agents and workers are found and started
    WAITING = "waiting"  # as STARTING, but resources are missing and the caller wants to wait
    LOADING = "loading"  # workers stream, verify and place
    READY = "ready"  # every rank has all its slices
    DEGRADED = "degraded"  # was READY; a rank was lost and is being loaded again
    FAILED = "failed"  # over, with an error
    RELEASED = "released"  # over, because nobody wants it any more

    @property
    def is_over(self) -> bool:
        return self in (State.FAILED, State.RELEASED)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a load."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """The plan is made."""


@dataclass(frozen=True, slots=True)
class ResourcesMissing(Event):
    """Not enough free GPUs or places now."""


@dataclass(frozen=True, slots=True)
class Placed(Event):
    """Every rank has a place."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """Agents know the load and workers are being started."""


@dataclass(frozen=True, slots=True)
class RankEvent(Event):
    """Something that happened to one rank."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RankReady(RankEvent):
    """The rank has all its slices."""


@dataclass(frozen=True, slots=True)
class RankLost(RankEvent):
    """The rank's process is dead."""


@dataclass(frozen=True, slots=True)
class RankReplaced(RankEvent):
    """A new process, `incarnation`, has the rank."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The load cannot end well."""


@dataclass(frozen=True, slots=True)
class Released(Event):
    """Nobody wants the model any more."""


_ENDS: dict[type[Event], State] = {Failed: State.FAILED, Released: State.RELEASED}
_RANKS = (RankReady, RankLost, RankReplaced)

TRANSITIONS: dict[State, dict[type[Event], State]] = {
    State.PLANNING: {Planned: State.STARTING, **_ENDS},
    State.STARTING: {
        ResourcesMissing: State.WAITING,
        Placed: State.STARTING,
        Started: State.LOADING,
        Planned: State.STARTING,
        **_ENDS,
    },
    State.WAITING: {ResourcesMissing: State.WAITING, Placed: State.STARTING, Planned: State.WAITING, **_ENDS},
    State.LOADING: {**dict.fromkeys(_RANKS, State.LOADING), Started: State.LOADING, **_ENDS},
    State.READY: {RankReady: State.READY, RankLost: State.DEGRADED, RankReplaced: State.DEGRADED, **_ENDS},
    State.DEGRADED: {**dict.fromkeys(_RANKS, State.DEGRADED), **_ENDS},
    State.FAILED: {},
    State.RELEASED: {},
}


class IllegalEvent(LoadError):
    """An event that cannot happen in that state: a bug, not bad luck."""


@dataclass(frozen=True, slots=True)
class Life:
    """State of one load, and what decides about it."""

    state: State
    attempt: int
    incarnations: tuple[int, ...]  # of each rank's worker
    ready: frozenset[int]  # ranks that have all their slices

    @staticmethod
    def new(ranks: int) -> Life:
        return Life(State.PLANNING, 1, (0,) * ranks, frozenset())

    @property
    def is_over(self) -> bool:
        return self.state.is_over

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY


def advance(life: Life, event: Event) -> Life:
    """The life after the event; the same object when it changes nothing.

    Raises IllegalEvent for an event that the state does not know.
    """
    if life.is_over or event.attempt < life.attempt:
        return life
    if isinstance(event, RankEvent):
        if not 0 <= event.rank < len(life.incarnations):
            raise IllegalEvent("no such rank", rank=event.rank)
        current = life.incarnations[event.rank]
        replaces = isinstance(event, RankReplaced)
        if event.incarnation < current or (replaces and event.incarnation == current):
            return life  # late, or heard before
        if event.incarnation > current and not replaces:
            raise IllegalEvent(
                "an incarnation that was never announced", rank=event.rank, incarnation=event.incarnation
            )
    following = TRANSITIONS[life.state].get(type(event))
    if following is None:
        raise IllegalEvent(f"{type(event).__name__} cannot happen while {life.state.value}", attempt=event.attempt)
    if isinstance(event, RankReady):
        moved = replace(life, state=following, ready=life.ready | {event.rank})
    elif isinstance(event, RankLost):
        moved = replace(life, state=following, ready=life.ready - {event.rank})
    elif isinstance(event, RankReplaced):
        incarnations = list(life.incarnations)
        incarnations[event.rank] = event.incarnation
        moved = replace(life, state=following, ready=life.ready - {event.rank}, incarnations=tuple(incarnations))
    else:
        moved = replace(life, state=following)
    moved = _settled(moved)
    return life if moved == life else moved


def _settled(life: Life) -> Life:
    """The joint condition: the last rank that becomes ready makes the model ready."""
    if life.state in (State.LOADING, State.DEGRADED) and len(life.ready) == len(life.incarnations):
        return replace(life, state=State.READY)
    return life


def diagram() -> str:
    """The table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2", "    [*] --> planning"]
    for state, row in TRANSITIONS.items():
        for event, following in row.items():
            if following is not state:
                lines.append(f"    {state.value} --> {following.value}: {event.__name__}")
    lines += [f"    {state.value} --> ready: last rank ready" for state in (State.LOADING, State.DEGRADED)]
    lines += [f"    {state.value} --> [*]" for state in State if state.is_over]
    return "\n".join(lines) + "\n"
