"""How long a caller waits for the cluster: until its own deadline, or until its task is cancelled."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import ConfigError, LoadCancelled, LoadTimeout

LOOK_S = 1.0  # between two looks at a cancellation that cannot wake whoever waits


class Patience:
    """One deadline for everything that a call of the user's does. Without arguments it never ends."""

    def __init__(
        self,
        deadline_s: float | None = None,
        cancelled: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s`: on the clock, by default the monotonic one. `cancelled`: set when the caller's task is."""
        self._deadline_s = deadline_s
        self._cancelled = cancelled
        self._clock = clock

    def left_s(self, most_s: float) -> float:
        """Return the seconds until the deadline, at least 0 and at most `most_s`."""
        return most_s if self._deadline_s is None else max(0.0, min(most_s, self._deadline_s - self._clock()))

    def check(self) -> None:
        """Return while the caller still waits. Raises LoadCancelled, LoadTimeout."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise LoadCancelled("the caller's task was cancelled")
        if self._deadline_s is not None and self._clock() >= self._deadline_s:
            raise LoadTimeout(
                "the load did not end in time",
                hint="it goes on only when the model is kept or another client waits for it",
            )

    def sleep(self, seconds: float) -> None:
        """Wait that long. Raises as `check` does, without waiting longer than the caller wants to."""
        until_s = self._clock() + seconds
        while (left_s := until_s - self._clock()) > 0:
            self.check()
            time.sleep(self.left_s(min(left_s, LOOK_S)))
        self.check()

    @contextmanager
    def holding(self, lock: threading.Lock) -> Iterator[None]:
        """Hold the lock inside the block. Raises as `check` does while somebody else has it."""
        while not lock.acquire(timeout=self.left_s(LOOK_S)):
            self.check()
        try:
            yield
        finally:
            lock.release()


UNLIMITED = Patience()


def checked_timeout(timeout_s: float | None) -> float | None:
    """Return a timeout that a caller gave. Raises ConfigError unless it is None or a number of seconds above 0."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s is a number of seconds above 0, or None, not {timeout_s!r:.40}")
    return float(timeout_s)
