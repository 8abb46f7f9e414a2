"""The states of a load, and of the model that it leaves in memory: one table and one pure function.

Everything that decides about states is in this file. `TRANSITIONS` has the next state for each state and event. A pair
that is not in it is a bug and raises. `SETTLES` has the changes that follow from the ranks alone, whatever the last
event was: the last rank that becomes ready makes the load READY.

Events carry the attempt they belong to, and events of a rank carry its incarnation. An event of an older attempt or
incarnation, a repeated one, or one after the end changes nothing.

When a node is lost, its ranks lose their places, but the plan stays: what a rank holds does not depend on its node. So
a new attempt (`Replanned`) begins for those ranks only, and the state stays as it was.

`python -m cluster.scheduling.load_state` prints `docs/load_states.md` from these tables. The docstring of each event is
its line in that page.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.errors import IllegalTransition


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
    """A rank reports how many bytes of its slices it holds."""

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
    """A rank has a new worker, which starts from nothing."""

    rank: int
    incarnation: int  # incarnation of the new worker


@dataclass(frozen=True, slots=True)
class Replanned(Event):
    """Ranks of a lost node get other places, as a new attempt. Other ranks keep what they have."""

    ranks: tuple[int, ...] = ()  # ranks that lost their places


@dataclass(frozen=True, slots=True)
class Grown(Event):
    """Ranks of further replicas join, as a new attempt. The model is ready without them."""

    incarnations: tuple[int, ...] = ()  # of their first workers


@dataclass(frozen=True, slots=True)
class Scaled(Event):
    """The model has exactly this many ranks: those that joined belong to it, or ranks at the end are removed."""

    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The load cannot go on."""

    error: str


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """The last client has cancelled or disappeared before the load was ready."""


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
    Grown,
    Scaled,
    Failed,
    Cancelled,
    Released,
)


class LoadState(enum.Enum):
    """The states of a load."""

    PLANNING = "planning"
    WAITING = "waiting"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    FAILED = "failed"
    RELEASED = "released"

    @property
    def is_terminal(self) -> bool:
        """Return whether no event can change the state any more."""
        return self in (LoadState.FAILED, LoadState.RELEASED)


MEANINGS: Mapping[LoadState, str] = {
    LoadState.PLANNING: "the planner reads the model and makes the plan",
    LoadState.WAITING: "the cluster has too few free places for the ranks",
    LoadState.STARTING: "agents and workers are being started",
    LoadState.LOADING: "ranks fetch, verify and place",
    LoadState.READY: "every rank holds exactly its slices",
    LoadState.DEGRADED: "it was ready; a rank was lost and is being filled again",
    LoadState.FAILED: "it ended with an error",
    LoadState.RELEASED: "it was released or cancelled; its memory is free",
}


_S = LoadState
_ENDS: dict[type[Event], LoadState] = {
    Failed: _S.FAILED,
    Cancelled: _S.RELEASED,
    Released: _S.RELEASED,
}


def _stay(state: LoadState, *events: type[Event]) -> dict[type[Event], LoadState]:
    return dict.fromkeys(events, state)


_RANK_EVENTS = (Replanned, RankProgress, RankReady, RankLost, RankReplaced)
_SCALE_EVENTS = (Grown, Scaled)

TRANSITIONS: Mapping[LoadState, Mapping[type[Event], LoadState]] = {
    _S.PLANNING: {**_stay(_S.PLANNING, Replanned), Planned: _S.STARTING, **_ENDS},
    _S.STARTING: {
        **_stay(_S.STARTING, Planned, ResourcesGranted, *_RANK_EVENTS),
        ResourcesMissing: _S.WAITING,
        Started: _S.LOADING,
        **_ENDS,
    },
    _S.WAITING: {
        **_stay(_S.WAITING, Planned, ResourcesMissing, Replanned),
        ResourcesGranted: _S.STARTING,
        Started: _S.LOADING,
        **_ENDS,
    },
    _S.LOADING: {**_stay(_S.LOADING, Planned, ResourcesGranted, Started, *_RANK_EVENTS), **_ENDS},
    _S.READY: {**_stay(_S.READY, Planned, ResourcesGranted, Started, *_RANK_EVENTS, *_SCALE_EVENTS), **_ENDS},
    _S.DEGRADED: {**_stay(_S.DEGRADED, Planned, ResourcesGranted, Started, *_RANK_EVENTS, *_SCALE_EVENTS), **_ENDS},
    _S.FAILED: {},
    _S.RELEASED: {},
}

# (state, all ranks ready that do not join?) -> state. Looked up after every event.
SETTLES: Mapping[tuple[LoadState, bool], LoadState] = {
    (_S.LOADING, True): _S.READY,
    (_S.READY, False): _S.DEGRADED,
    (_S.DEGRADED, True): _S.READY,
}


@dataclass(frozen=True, slots=True)
class RankLife:
    """One rank, as the coordinator knows it."""

    incarnation: int = 0  # incarnation of its worker, 0 for the first one
    placed_bytes: int = 0
    ready: bool = False
    lost: bool = False  # the worker of this incarnation is gone


@dataclass(frozen=True, slots=True)
class Life:
    """The state of one load. Only `advance` changes it, by returning a new one."""

    state: LoadState
    attempt: int  # counted from 1; never decreases
    ranks: tuple[RankLife, ...]
    error: str = ""  # why it failed
    joining: int = 0  # the last ranks are being added, and the model is ready without them

    @classmethod
    def new(cls, world_size: int) -> Life:
        """Return the life of a new load with `world_size` ranks."""
        return cls(LoadState.PLANNING, 1, (RankLife(),) * world_size)

    @property
    def is_over(self) -> bool:
        """Return whether the load has failed or was released."""
        return self.state.is_terminal

    @property
    def is_ready(self) -> bool:
        """Return whether every rank holds its slices now."""
        return self.state is LoadState.READY

    @property
    def ranks_ready(self) -> int:
        """Return how many ranks hold all their slices, those that join included."""
        return sum(rank.ready for rank in self.ranks)

    @property
    def placed_bytes(self) -> int:
        """Return the bytes of slices that all ranks hold."""
        return sum(rank.placed_bytes for rank in self.ranks)


def advance(life: Life, event: Event) -> Life:
    """Return the load after the event, or the same object when the event changes nothing.

    Raises IllegalTransition for an event that cannot come in this state, a rank that the load does not have, and an
    attempt or incarnation that has not begun.
    """
    if life.is_over or event.attempt < life.attempt:
        return life
    to = TRANSITIONS[life.state].get(type(event))
    if to is None or (event.attempt > life.attempt and not isinstance(event, Replanned | Grown)):
        raise IllegalTransition(
            "this cannot happen to a load in this state",
            event=type(event).__name__,
            state=life.state.value,
            event_attempt=event.attempt,
            attempt=life.attempt,
        )
    ranks, joining = life.ranks, life.joining
    if isinstance(event, Replanned | Grown) and event.attempt == life.attempt:
        return life  # a repeated event: the attempt has already begun
    if isinstance(event, Replanned):
        ranks = _without_places(life, event)
    elif isinstance(event, Grown):
        ranks = (*ranks, *map(RankLife, event.incarnations))
        joining += len(event.incarnations)
    elif isinstance(event, Scaled):
        if not 1 <= event.ranks <= len(ranks):
            raise IllegalTransition("the load has not that many ranks", ranks=event.ranks, ranks_total=len(ranks))
        ranks, joining = ranks[: event.ranks], 0
    elif isinstance(event, RankProgress | RankReady | RankLost | RankReplaced):
        ranks = _with_rank(life, event)
    to = SETTLES.get((to, all(rank.ready for rank in ranks[: len(ranks) - joining])), to)
    if to is life.state and ranks == life.ranks and joining == life.joining and event.attempt == life.attempt:
        return life
    return Life(to, event.attempt, ranks, event.error if isinstance(event, Failed) else "", joining)


def _without_places(life: Life, event: Replanned) -> tuple[RankLife, ...]:
    """Keep counting incarnations, so that events of a worker on a lost node are late in the new attempt."""
    if not set(event.ranks) <= set(range(len(life.ranks))):
        raise IllegalTransition("the load has no such ranks", ranks=event.ranks, ranks_total=len(life.ranks))
    lost = set(event.ranks)
    return tuple(
        RankLife(life_of.incarnation, lost=True) if rank in lost else life_of for rank, life_of in enumerate(life.ranks)
    )


def _with_rank(life: Life, event: RankProgress | RankReady | RankLost | RankReplaced) -> tuple[RankLife, ...]:
    """Return the ranks after the event, or the same tuple when the event is late or repeated."""
    if not 0 <= event.rank < len(life.ranks):
        raise IllegalTransition("the load has no such rank", rank=event.rank, ranks=len(life.ranks))
    before = life.ranks[event.rank]
    if event.incarnation > before.incarnation and not isinstance(event, RankReplaced):
        raise IllegalTransition(
            "nobody has started this incarnation of the rank",
            rank=event.rank,
            event_incarnation=event.incarnation,
            incarnation=before.incarnation,
        )
    after = before
    if isinstance(event, RankReplaced):
        if event.incarnation > before.incarnation:
            after = RankLife(event.incarnation)
    elif event.incarnation < before.incarnation or before.lost:
        pass
    elif isinstance(event, RankProgress):
        after = replace(before, placed_bytes=max(before.placed_bytes, event.placed_bytes))
    elif isinstance(event, RankReady):
        after = replace(before, ready=True)
    else:
        after = RankLife(before.incarnation, lost=True)
    if after == before:
        return life.ranks
    return (*life.ranks[: event.rank], after, *life.ranks[event.rank + 1 :])


def state_diagram() -> str:
    """Return the tables as a Mermaid diagram, without the events that change no state."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, row in TRANSITIONS.items():
        for event, to in row.items():
            if to is not state:
                arrows.setdefault((state.name, to.name), []).append(event.__name__)
    for (state, all_ready), to in SETTLES.items():
        label = "all ranks ready" if all_ready else "a rank is not ready"
        arrows.setdefault((state.name, to.name), []).append(label)
    lines = ["stateDiagram-v2", f"    [*] --> {LoadState.PLANNING.name}"]
    lines += [f"    {start} --> {end}: {', '.join(labels)}" for (start, end), labels in arrows.items()]
    lines += [f"    {state.name} --> [*]" for state in LoadState if state.is_terminal]
    return "\n".join(lines)


def render_doc() -> str:
    """Return the text of docs/load_states.md."""
    meanings = "\n".join(f"| {state.name} | {MEANINGS[state]} |" for state in LoadState)
    events = "\n".join(f"| {kind.__name__} | {(kind.__doc__ or '').rstrip('.')} |" for kind in EVENTS)
    return f"""# The states of a load

*For people who read events, or change what a load does next.*

This page is printed from `cluster/scheduling/load_state.py`:
`python -m cluster.scheduling.load_state > docs/load_states.md`.

| state | meaning |
|---|---|
{meanings}

```mermaid
{state_diagram()}
```

Arrows with a lower-case label follow from the ranks alone, whatever the last event was. An event without an arrow out
of a state does not change that state. Late and repeated events change nothing. FAILED and RELEASED are final.

| event | what happened |
|---|---|
{events}
"""


if __name__ == "__main__":
    print(render_doc(), end="")
