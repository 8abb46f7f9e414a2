"""Limits of a caller's wait for the cluster: its deadline, its task's cancellation, SIGTERM, or a lost head.

`HeadWatch` checks if the head of the Ray cluster can be reached. Ray ends a process that has not reached the head for
`RAY_gcs_rpc_server_reconnect_timeout_s`, without notifying its Python code. So a client checks the head itself, from
its first moment on, and raises ClusterLost before that.

`check_ray_address` checks an address before Ray uses it. `ray.init` waits many minutes for a dead address, in C++,
where Ctrl-C has no effect.

`in_thread` runs what nobody can interrupt in a thread, which its caller need not outlive.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from cluster.errors import ClusterLost, ConfigError, LoadCancelled, LoadTimeout

LOOK_S = 1.0  # between checks of a cancellation that cannot wake the waiting thread


T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Return the future result of `work`, which runs in a thread of that name. The end of the process does not wait."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Patience:
    """One deadline for all steps of a user's call. Without arguments there is none."""

    def __init__(
        self,
        deadline_s: float | None = None,
        cancelled: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline_s` is a time of `clock`. `cancelled` is set when the caller's task is cancelled."""
        self._deadline_s = deadline_s
        self._cancelled = cancelled
        self._clock = clock

    def left_s(self, most_s: float) -> float:
        """Return the seconds until the deadline, at least 0 and at most `most_s`."""
        return most_s if self._deadline_s is None else max(0.0, min(most_s, self._deadline_s - self._clock()))

    def check(self) -> None:
        """Raise LoadCancelled or LoadTimeout if the caller no longer waits."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise LoadCancelled("the caller's task was cancelled")
        if self._deadline_s is not None and self._clock() >= self._deadline_s:
            raise LoadTimeout(
                "the load did not end in time",
                hint="it goes on only when the model is kept or another client waits for it",
            )

    def sleep(self, seconds: float) -> None:
        """Wait this long, but not longer than the caller waits. Raises as `check` does."""
        until_s = self._clock() + seconds
        while (left_s := until_s - self._clock()) > 0:
            self.check()
            time.sleep(self.left_s(min(left_s, LOOK_S)))
        self.check()

    @contextmanager
    def holding(self, lock: threading.Lock) -> Iterator[None]:
        """Hold the lock inside the block. Raises as `check` does while it waits for the lock."""
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


class Terminated(KeyboardInterrupt):
    """An interrupt by SIGTERM."""


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise Terminated in the main thread at a SIGTERM inside the block. An ignored SIGTERM stays ignored.

    While this process joins a Ray cluster, Ray's own handler raises SystemExit with the signal's number. That becomes
    Terminated too (see `sigterm_kept`). So does the KeyboardInterrupt into which Ray turns the exception of any handler
    while one of its own calls waits (`check_status` in its `_raylet.pyx`).
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
            signal.alarm(0)  # Ray's handler aborts the process three seconds later; releasing the holds takes longer
            raise Terminated from exit_
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM after the block, because `ray.init` replaces it.

    Ray's own handler, in C++, prints a stack trace and aborts the process three seconds after the signal, whatever the
    Python handler is doing. It stays if the process had no handler.
    """
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        wanted = previous is not None and previous is not signal.SIG_DFL
        if wanted and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)


CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
# The preface of HTTP/2 with empty settings, as gRPC sends it.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
DEFAULT_PORT = 6379
NAMES = ("auto", "local")  # Ray's own words for "what runs here" and "a new one"


def check_ray_address(address: str | None, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Check that `address` is None, one of Ray's own words, or HOST:PORT that accepts a connection.

    Raises ConfigError for other addresses, and ClusterLost when nothing answers there within `timeout_s`.
    """
    if not address or address in NAMES:
        return
    if "://" in address:
        raise ConfigError(
            "only HOST:PORT can be joined; ray:// is Ray Client's and http:// is the dashboard's",
            hint="run on a node of the cluster, or submit it: ray job submit -- longshore load ...",
            address=address,
        )
    with _connected(address, timeout_s):
        pass


def check_head(address: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Check that a process answers at HOST:PORT. A stopped process accepts connections, but sends nothing.

    Raises ConfigError, ClusterLost.
    """
    check_ray_address(address)
    with _connected(address, timeout_s) as connection:
        try:
            connection.sendall(GREETING)
            connection.recv(1)
        except TimeoutError as error:
            raise ClusterLost(
                "the head of the Ray cluster takes connections and answers nothing",
                hint="is the process stopped, or its machine overloaded?",
                address=address,
                waited_s=timeout_s,
            ) from error
        except OSError:
            pass  # the other side closed the connection


def _connected(address: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("not HOST:PORT", hint=f"Ray's port is {DEFAULT_PORT} by default", address=address)
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except OSError as error:
        raise ClusterLost(
            "no Ray cluster answers at the address",
            hint="is the head node up, and is this the port of its `ray start --port`?",
            address=address,
            cause=str(error),
        ) from error


RAY_LIMIT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_LIMIT_S = 60.0  # Ray's default
SHARE_OF_RAYS_LIMIT = 0.75
SHORTEST_LOOK_S, LONGEST_LOOK_S = 1.0, 5.0  # between two checks
LOOK_TIMEOUT_S = 1.0
LOOK_AGAIN_S = 0.5  # between checks by a caller that waits for the head


def lost_after_s(setting_s: float) -> float:
    """Return how long the head may be away: the setting, or if it is 0 a share of Ray's own limit."""
    if setting_s:
        return setting_s
    try:
        limit_s = float(os.environ.get(RAY_LIMIT_VARIABLE, RAY_LIMIT_S))
    except ValueError:
        limit_s = RAY_LIMIT_S
    return SHARE_OF_RAYS_LIMIT * max(1.0, limit_s)


class HeadWatch:
    """A watch on the head, which checks it regularly in a thread of its own until `close`. Thread-safe."""

    def __init__(self, address: str, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the watch. A head that is away for longer than `patience_s` is lost."""
        self._address = address
        self._patience_s = patience_s
        self._clock = clock
        self._away_since_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="longshore-watch", daemon=True)
        self._thread.start()

    def is_there(self) -> bool:
        """Check the head now."""
        looked_s = self._clock()
        try:
            check_ray_address(self._address, timeout_s=LOOK_TIMEOUT_S)
        except ClusterLost:
            if self._away_since_s is None:
                self._away_since_s = looked_s
            return False
        self._away_since_s = None
        return True

    def check(self) -> bool:
        """Check now and return False while the head is away. Raises ClusterLost when it is away for too long."""
        if self.is_there():
            return True
        now_s = self._clock()
        away_s = now_s - (now_s if self._away_since_s is None else self._away_since_s)
        if away_s <= self._patience_s:
            return False
        raise ClusterLost(
            "the head of the Ray cluster is gone and did not come back",
            hint="only with Ray's GCS fault tolerance does a head come back with its models; "
            "LONGSHORE_CLUSTER_LOST_AFTER_S says how long clients wait. Ray itself soon ends this process",
            address=self._address,
            away_s=round(away_s, 1),
        )

    def wait(self, patience: Patience = UNLIMITED) -> None:
        """Wait until the head answers. Raises ClusterLost when it does not, and as `Patience.check` does."""
        while not self.check():
            patience.sleep(LOOK_AGAIN_S)

    def close(self) -> None:
        """Stop watching the head."""
        self._closed.set()

    def _look_on(self) -> None:
        while not self._closed.wait(min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, self._patience_s / 4))):
            self.is_there()
