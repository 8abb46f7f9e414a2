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

    While this process joins a Ray cluster, a handler of Ray's is in place, which raises SystemExit with the signal's
    number: that comes out as Terminated too. See `sigterm_kept`. So does the KeyboardInterrupt that Ray makes of
    whatever a handler raises while one of its own calls waits (`check_status` in its `_raylet.pyx`).
    """
    came = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise Terminated

    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or previous is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if came and not isinstance(interrupt, Terminated):
            raise Terminated from interrupt
        raise
    except SystemExit as exit_:
        if exit_.code == signal.SIGTERM:
            signal.alarm(0)  # Ray's handler aborts the process three seconds later; what is held needs longer to end
            raise Terminated from exit_
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """What handled SIGTERM before the block handles it after it: for `ray.init`, which replaces the handler.

    Ray's own, in C++, prints a stack trace and aborts the process three seconds after the signal, however far the
    Python handler has come by then. It stays where the process had none.
    """
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        wanted = previous is not None and previous is not signal.SIG_DFL
        if wanted and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)
