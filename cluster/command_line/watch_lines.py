"""`longshore status --watch` where no terminal is: a line for each thing that changed; or a JSON document per look."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cluster.command_line.answers import write
from cluster.command_line.event_lines import time_of_day, what_of
from cluster.command_line.looks import Look, is_under_way
from cluster.reports.report import ModelStatus
from cluster.units import printable, show_bytes

AGAIN_S = 2.0  # a load's line is said again so often while bytes come
SILENT_S = 5.0  # a coordinator that is asked for longer than that is told of


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
        if silent_s < SILENT_S or self._silent:
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
