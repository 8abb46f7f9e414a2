"""Logging of the cluster's actors: lines of text or of JSON, with load, attempt, rank and chunk as fields.

    _LOG.warning("...", extra=LogFields(load="llama-1", rank=3).extra)

    2026-11-22T09:30:15.123Z WARNING longshore.rank load=llama-1 rank=3: ...
    {"time": "2026-11-22T09:30:15.123Z", "level": "WARNING", "logger": "longshore.rank", "load": "llama-1", ...}

Only processes of ours are set up (`configure_logs`); in a user's process the loggers are as he has them. Whoever logs
leaves secrets out; what looks like one all the same is taken out of the line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from cluster.units import printable
from storage.problems import without_secrets

if TYPE_CHECKING:
    from cluster.telemetry.chunk_map import LoadEvent

LogFormat = Literal["text", "json"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LogSettings = tuple[str, str]  # format, level; empty ones: as it is

ROOT = "longshore"
FIELDS = ("load", "attempt", "rank", "chunk", "node", "cause", "event")
_LEVELS = {
    "rank_lost": logging.WARNING,
    "moved": logging.WARNING,
    "peer_left_out": logging.WARNING,
    "rank_ready": logging.DEBUG,
    "sources": logging.DEBUG,
}


@dataclass(frozen=True, slots=True)
class LogFields:
    """The load, attempt, rank and chunk of a log line; None where it has none."""

    load: str | None = None
    attempt: int | None = None
    rank: int | None = None
    chunk: int | None = None
    node: str | None = None
    cause: str | None = None
    event: str | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """For `logging`'s argument of that name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def configure_logs(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Every line of ours goes to `stream` (stderr when None), so. Called again, the last word counts."""
    form, level = settings
    if not form:
        return
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.set_name(ROOT)
    root = logging.getLogger(ROOT)
    for old in [old for old in root.handlers if old.get_name() == ROOT]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)


def log_events(logger: logging.Logger, load_id: str, attempt: int | None, events: Iterable[LoadEvent]) -> None:
    """Log the events of a load, or of a save (`attempt` is None), one line each."""
    for event in events:
        level = _LEVELS.get(event.kind, logging.INFO)
        if event.details.get("state") == "failed":
            level = logging.ERROR
        fields = LogFields(load_id, attempt, event.rank, node=event.host or None, event=event.kind)
        logger.log(level, "%s", event.message, extra=fields.extra)


class RepeatedWork:
    """Work that a thread or task does for ever: what a turn of it raises is logged, and the next turn comes.

    The same error is logged once, until a turn ends well.
    """

    def __init__(self, logger: logging.Logger, about: LogFields | None = None) -> None:
        self._logger = logger
        self._extra = (about or LogFields()).extra
        self._logged: dict[str, str] = {}  # what -> its last error

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """One turn, inside the block. `what` names the work in the log."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self._logged.get(what) != text:
                self._logged[what] = text
                self._logger.exception("%s failed, and is done again", what, extra=self._extra)
        else:
            self._logged.pop(what, None)


class TextFormatter(logging.Formatter):
    """A line of text; what is in a message cannot make it two."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_word(value)}" for name, value in _fields(record))
        text = printable(_message(record)).replace("\n", "\\n")
        return f"{_time(record)} {record.levelname} {record.name}{fields}: {text}"


class JsonFormatter(logging.Formatter):
    """A line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"time": _time(record), "level": record.levelname, "logger": record.name}
        fields |= dict(_fields(record))
        fields |= {"pid": os.getpid(), "message": _message(record)}
        return json.dumps(fields, default=str)


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception as error:  # arguments that do not fit: logging would print what is no line of ours
        text = f"{record.msg} ({len(record.args or ())} arguments that cannot be shown: {type(error).__name__})"
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    return without_secrets(text)


def _fields(record: logging.LogRecord) -> list[tuple[str, Any]]:
    found = ((name, getattr(record, name, None)) for name in FIELDS)
    return [
        (name, without_secrets(value) if isinstance(value, str) else value)
        for name, value in found
        if value is not None
    ]


def _word(value: object) -> str:
    text = printable(value)
    return json.dumps(text) if re.search(r"[\s\"=]", text) or not text else text


def _time(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
