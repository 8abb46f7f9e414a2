"""Strikes a running load outside its store, each at a byte of the load or at a second after the call."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

import psutil

from actors.links import COORDINATOR
from tests.chaos.cases import Case, Strike
from tests.chaos.interrupts import check_interrupted
from tests.chaos.proxy import ChaosProxy, CredentialsFile
from tests.support.losable_nodes import LosableNodes

NODES = 2  # beside the head
ATTEND_EVERY_S = 0.1

Answer = TypeVar("Answer")


class Strikes:
    """`struck` counts by name. `give_up`, `ask_refused`: what callers do; `client`, `host`: processes beside us."""

    def __init__(
        self, longshore: LosableNodes, case: Case, proxy: ChaosProxy, size_bytes: int, credentials: CredentialsFile
    ) -> None:
        self.struck: Counter[str] = Counter()
        self.give_up: Callable[[], object] | None = None
        self.ask_refused: Callable[[], object] | None = None
        self.client: subprocess.Popen[str] | None = None
        self.host: subprocess.Popen[str] | None = None
        self._longshore, self._case, self._proxy, self._credentials = longshore, case, proxy, credentials
        self._over, self._node_wanted = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._stopped: list[psutil.Process] = []
        self._threads: list[threading.Thread] = []
        calls: list[tuple[float, Callable[[], object]]] = [
            (strike.at, partial(self._strike, strike)) for strike in case.strikes if strike.at >= 0
        ]
        if case.given_up and case.given_up != "timed out":
            calls.append((case.given_up_at, self._give_up))
        calls += [(at, self._renew) for at in case.renewals]
        if case.host:
            calls.append((case.host_killed_at, self._kill_host))
        if case.refused_at >= 0:
            calls.append((case.refused_at, self._ask_refused))
        for at, call in calls:
            proxy.at_bytes(int(at * size_bytes), call)

    def begin(self) -> None:
        """The calls are made."""
        for strike in self._case.strikes:
            if strike.at < 0:
                self._after(-strike.at, partial(self._strike, strike))

    def end(self) -> None:
        """End the strikes. Stopped processes continue at their time, and lost nodes are replaced."""
        self._over.set()

    def close(self) -> None:
        """Undo the strikes: continue stopped processes and restore the number of nodes."""
        self.end()
        for thread in self._threads:
            thread.join()
        with self._lock:
            for process in self._stopped:
                _wake(process)
        if any(strike.who == "node" for strike in self._case.strikes):
            self._bring_nodes()

    def attend(self, future: Future[Answer], timeout_s: float) -> Answer:
        """Return the future's result and replace lost nodes meanwhile. Raises TimeoutError, or the future's error.

        By the main thread only: Ray starts nodes nowhere else.
        """
        give_up_s = time.monotonic() + timeout_s
        while not wait([future], ATTEND_EVERY_S).done:
            check_interrupted()
            if self._node_wanted.is_set():
                self._node_wanted.clear()
                self._bring_nodes()
            if time.monotonic() > give_up_s:
                raise TimeoutError
        return future.result()

    # -- inside ------------------------------------------------------------------------------------------------

    def _bring_nodes(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        self._longshore.want(NODES)
        signal.signal(signal.SIGTERM, before)  # a node that is started takes it

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()

    def _apart(self, work: Callable[[], object]) -> None:
        """Run slow work in a thread, so that no connection of the proxy waits for it."""
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _strike(self, strike: Strike) -> None:
        if self._over.is_set():
            return
        with self._lock, contextlib.suppress(LookupError, psutil.Error, ValueError):
            if strike.who == "client":
                if self.client is not None and self.client.poll() is None:
                    self.client.kill()
                    self.struck[strike.name] += 1
            elif strike.who == "node":
                self._apart(partial(self._lose_node, strike))
            else:
                self._signal(strike)

    def _signal(self, strike: Strike) -> None:
        prefix = COORDINATOR if strike.who == "coordinator" else f"{strike.who}-"
        pids = [pid for _, pid in sorted(self._longshore.living_pids(prefix).items())]
        if not pids:
            return
        process = psutil.Process(pids[strike.victim % len(pids)])
        self.struck[strike.name] += 1
        if not strike.stopped_s:
            process.kill()
            return
        process.send_signal(signal.SIGSTOP)
        self._stopped.append(process)
        self._after(strike.stopped_s, partial(_wake, process))

    def _lose_node(self, strike: Strike) -> None:
        """One with ranks, where there is one; the head cannot be lost."""
        longshore, busy = self._longshore, set()
        for name in longshore.actor_names("worker-"):
            with contextlib.suppress(LookupError):
                busy.add(longshore.node_of(name))
        candidates = sorted(busy & set(longshore.node_ids)) or sorted(longshore.node_ids)
        self.struck[strike.name] += 1
        longshore.kill_node(candidates[strike.victim % len(candidates)])
        if self._case.replaced:
            self._node_wanted.set()

    def _give_up(self) -> None:
        if not self._over.is_set() and self.give_up is not None:
            self._apart(self.give_up)

    def _ask_refused(self) -> None:
        if not self._over.is_set() and self.ask_refused is not None:
            self.struck["wrong credentials"] += 1
            self._apart(self.ask_refused)

    def _kill_host(self) -> None:
        if not self._over.is_set() and self.host is not None and self.host.poll() is None:
            self.host.kill()
            self.struck[f"host {self._case.host}"] += 1

    def _renew(self) -> None:
        """Write the file first: a refused process finds the new credentials there."""
        if not self._over.is_set():
            self._proxy.require(self._credentials.renew())


def _wake(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):  # (never another process that got its number)
        process.send_signal(signal.SIGCONT)
