"""`longshore status --watch` on a terminal: models with bars and rates, ranks by node, nodes, the last events.

Looks at a running cluster, one after the other: what is there now, what happened since, and how fast bytes go.

client.status, client.events --Looks.look--> Look --> a view: watch_view (terminal), watch_lines (log, JSON)
                       looks_in_thread: a look per interval, and how long none has come meanwhile
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster import client
from cluster.command_line.answers import style_of, time_of_day, what_of, write
from cluster.command_line.tables import cell
from cluster.errors import ModelNotFound
from cluster.telemetry.chunk_map import LoadEvent
from cluster.telemetry.report import ClusterStatus, ModelStatus, NodeStatus
from cluster.telemetry.saves import SaveProgress
from cluster.units import printable, show_bytes

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
        status = client.status(self._address)
        first = not self._incarnation
        if status.coordinator_incarnation != self._incarnation:
            self._incarnation = status.coordinator_incarnation
            self._after.clear()
            self._asked_when_over.clear()
        rates = self._rates(status)
        events = [happened for model_id in self._to_ask(status) for happened in self._news(model_id, first)]
        return Look(status, rates, tuple(sorted(events, key=lambda happened: happened.event.at_s)))

    def _to_ask(self, status: ClusterStatus) -> list[str]:
        """Return ids of loads and saves, those under way first; one that is over is asked about once."""
        listed = [
            (model.progress.state in _OVER, model.progress.state == "ready", model.progress.model_id)
            for model in status.listed
        ]
        listed += [(save.progress.is_over, False, save.progress.save_id) for save in status.saves]
        listed = [each for each in listed if each[2] not in self._asked_when_over]
        asked = sorted(listed, key=lambda each: each[:2])[:MOST_ASKED]
        self._asked_when_over |= {each for is_over, _, each in asked if is_over}
        return [each for _, _, each in asked]

    def _news(self, model_id: str, old: bool) -> list[Happened]:
        try:
            events = client.events(model_id, after=self._after.get(model_id, 0), address=self._address)
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
    """Return whether bytes of the load may be moving."""
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


BAR_COLUMNS = 20
LEAST_EVENTS = 4  # shown
WIDE_COLUMNS = 100  # from here on names are whole, bars long and all columns shown
NARROW_COLUMNS = 80  # below it there are no bars and no rates, but states and ranks stay whole
SHORT_ID, SHORTEST_ID = 22, 14
LATE_S = 5.0  # a node that has not been heard for longer
MOST_EVENTS = 200  # kept
SILENT_S = 2.0
_STATES = {"ready": "green", "failed": "bold red", "released": "dim", "degraded": "bold yellow", "waiting": "yellow"}
_RANKS = {"ready": "green", "loading": "cyan", "lost": "bold red"}  # others: dim


class TerminalWatch:
    """Draws over itself on the terminal's other screen; what was seen last stays on the first when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._events: deque[Happened] = deque(maxlen=MOST_EVENTS)
        self._look: Look | None = None

    def show(self, look: Look) -> bool:
        """Always True: a terminal that goes away ends the process."""
        self._look = look
        self._events.extend(look.events)
        self._draw(0.0)
        return True

    def silence(self, silent_s: float) -> bool:
        """The last look again, and that it is old."""
        self._draw(silent_s)
        return True

    def _draw(self, silent_s: float) -> None:
        if self._look is not None:
            self._live.update(self._view(silent_s, self._console.height), refresh=True)

    def _view(self, silent_s: float, lines: int) -> RenderableType:
        look = self._look
        return Text() if look is None else watch_view(look, self._events, silent_s, lines, self._console.width)

    def __enter__(self) -> TerminalWatch:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if self._look is not None:
            self._console.print(self._view(0.0, self._console.height - 1))


def watch_view(
    look: Look, events: Iterable[Happened], silent_s: float, lines: int, columns: int = 120
) -> RenderableType:
    """Everything in at most `lines` lines: loads under way first, and the last events in the room that is left."""
    status = look.status
    wide, narrow = columns >= WIDE_COLUMNS, columns < NARROW_COLUMNS
    head = cell(f"Longshore {status.version}, {time_of_day(time.time())}", "bold")
    if silent_s >= SILENT_S:
        head.append(f"   no answer for {silent_s:.0f} s; it may be restarting", style="bold yellow")
    room = max(12, lines) - 9 - LEAST_EVENTS  # head, titles, blank lines, what says that there is more
    nodes = sorted(status.nodes, key=lambda node: node.host)[: max(2, room // 3)]
    models = sorted(status.listed, key=_place)
    details = [_one_line(_save(save.progress)) for save in status.saves if not save.progress.is_over]
    details += [_one_line(detail) for model in models if (detail := _detail(model))]
    details = details[: max(1, room // 3)]
    models = models[: max(2, room - len(nodes) - len(details))]
    left = max(LEAST_EVENTS, lines - 9 - len(models) - len(nodes) - len(details))
    parts: list[RenderableType] = [_one_line(head), Text()]
    if status.listed:
        table = _few_of_models(models) if narrow else _models(models, look.rates, wide)
        parts += [table, *_more(len(status.listed) - len(models), "models"), *details]
    else:
        parts += [cell("no models are loaded", "dim"), *details]
    parts += [
        Text(),
        _few_of_nodes(nodes) if narrow else _nodes(nodes, wide),
        *_more(len(status.nodes) - len(nodes), "nodes"),
        Text(),
    ]
    return Group(*parts, *(_event(happened) for happened in list(events)[-left:]))


def _place(model: ModelStatus) -> tuple[bool, bool, float]:
    """Loads under way, then models that are ready, then what is over; the newest first."""
    over = model.progress.state in ("failed", "released")
    return not is_under_way(model), over, model.progress.elapsed_s


def _models(models: Iterable[ModelStatus], rates: Mapping[str, float], wide: bool) -> Table:
    table = _table("model", "state", "", "placed >", "rate >", "ranks >")
    for model in models:
        progress = model.progress
        moving = is_under_way(model)
        rate = rates.get(progress.model_id)
        placed = f"{show_bytes(progress.placed_bytes)} of " if moving and progress.total_bytes else ""
        table.add_row(
            cell(progress.model_id if wide else _shortened(progress.model_id)),
            cell(f"{progress.state}{_age(model) if wide else ''}", _STATES.get(progress.state, "cyan")),
            _bar(progress.placed_bytes, progress.total_bytes, wide) if moving else Text(),
            cell(f"{placed}{show_bytes(progress.total_bytes)}" if progress.total_bytes else "-"),
            cell(f"{show_bytes(rate)}/s" if moving and rate is not None else "-"),
            cell(f"{progress.ranks_ready}/{progress.ranks_total}"),
        )
    return table


def _age(model: ModelStatus) -> str:
    return f" {model.ended_age_s:.0f} s ago" if model.ended_age_s else ""


def _few_of_models(models: Iterable[ModelStatus]) -> Table:
    table = _table("model", "state", "placed >", "ranks >")
    for model in models:
        progress = model.progress
        table.add_row(
            cell(_shortened(progress.model_id, SHORTEST_ID)),
            cell(progress.state, _STATES.get(progress.state, "cyan")),
            cell(_share(progress.placed_bytes, progress.total_bytes) if is_under_way(model) else "-"),
            cell(f"{progress.ranks_ready}/{progress.ranks_total}"),
        )
    return table


def _share(done: int, total: int) -> str:
    return f"{100 * done // total} %" if total else "-"


def _detail(model: ModelStatus) -> Text:
    """Return what is wrong or waited for, and the ranks' nodes until all are ready; empty if nothing is."""
    text = Text()
    if model.error:
        text.append_text(cell(model.error, "red"))
    elif model.progress.message:
        text.append_text(cell(model.progress.message, "yellow"))
    if is_under_way(model) and model.ranks:
        text.append("; " if text else "").append_text(_ranks(model))
    return Text.assemble(cell(f"{_shortened(model.progress.model_id)}: ", "dim"), text) if text else text


def _save(save: SaveProgress) -> Text:
    """Return what a save that runs has done."""
    done = (
        f"{show_bytes(save.done_bytes)} of {show_bytes(save.total_bytes)} ({_share(save.done_bytes, save.total_bytes)})"
    )
    ranks = f"{save.ranks} {'workers' if save.source else 'ranks'}"
    return cell(f"{save.save_id} {save.state}, {done}, {ranks}, to {save.place}", "cyan")


def _shortened(model_id: str, most: int = SHORT_ID) -> str:
    """The beginning of the name, and what makes it unique."""
    return model_id if len(model_id) <= most else f"{model_id[: most - 10]}..{model_id[-8:]}"


def _bar(done: int, total: int, wide: bool) -> RenderableType:
    width = BAR_COLUMNS if wide else BAR_COLUMNS // 2
    return ProgressBar(total=total, completed=done, width=width) if total else Text()


def _ranks(model: ModelStatus) -> Text:
    """`host-a 3 ready 1 loading, host-b 4 ready`."""
    counts: dict[str, Counter[str]] = {}
    for rank in model.ranks:
        counts.setdefault(rank.host or "no node yet", Counter())[rank.state] += 1
    text = Text()
    for host, states in sorted(counts.items()):
        text.append(", " if text else "").append_text(cell(host, "dim"))
        for state, count in states.items():
            text.append(" ").append_text(cell(f"{count} {state}", _RANKS.get(state, "dim")))
    return text


def _nodes(nodes: Iterable[NodeStatus], wide: bool) -> Table:
    more = ("leased >", "quarantined >", "disk >") if wide else ("leased >",)
    table = _table("node", "arena", "used >", *more, "heard >")
    for node in nodes:
        disk = show_bytes(node.disk_used_bytes) if node.disk_budget_bytes else "-"
        counts = (node.leased_slots, node.quarantined_slots or "-", disk)
        table.add_row(
            cell(node.host if wide else node.host[:SHORT_ID]),
            _bar(node.used_bytes, node.arena_bytes, wide),
            cell(f"{show_bytes(node.used_bytes)} of {show_bytes(node.arena_bytes)}"),
            *(cell(count) for count in counts[: len(more)]),
            cell(f"{node.heartbeat_age_s:.1f} s ago", "bold red" if node.heartbeat_age_s > LATE_S else ""),
        )
    return table


def _few_of_nodes(nodes: Iterable[NodeStatus]) -> Table:
    table = _table("node", "arena >", "heard >")
    for node in nodes:
        late = "bold red" if node.heartbeat_age_s > LATE_S else ""
        table.add_row(
            cell(node.host[:SHORTEST_ID]),
            cell(_share(node.used_bytes, node.arena_bytes)),
            cell(f"{node.heartbeat_age_s:.1f} s ago", late),
        )
    return table


def _event(happened: Happened) -> Text:
    """On one line, whatever it says."""
    event = happened.event
    who, what = cell(_shortened(happened.model_id), "dim"), cell(what_of(event), style_of(event))
    return _one_line(Text.assemble((time_of_day(event.at_s), "dim"), " ", who, " ", what))


def _one_line(text: Text) -> Text:
    """Line feeds gone, and cut where the terminal ends."""
    line = Text(" ").join(text.split("\n"))
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _more(count: int, what: str) -> list[Text]:
    return [cell(f"and {count} {what} more", "dim")] if count > 0 else []


def _table(*headers: str) -> Table:
    """A row is a line, however narrow the terminal."""
    table = Table(box=None, pad_edge=False)
    for header in headers:
        right = header.endswith(" >")
        table.add_column(
            header.removesuffix(" >"), justify="right" if right else "left", no_wrap=True, overflow="ellipsis"
        )
    return table


AGAIN_S = 2.0  # a load's line is said again so often while bytes come
TOLD_AFTER_S = 5.0  # a coordinator that is asked for longer than that is told of


class LineWatch:
    """One line per change. `clock` is the wall's, in seconds since the epoch."""

    def __init__(self, say: Callable[[str], bool] = write, clock: Callable[[], float] = time.time) -> None:
        self._say = say
        self._clock = clock
        self._shown: dict[str, tuple[float, str, int]] = {}  # model id -> when, state, bytes
        self._hosts: set[str] | None = None
        self._silent = False

    def show(self, look: Look) -> bool:
        """False when nobody reads any more."""
        self._silent = False
        return self._put([*self._nodes(look), *self._models(look), *self._events(look)])

    def silence(self, silent_s: float) -> bool:
        """No look has come for so long: said once."""
        if silent_s < TOLD_AFTER_S or self._silent:
            return True
        self._silent = True
        return self._put([f"no answer from the coordinator for {silent_s:.0f} s; it may be restarting"])

    def _put(self, lines: list[str]) -> bool:
        at = time_of_day(self._clock())
        return not lines or self._say("".join(f"{at} {printable(line)}\n" for line in lines))

    def _nodes(self, look: Look) -> Iterator[str]:
        hosts = {node.host for node in look.status.nodes}
        if self._hosts is None:
            models, nodes = len(look.status.models), len(hosts)
            yield f"coordinator {look.status.coordinator_incarnation}: {models} models, {nodes} nodes"
        else:
            yield from (f"node {host} joined" for host in sorted(hosts - self._hosts))
            yield from (f"node {host} is gone" for host in sorted(self._hosts - hosts))
        self._hosts = hosts

    def _models(self, look: Look) -> Iterator[str]:
        now_s = self._clock()
        present = {model.progress.model_id for model in look.status.listed}
        yield from (f"{model_id} is not listed any more" for model_id in self._shown if model_id not in present)
        self._shown = {model_id: shown for model_id, shown in self._shown.items() if model_id in present}
        for model in look.status.listed:
            progress = model.progress
            at_s, state, placed_bytes = self._shown.get(progress.model_id, (0.0, "", -1))
            moved = progress.placed_bytes != placed_bytes and now_s - at_s >= AGAIN_S
            if state != progress.state or moved:
                self._shown[progress.model_id] = now_s, progress.state, progress.placed_bytes
                yield line_of_model(model, look.rates)

    def _events(self, look: Look) -> Iterator[str]:
        for happened in look.events:
            if not happened.old and happened.event.kind != "state":  # states are in the lines of the models
                yield f"{happened.model_id} {happened.event.kind}: {what_of(happened.event)}"


class JsonWatch:
    """Prints `longshore status --json`, a line for each look."""

    def __init__(self, say: Callable[[str], bool] = write) -> None:
        self._say = say

    def show(self, look: Look) -> bool:
        """False when nobody reads any more."""
        document: dict[str, Any] = look.status.as_dict()
        document["bytes_per_s"] = dict(look.rates)
        document["events"] = [{"model_id": h.model_id, **h.event.as_dict()} for h in look.events if not h.old]
        return self._say(json.dumps(document, default=str) + "\n")

    def silence(self, silent_s: float) -> bool:
        """Nothing: a line is a look."""
        return True


def line_of_model(model: ModelStatus, rates: Mapping[str, float]) -> str:
    """`llama-1 loading 512 MB of 1.02 GB (50 %), 125 MB/s, 1/4 ranks`."""
    progress = model.progress
    parts = []
    if progress.total_bytes:
        share = 100 * progress.placed_bytes // progress.total_bytes
        parts.append(f"{show_bytes(progress.placed_bytes)} of {show_bytes(progress.total_bytes)} ({share} %)")
    if is_under_way(model) and (rate := rates.get(progress.model_id)):
        parts.append(f"{show_bytes(rate)}/s")
    parts.append(f"{progress.ranks_ready}/{progress.ranks_total} ranks")
    parts += [text for text in (progress.message, model.error) if text]
    return f"{progress.model_id} {progress.state} {', '.join(parts)}"
