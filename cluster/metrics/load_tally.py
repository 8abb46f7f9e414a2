"""The lives of loads as counters, durations and what is now. Pure; `cluster.metrics.tally` has it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from cluster.metrics import families
from cluster.metrics.families import BUCKETS_S, Family
from cluster.scheduling.load_state import LoadState, RankLife

UNDER_WAY = (
    LoadState.PLANNING,
    LoadState.WAITING,
    LoadState.STARTING,
    LoadState.LOADING,
    LoadState.DEGRADED,
)  # not usable now, and not over
OUTCOMES = ("ready", "failed", "cancelled", "lost")


@dataclass(frozen=True, slots=True)
class LoadView:
    """A load as the coordinator knows it."""

    load_id: str
    model: str  # see cluster.metrics.labels
    state: LoadState
    ranks: tuple[RankLife, ...]
    hosts: tuple[str, ...]  # of each rank; "" before it has a place
    size_bytes: int  # 0 until planned
    error: str = ""  # type of what it failed with


@dataclass(frozen=True, slots=True)
class LoadNow:
    """What is known of a load besides."""

    view: LoadView
    model: str  # the label's value
    begun_s: float
    state_s: float  # since when it has been in its state
    moved_s: float  # when it last placed a byte or changed its state
    was_ready: bool
    adopted: bool  # an earlier coordinator began it: nobody knows when


@dataclass(frozen=True, slots=True)
class Durations:
    """A histogram: how many were at most each of BUCKETS_S, and longer than all; not cumulative."""

    counts: tuple[int, ...] = (0,) * (len(BUCKETS_S) + 1)
    sum_s: float = 0.0

    def plus(self, duration_s: float) -> Durations:
        """With one more."""
        at = bisect.bisect_left(BUCKETS_S, duration_s)
        counts = (*self.counts[:at], self.counts[at] + 1, *self.counts[at + 1 :])
        return Durations(counts, self.sum_s + duration_s)


class LoadTally:
    """See above."""

    def __init__(self, add: Callable[[Family, tuple[str, ...], float], None]) -> None:
        """`add(metric, labels, value)` adds to a counter, or makes it."""
        self.durations: dict[tuple[Family, tuple[str, ...]], Durations] = {}
        self._add = add
        self._loads: dict[str, LoadNow] = {}

    def now(self) -> tuple[LoadNow, ...]:
        """Every load that is known."""
        return tuple(self._loads.values())

    def keep(self, load_ids: Collection[str]) -> None:
        """No other load is listed any more."""
        for load_id in [load_id for load_id in self._loads if load_id not in load_ids]:
            del self._loads[load_id]

    def moved(self, load_id: str, now_s: float) -> None:
        """It has placed something, or gave something up."""
        load = self._loads.get(load_id)
        if load is not None:
            self._loads[load_id] = replace(load, moved_s=now_s)

    def note(self, view: LoadView, model: str, now_s: float, *, adopted: bool) -> None:
        """The load is so now. One that is over stays over. `adopted` counts when it is noted for the first time."""
        load = self._loads.get(view.load_id)
        if load is None:
            self._loads[view.load_id] = LoadNow(view, model, now_s, now_s, now_s, False, adopted)
            self._add(families.RANKS_LOST, (model,), 0)  # Prometheus sees a counter grow only if it was there before
            for outcome in OUTCOMES:
                self._add(families.LOADS_FINISHED, (model, outcome), 0)
            return
        before = load.view
        if before == view or before.state.is_terminal:
            return
        if before.ranks is not view.ranks:
            lost = sum(rank.lost and not was.lost for was, rank in zip(before.ranks, view.ranks, strict=True))
            self._add(families.RANKS_LOST, (load.model,), lost)
        load = replace(load, view=view)
        if view.state is not before.state:
            load = self._entered(load, before.state, now_s)
        self._loads[view.load_id] = load

    def _entered(self, load: LoadNow, before: LoadState, now_s: float) -> LoadNow:
        view = load.view
        if before in UNDER_WAY and not load.adopted:
            self._observe(families.LOAD_STATE_DURATION, (before.value,), now_s - load.state_s)
        outcome = ""
        if view.state is LoadState.READY and not load.was_ready:
            outcome = "ready"
        elif view.state is LoadState.FAILED:
            outcome = "lost" if load.was_ready else "failed"
            self._add(families.LOAD_FAILURES, (load.model, view.error or "unknown"), 1)
        elif view.state is LoadState.RELEASED and not load.was_ready:
            outcome = "cancelled"
        if outcome and (outcome == "lost" or not load.adopted):  # an earlier coordinator may have counted that
            self._add(families.LOADS_FINISHED, (load.model, outcome), 1)
            if outcome != "lost":
                self._observe(families.LOAD_DURATION, (load.model, outcome), now_s - load.begun_s)
        was_ready = load.was_ready or view.state is LoadState.READY
        return replace(load, state_s=now_s, moved_s=now_s, was_ready=was_ready)

    def _observe(self, family: Family, labels: tuple[str, ...], duration_s: float) -> None:
        key = family, labels
        self.durations[key] = self.durations.get(key, Durations()).plus(max(0.0, duration_s))
