"""Handles of saves in the background, of which a process has one at a time.

asave --start--> SaveHandle: a thread --> report or error
the next save, or the end of the process --> waits, and logs an error that nobody has asked for
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  its hook for the end of the process must be there before ours
import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.errors import CallTimeout

if TYPE_CHECKING:
    from actors.saving.save import SaveReport

_LOG = logging.getLogger("longshore.save")
_lock = threading.Lock()
_last: SaveHandle | None = None


class SaveHandle:
    """A save in the background. Thread-safe."""

    def __init__(self, uri: str, work: Callable[[], SaveReport]) -> None:
        """Made by `asave`."""
        self.uri = uri
        self._work = work
        self._reports: list[SaveReport] = []
        self._error: BaseException | None = None
        self._is_known = False  # the caller, or the log, has the error
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait for the save and return its report.

        Args:
            timeout_s: Longest time in seconds to wait. None: until the save ends. The save goes on after it.

        Returns:
            What was written.

        Raises:
            CallTimeout: The save has not ended by then.
            SaveError: The save failed, as `save` says it.
            StoreError: The store cannot be written.
        """
        if not self._ended.wait(timeout_s):
            raise CallTimeout(f"the save has not ended after {timeout_s} s", uri=self.uri)
        self._is_known = True
        if self._error is not None:
            raise self._error
        return self._reports[0]

    def __repr__(self) -> str:
        """Return the URI and what became of the save."""
        state = "running" if not self.done() else "failed" if self._error is not None else "saved"
        return f"<SaveHandle {self.uri}: {state}>"

    def _run(self) -> None:
        try:
            self._reports.append(self._work())
        except BaseException as error:
            _clear_frames(error)
            self._error = error
        finally:
            del self._work  # and the copy with it
            self._ended.set()

    def report_error(self) -> None:
        """Log the error if nobody has asked for it."""
        if self._error is not None and not self._is_known:
            self._is_known = True
            _LOG.error("the save in the background to %s failed: %s", self.uri, self._error, exc_info=self._error)

    def wait(self) -> None:
        """Wait until the save has ended, unless it is this thread that runs it, and log an error nobody asked for."""
        if threading.current_thread() is not self._thread:
            self._ended.wait()
            self.report_error()


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables in the tracebacks of an error, which hold the copy. Lines and messages stay."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def start_save(uri: str, work: Callable[[], SaveReport]) -> SaveHandle:
    """Run a save in a thread of its own. The caller has waited for the one before."""
    global _last
    with _lock:
        _last = SaveHandle(uri, work)
        return _last


def wait_for_background_saves() -> None:
    """Wait until no save runs in the background, and log the error of the last one if nobody has asked for it."""
    with _lock:
        last = _last
    if last is not None:
        last.wait()


def _at_exit() -> None:
    """Wait for the last save before the interpreter's threads end, and report its error."""
    with _lock:
        last = _last
    if last is None:
        return
    if not last.done():
        began_s = time.monotonic()
        last.wait()
        _LOG.info("waited %.1f s for the save to %s", time.monotonic() - began_s, last.uri)
    last.report_error()


# Executors accept no more work when `atexit` runs, so the wait comes before they end, where Python has a hook for that.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
