"""Looks at a running cluster, one after the other: what is there now, what happened since, and how fast bytes go.

residents.status, residents.events --Looks.look--> Look --> a view: watch_view (terminal), watch_lines (log, JSON)
                       looks_in_thread: a look per interval, and how long none has come meanwhile
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from cluster import residents
from cluster.errors import ModelNotFound
from cluster.telemetry.event_log import LoadEvent
from cluster.telemetry.report import ClusterStatus, ModelStatus

RATE_OVER_S = 5.0  # a rate is that of the last seconds
MOST_ASKED = 64  # loads whose events are asked for in one look; those that are under way come first
SILENCE_S = 1.0  # without a look, after which it is told
_OVER = ("failed", "released")


@dataclass(frozen=True, slots=True)
class Happened:
    """One event, and whose."""

    model_id: str
    event: LoadEvent
    old: bool  # from before the first look


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the cluster."""

    status: ClusterStatus
    rates: Mapping[str, float]  # model id -> bytes placed per second lately; only of loads under way
    events: tuple[Happened, ...]  # since the last look, by time


class Looks:
    """Remembers what the last looks saw. `clock` counts seconds."""

    def __init__(self, address: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._incarnation = ""  # of the coordinator; another one counts events from 1 again
        self._after: dict[str, int] = {}  # model id -> number of the last event seen
        self._asked_when_over: set[str] = set()
        self._placed: dict[str, deque[tuple[float, int]]] = {}

    def look(self) -> Look:
        """Raises ClusterLost when no coordinator answers, after it has been waited for; VersionMismatch."""
        status = residents.status(self._address)
        first = not self._incarnation
        if status.coordinator_incarnation != self._incarnation:
            self._incarnation = status.coordinator_incarnation
            self._after.clear()
            self._asked_when_over.clear()
        rates = self._rates(status)
        events = [happened for model in self._to_ask(status) for happened in self._news(model, first)]
        return Look(status, rates, tuple(sorted(events, key=lambda happened: happened.event.at_s)))

    def _to_ask(self, status: ClusterStatus) -> list[ModelStatus]:
        """Loads under way first; one that is over is asked about once."""
        models = [model for model in status.listed if model.progress.model_id not in self._asked_when_over]
        models.sort(key=lambda model: (model.progress.state in _OVER, model.progress.state == "ready"))
        asked = models[:MOST_ASKED]
        self._asked_when_over |= {m.progress.model_id for m in asked if m.progress.state in _OVER}
        return asked

    def _news(self, model: ModelStatus, old: bool) -> list[Happened]:
        model_id = model.progress.model_id
        try:
            events = residents.events(model_id, after=self._after.get(model_id, 0), address=self._address)
        except ModelNotFound:  # forgotten since the status was told
            return []
        if events:
            self._after[model_id] = events[-1].number
        return [Happened(model_id, event, old) for event in events]

    def _rates(self, status: ClusterStatus) -> dict[str, float]:
        now_s = self._clock()
        loading = {m.progress.model_id: m.progress.placed_bytes for m in status.models if is_under_way(m)}
        self._placed = {model_id: self._placed.get(model_id, deque()) for model_id in loading}
        rates = {}
        for model_id, placed_bytes in loading.items():
            seen = self._placed[model_id]
            seen.append((now_s, placed_bytes))
            while len(seen) > 2 and now_s - seen[1][0] >= RATE_OVER_S:
                seen.popleft()
            since_s, since_bytes = seen[0]
            if now_s > since_s and placed_bytes >= since_bytes:  # less: a rank was lost, and fills its slices again
                rates[model_id] = (placed_bytes - since_bytes) / (now_s - since_s)
            elif placed_bytes < since_bytes:
                seen.clear()
                seen.append((now_s, placed_bytes))
        return rates


def is_under_way(model: ModelStatus) -> bool:
    """Whether bytes of it may be moving."""
    return model.progress.state != "ready" and model.progress.state not in _OVER


def looks_in_thread(look: Callable[[], Look], interval_s: float) -> Generator[Look | float, None, None]:
    """Looks, one every `interval_s`; in between, at least once a SILENCE_S, for how many seconds none has come.

    The first is made in this thread, so that what is wrong at once is raised at once; the others in one that may be
    left alone in a call that hangs, when this process ends. Raises what `look` raised.
    """
    yield look()
    found: queue.Queue[Look | BaseException] = queue.Queue(1)
    over = threading.Event()

    def keep_looking() -> None:
        while not over.wait(interval_s):
            try:
                found.put(look())
            except BaseException as error:  # to be raised in the thread that shows
                found.put(error)
                return

    threading.Thread(target=keep_looking, name="longshore-looks", daemon=True).start()
    try:
        heard_s = time.monotonic()
        while True:
            try:
                news = found.get(timeout=SILENCE_S)
            except queue.Empty:
                yield max(0.0, time.monotonic() - heard_s - interval_s)
                continue
            if isinstance(news, BaseException):
                raise news
            heard_s = time.monotonic()
            yield news
    finally:
        over.set()
        with contextlib.suppress(queue.Empty):
            found.get_nowait()  # there is room for the last look of the thread, which may wait for that
