"""The body of an HTTP answer, from its socket straight into the caller's memory.

A plain socket is told to wait for a whole piece at once (`MSG_WAITALL`): one system call and one release of the GIL for
each piece instead of one for each packet. The kernel's own timer (`SO_RCVTIMEO`) ends the wait of a server that stalls.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from storage.errors import ShortRead, StoreUnavailable

_MIN_RATE_BYTES_PER_S = 64 << 10  # a body slower than this on average is a stuck one


def set_receive_timer(sock: socket.socket, timeout_s: float) -> None:
    """Bound every blocking receive on the socket. Python's own timeouts, which make it non-blocking, go past it."""
    whole_s = int(timeout_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6)))


@dataclass(slots=True)
class Received:
    """How far a body has come, also when it breaks off."""

    bytes: int = 0


def receive(
    sock: socket.socket,
    response: http.client.HTTPResponse,
    pieces: Iterable[memoryview],
    timeout_s: float,
    received: Received,
    where: dict[str, Any],
) -> None:
    """Fill the pieces, one after the other, from the body, whose length was checked to be theirs.

    `sock` is what the answer comes through. Raises ShortRead, StoreUnavailable for a body that drips, TimeoutError for
    one that stalls; OSError. `received` is right after each of them.
    """
    body = response.fp
    plain = not isinstance(sock, ssl.SSLSocket)
    started_s = time.monotonic()
    ahead = len(body.peek())  # what the reader of the head has taken in beyond it comes first
    if plain:
        sock.settimeout(None)
    for piece in pieces:
        rest = piece
        while rest:
            if ahead:
                count = body.readinto1(rest[:ahead])
                ahead -= count
            else:
                count = _receive_all(sock, rest) if plain else sock.recv_into(rest)
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
    # Tells http.client that the body is over; without it the connection would refuse the next request.
    response.close()


def _receive_all(sock: socket.socket, buffer: memoryview) -> int:
    """Bytes received: all of `buffer` unless the stream ended or the timer ran out."""
    try:
        return sock.recv_into(buffer, 0, socket.MSG_WAITALL)
    except BlockingIOError:  # how the kernel says that the timer ran out before the first byte
        raise TimeoutError("timed out") from None
