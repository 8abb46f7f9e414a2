"""Events of a load as lines of text: `10:31:02.5 state       planning -> loading`. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cluster.units import printable

if TYPE_CHECKING:
    from cluster.reports.event_log import LoadEvent

STYLES = {"rank_lost": "bold red", "moved": "yellow", "rank_replaced": "yellow", "rank_ready": "green"}


def time_of_day(at_s: float) -> str:
    """In this machine's time zone, to a tenth of a second."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s % 1 * 10)}"


def date_and_time(at_s: float) -> str:
    """UTC, as logs have it."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at_s))}.{int(at_s % 1 * 1000):03d}Z"


def what_of(event: LoadEvent) -> str:
    """What happened, and to whom; one line whatever is in the message."""
    who = "" if event.rank is None else f"rank {event.rank}{f' on {event.host}' if event.host else ''}: "
    return printable(f"{who}{event.message}").replace("\n", "\\n")


def style_of(event: LoadEvent) -> str:
    """For a terminal; empty: as any other text."""
    return "bold red" if event.details.get("state") == "failed" else STYLES.get(event.kind, "")


def line_of_event(event: LoadEvent) -> str:
    """With its number, to go on from (`--after`)."""
    return f"{date_and_time(event.at_s)} {event.number:>5} {printable(event.kind):<13} {what_of(event)}"
