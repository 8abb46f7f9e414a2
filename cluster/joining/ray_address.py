"""Whether a Ray address can be joined, asked before Ray is: `ray.init` waits many minutes for a dead one."""

from __future__ import annotations

import socket

from cluster.errors import ClusterLost, ConfigError

CONNECT_TIMEOUT_S = 5.0
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
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("not HOST:PORT", hint=f"Ray's port is {DEFAULT_PORT} by default", address=address)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise ClusterLost(
            "no Ray cluster answers at the address",
            hint="is the head node up, and is this the port of its `ray start --port`?",
            address=address,
            cause=str(error),
        ) from error
