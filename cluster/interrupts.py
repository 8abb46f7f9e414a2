"""SIGTERM ends a command as Ctrl-C does: in order, with what it holds given back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises Terminated inside, in the main thread; one that is ignored stays ignored.

    Ray puts a handler of its own in place once this process has joined a cluster, which raises SystemExit with the
    signal's number: that comes out as Terminated too.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or previous is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except SystemExit as exit_:
        if exit_.code == signal.SIGTERM:
            raise Terminated from exit_
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
