"""GET requests whose answers go straight into the caller's memory: the hot path of every load.

    open_socket --> send_get --> receive: recv into piece after piece --> IdleConnections, for the next request

A plain socket waits for a whole piece at once (`MSG_WAITALL`). That needs one system call and one release of the GIL
per piece instead of one per packet. The kernel's own timer (`SO_RCVTIMEO`) ends the wait for a server that stalls.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from storage.errors import ShortRead, StoreUnavailable
from storage.stores.requests import ReadLimit

MAX_IDLE_S = 15.0  # servers and NATs drop idle connections silently, S3 after some 20 s
_RECEIVE_BUFFER_BYTES = 4 << 20
SLOWEST_BYTES_PER_S = 64 << 10  # a body with a lower average rate counts as stuck


def set_timer(sock: socket.socket, option: int, timeout_s: float) -> None:
    """Limit every blocking call on the socket: receives with SO_RCVTIMEO, sends with SO_SNDTIMEO.

    Python's own timeouts would make the socket non-blocking.
    """
    whole_s = int(timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6)))


def open_socket(
    host: str, port: int, limit: ReadLimit, *, connect_timeout_s: float, read_timeout_s: float, buffer_bytes: int
) -> socket.socket:
    """Return a connected socket, which has the connect timeout. `limit` can end it from now on. Raises OSError.

    `buffer_bytes`: as `usable_receive_buffer_bytes` returned it.
    """
    sock = socket.create_connection((host, port), timeout=connect_timeout_s)
    try:
        limit.attach(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        set_timer(sock, socket.SO_RCVTIMEO, read_timeout_s)
    except BaseException:
        limit.detach()
        sock.close()
        raise
    return sock


def use_socket(connection: http.client.HTTPConnection, sock: socket.socket) -> None:
    """Let the connection use this socket and no other.

    Otherwise http.client would open a second one, without our settings, after the server has closed this one.
    """
    connection.sock = sock
    connection.auto_open = 0


def send_get(
    connection: http.client.HTTPConnection, path: str, headers: Mapping[str, str], limit: ReadLimit
) -> tuple[socket.socket, http.client.HTTPResponse]:
    """Send the request and read the head of the answer. The connection is closed on every error.

    The socket is returned too, because an answer that ends with the connection takes it over.
    """
    sock: socket.socket = connection.sock
    try:
        limit.attach(sock)
        connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        return sock, connection.getresponse()
    except BaseException:
        limit.detach()
        connection.close()
        raise


class Closable(Protocol):
    """Anything with `close`."""

    def close(self) -> object: ...


C = TypeVar("C", bound=Closable)


class IdleConnections(Generic[C]):
    """Connections that wait for their next request, by where they lead. Thread-safe."""

    def __init__(self, most: int) -> None:
        """`most`: connections kept to one place."""
        self.closed = False
        self._most = most
        self._lock = threading.Lock()
        self._idle: defaultdict[Hashable, list[tuple[C, float]]] = defaultdict(list)  # each with when it was given back

    def __len__(self) -> int:
        """Number of connections that wait."""
        with self._lock:
            return sum(map(len, self._idle.values()))

    def take(self, place: Hashable = None) -> C | None:
        """Return the connection to the place that was used last. Those that waited too long are closed."""
        now_s = time.monotonic()
        stale: list[C] = []
        found = None
        with self._lock:
            idle = self._idle[place]
            while idle and found is None:
                connection, since_s = idle.pop()
                if now_s - since_s > MAX_IDLE_S:
                    stale.append(connection)
                else:
                    found = connection
        for connection in stale:
            connection.close()
        return found

    def give_back(self, connection: C, place: Hashable = None) -> None:
        """Keep the connection for the next request, or close it if there are enough."""
        with self._lock:
            idle = self._idle[place]
            if not self.closed and len(idle) < self._most:
                idle.append((connection, time.monotonic()))
                return
        connection.close()

    def close(self) -> None:
        """Close all. Those in use are closed when they are given back. Idempotent."""
        with self._lock:
            self.closed = True
            idle = [connection for each in self._idle.values() for connection, _ in each]
            self._idle.clear()
        for connection in idle:
            connection.close()


@dataclass(slots=True)
class Received:
    """The number of bytes of a body received so far, also after an error."""

    bytes: int = 0


def receive(
    sock: socket.socket,
    response: http.client.HTTPResponse,
    pieces: Iterable[memoryview],
    timeout_s: float,
    received: Received,
    where: dict[str, Any],
    *,
    is_slow: Callable[[int, float], bool] = lambda received_bytes, took_s: False,
) -> None:
    """Fill the pieces in order from the body, whose length was checked to be theirs.

    `sock` is the socket of the answer. Reading ends if the body is slower than SLOWEST_BYTES_PER_S after `timeout_s`,
    or if it `is_slow`: called with the bytes that have come and the seconds that they took, while more are to come.
    Raises ShortRead, StoreUnavailable for a body that is too slow, TimeoutError for one that stalls, and OSError.
    `received` is correct after each of them.
    """
    body = response.fp
    plain = not isinstance(sock, ssl.SSLSocket)
    started_s, before_bytes = time.monotonic(), received.bytes
    ahead = len(body.peek())  # bytes of the body that were buffered with the head come first
    if plain:
        sock.settimeout(None)
    for piece in pieces:
        rest = piece
        while rest:
            took_s, came_bytes = time.monotonic() - started_s, received.bytes - before_bytes
            stuck = took_s > timeout_s and came_bytes < took_s * SLOWEST_BYTES_PER_S
            if stuck or is_slow(came_bytes, took_s):
                raise StoreUnavailable(
                    "the answer comes too slowly", cause="TimeoutError", received_bytes=received.bytes, **where
                )
            if ahead:
                count = body.readinto1(rest[:ahead])
                ahead -= count
            else:
                # Without a length, SSLSocket would make a view of its own, for every record of 16 KiB.
                count = _receive_all(sock, rest) if plain else sock.recv_into(rest, len(rest))
            if not count:
                raise ShortRead("the answer ended early", received_bytes=received.bytes, **where)
            received.bytes += count
            rest = rest[count:]
    if plain:
        sock.settimeout(timeout_s)
    # Tells http.client that the body has ended. Without it the connection would refuse the next request.
    response.close()


def _receive_all(sock: socket.socket, buffer: memoryview) -> int:
    """Return how many bytes were received: all of `buffer` unless the stream ended or the timer ran out."""
    try:
        return sock.recv_into(buffer, 0, socket.MSG_WAITALL)
    except BlockingIOError:  # the kernel's timer ran out before the first byte
        raise TimeoutError("timed out") from None


def usable_receive_buffer_bytes() -> int:
    """Return the value for SO_RCVBUF, or 0 to keep the kernel's own tuning.

    Setting SO_RCVBUF turns the tuning off, and the kernel silently limits the value to `rmem_max`. The usual limit of
    208 KiB would slow down every connection with some latency.
    """
    try:
        limit = int(Path("/proc/sys/net/core/rmem_max").read_text())
    except (OSError, ValueError):
        return 0
    return _RECEIVE_BUFFER_BYTES if limit >= _RECEIVE_BUFFER_BYTES else 0
