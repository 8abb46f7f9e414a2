"""Receives the body of an HTTP answer straight into the caller's memory: the hot path of every load.

A plain socket waits for a whole piece at once (`MSG_WAITALL`). That needs one system call and one release of the GIL
per piece instead of one per packet. The kernel's own timer (`SO_RCVTIMEO`) ends the wait for a server that stalls.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.errors import ShortRead, StoreUnavailable

_RECEIVE_BUFFER_BYTES = 4 << 20
_MIN_RATE_BYTES_PER_S = 64 << 10  # a body with a lower average rate counts as stuck


def set_receive_timer(sock: socket.socket, timeout_s: float) -> None:
    """Limit every blocking receive on the socket. Python's own timeouts would make the socket non-blocking."""
    whole_s = int(timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6)))


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
) -> None:
    """Fill the pieces in order from the body, whose length was checked to be theirs.

    `sock` is the socket of the answer. Raises ShortRead, StoreUnavailable for a body that is too slow, TimeoutError for
    one that stalls, and OSError. `received` is correct after each of them.
    """
    body = response.fp
    plain = not isinstance(sock, ssl.SSLSocket)
    started_s = time.monotonic()
    ahead = len(body.peek())  # bytes of the body that were buffered with the head come first
    if plain:
        sock.settimeout(None)
    for piece in pieces:
        rest = piece
        while rest:
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
            took_s = time.monotonic() - started_s
            if took_s > timeout_s and received.bytes < took_s * _MIN_RATE_BYTES_PER_S:
                raise StoreUnavailable(
                    "the answer comes too slowly", cause="TimeoutError", received_bytes=received.bytes, **where
                )
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
