"""Whether the head of the Ray cluster can be reached, and since when it cannot.

Ray ends a process that has not reached the head for `RAY_gcs_rpc_server_reconnect_timeout_s`, without a word to the
code that runs in it. So a client looks for itself, from its first moment on, and says ClusterLost before that.

Whether a Ray address can be joined, asked before Ray is.

`ray.init` waits many minutes for a dead address, in C++, where no Ctrl-C is heard.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from cluster.errors import ClusterLost, ConfigError
from cluster.joining.patience import UNLIMITED, Patience

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # of HTTP/2, and empty settings: gRPC's
DEFAULT_PORT = 6379
NAMES = ("auto", "local")  # Ray's own words for "what runs here" and "a new one"


def check_ray_address(address: str | None, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Pass when `address` is None, one of Ray's own words, or HOST:PORT that takes a connection.

    Raises ConfigError for what is no such address, ClusterLost when nothing answers there within `timeout_s`.
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
    """Pass when a process answers at HOST:PORT, whatever it says. One that is stopped takes connections, and is silent.

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
            pass  # somebody closed the connection


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
SHORTEST_LOOK_S, LONGEST_LOOK_S = 1.0, 5.0  # between two looks
LOOK_TIMEOUT_S = 1.0
LOOK_AGAIN_S = 0.5  # by somebody who waits for it


def lost_after_s(setting_s: float) -> float:
    """How long the head may be away: the setting, or when it is 0 a share of the time that Ray itself waits."""
    if setting_s:
        return setting_s
    try:
        limit_s = float(os.environ.get(RAY_LIMIT_VARIABLE, RAY_LIMIT_S))
    except ValueError:
        limit_s = RAY_LIMIT_S
    return SHARE_OF_RAYS_LIMIT * max(1.0, limit_s)


class HeadWatch:
    """Looks now and then, in a thread of its own, until `close`. Thread-safe."""

    def __init__(self, address: str, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`patience_s`: away for longer, the head is lost."""
        self._address = address
        self._patience_s = patience_s
        self._clock = clock
        self._away_since_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="longshore-watch", daemon=True)
        self._thread.start()

    def is_there(self) -> bool:
        """Look now."""
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
        """Look now; False while the head is away. Raises ClusterLost when it has been for too long."""
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
        """Returns when the head is there. Raises ClusterLost when it does not come, and as `Patience.check` does."""
        while not self.check():
            patience.sleep(LOOK_AGAIN_S)

    def close(self) -> None:
        self._closed.set()

    def _look_on(self) -> None:
        while not self._closed.wait(min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, self._patience_s / 4))):
            self.is_there()
