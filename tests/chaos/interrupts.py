"""SIGINT and SIGTERM end a run only where it waits, so that everything is taken down cleanly."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(BaseException):
    """A signal asks for the end; its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_heard: list[int] = []


def listen() -> None:
    """Take the signals. Again after Ray was started, which takes them for itself."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)


def check_interrupted() -> None:
    """Raises Interrupted when there was a signal; once, so that what takes all down is not cut short."""
    if _heard:
        number = _heard[0]
        _heard.clear()
        raise Interrupted(number)


def _note(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
