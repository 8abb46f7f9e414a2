"""`longshore status --watch` on a terminal: models with bars and rates, ranks by node, nodes, the last events."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster.command_line.answers import style_of, time_of_day, what_of, write
from cluster.command_line.looks import Happened, Look, is_under_way
from cluster.command_line.tables import cell
from cluster.telemetry.report import ModelStatus, NodeStatus
from cluster.units import printable, show_bytes

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
    details = [_one_line(detail) for model in models if (detail := _detail(model))][: max(1, room // 3)]
    models = models[: max(2, room - len(nodes) - len(details))]
    left = max(LEAST_EVENTS, lines - 9 - len(models) - len(nodes) - len(details))
    parts: list[RenderableType] = [_one_line(head), Text()]
    if status.listed:
        table = _few_of_models(models) if narrow else _models(models, look.rates, wide)
        parts += [table, *_more(len(status.listed) - len(models), "models"), *details]
    else:
        parts.append(cell("no models are loaded", "dim"))
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
    """What is wrong or waited for, and where its ranks are while they are not all ready; empty: nothing to say."""
    said = Text()
    if model.error:
        said.append_text(cell(model.error, "red"))
    elif model.progress.message:
        said.append_text(cell(model.progress.message, "yellow"))
    if is_under_way(model) and model.ranks:
        said.append("; " if said else "").append_text(_ranks(model))
    return Text.assemble(cell(f"{_shortened(model.progress.model_id)}: ", "dim"), said) if said else said


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
    """What `longshore status --json` prints, a line for each look."""

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
