"""Signals to processes of a running load."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial

import psutil

from actors.names import COORDINATOR
from tests.chaos.cases import Strike
from tests.support.fault_proxy import FaultProxy
from tests.support.ray_clusters import Longshore


class Strikes:
    """Signals to processes, each at its byte of the load or its second after the call."""

    def __init__(self, longshore: Longshore, strikes: Sequence[Strike], proxy: FaultProxy, size_bytes: int) -> None:
        self.count = 0
        self._longshore = longshore
        self._strikes = strikes
        self._over = threading.Event()
        self._lock = threading.Lock()
        for strike in strikes:
            if strike.at >= 0:
                proxy.at_bytes(int(strike.at * size_bytes), partial(self._strike, strike))

    def begin(self) -> None:
        """The calls are made."""
        for strike in self._strikes:
            if strike.at < 0:
                self._after(-strike.at, partial(self._strike, strike))

    def end(self) -> None:
        """No more strikes; those who were stopped are woken at their time."""
        self._over.set()

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()

    def _strike(self, strike: Strike) -> None:
        if self._over.is_set():
            return
        with self._lock, contextlib.suppress(LookupError, psutil.Error, ValueError):
            prefix = COORDINATOR if strike.who == "coordinator" else f"{strike.who}-"
            names = self._longshore.actor_names(prefix)
            if not names:
                return
            process = psutil.Process(self._longshore.pid(names[strike.victim % len(names)]))
            self.count += 1
            if not strike.stopped_s:
                process.kill()
                return
            process.send_signal(signal.SIGSTOP)
            self._after(strike.stopped_s, partial(_wake, process))


def _wake(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):  # (never another process that got its number)
        process.send_signal(signal.SIGCONT)
