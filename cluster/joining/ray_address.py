"""Whether a Ray address can be joined, asked before Ray is.

`ray.init` waits many minutes for a dead address, in C++, where no Ctrl-C is heard.
"""

from __future__ import annotations

import socket

from cluster.errors import ClusterLost, ConfigError

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
