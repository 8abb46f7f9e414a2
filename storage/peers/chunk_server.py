"""Serves chunks to other nodes, out of the arena and without a copy in this process.

    GET /chunks/<load>/<chunk>     Range: bytes=0-8388607     Authorization: Longshore <proof>
        --> 206, and the bytes by sendfile; the chunk's slot stays held until the receiver sends an empty line
        --> 200, to X-Longshore-Carrier: nixl: no bytes, but where NIXL can read them (`nixl_carrier`)
        --> 100 every second, while the chunk is on its way to this node or others are sent theirs before
        --> 425: it has not come in WAIT_S; 504: and this node reads the store for it
        --> 404: not here; 410: another incarnation of this node is meant; 503: this node is too slow: leave it out
        --> 401 with a nonce: the first request of each connection is refused so, and proofs are made with its nonce

One thread serves one connection. A few send at a time, in the order in which they have something to send: a receiver
can only pass on a chunk that it has whole.

`os.sendfile` lets the socket refer to the pages of the arena. So the slot may only be reused when the receiver has
every byte, which the empty line says (RFC 9112, section 2.2 lets one stand before a request). A receiver that stays
silent loses its hold after `patience_s`. Its connection is reset before, so that no byte of the slot is sent later.

Bytes travel in clear text, as TLS in this process would copy them. A proof is an HMAC-SHA256 with the load's key over
nonce, path and range. It shows that the sender takes part in the load. It is of no use on another connection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import io
import logging
import os
import re
import secrets
import select
import socket
import socketserver
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol

from storage.errors import LongshoreError, StoreError
from storage.peers import (
    ALIVE_S,
    ASKER_HEADER,
    CARRIER_HEADER,
    DIGEST_HEADER,
    HANDED_OVER_HEADER,
    LEFT_HEADER,
    NODE_HEADER,
    PATIENCE_S,
    PLACE_HEADER,
    REALM,
    SLOW_STORE_HEADER,
    WAIT_S,
    Asker,
    NoChunk,
    proof,
)
from storage.peers.nixl_carrier import RegisteredWindow
from storage.peers.peer_client import Pace
from storage.stores.http_get import set_timer
from storage.stores.object_store import ByteRange

_LOG = logging.getLogger("longshore.peers")

HEAD_S = 10.0  # a connection that has proved nothing yet, and the head of any request, may take so long in all
HEAD_BYTES = 8192  # longest head after its first line: strangers use little memory
IDLE_S = 60.0  # a connection without a request is closed; receivers keep theirs for a shorter time
SENDING = 8  # connections that send at one time: with fewer, slow receivers keep the link from others
TURN_S = 20.0  # longest wait for a turn: receivers that have stopped must not keep the others waiting
PIECE_BYTES = 1 << 20  # between two looks at the rate; less where the rate is low
LOOK_S = 0.5  # between two looks at a receiver that takes nothing
FRESH_S = 1.0  # a node proves itself within this. A connection that has not is closed first when there are too many
PROGRESS_MS = 1  # between two calls of NIXL while a receiver READs
_PATH = re.compile(r"/chunks/([A-Za-z0-9._-]{1,128})/(\d{1,9})")
_LEFT = re.compile(r"[01]\.\d{1,9}")
_MILLISECONDS = re.compile(r"\d{1,9}")
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")


@dataclass(frozen=True, slots=True)
class ServedChunk:
    """A chunk in a file, held for one receiver until `release`."""

    descriptor: int
    offset: int  # of the chunk in the file
    size_bytes: int
    digest: bytes  # by `PASSED_HASH`; empty: its receivers know the published one
    release: Callable[[bool], object]  # the argument: whether the receiver has said that it has everything
    address: int = 0  # of the chunk in the memory that others may READ; 0: it is not in there


class ChunkShelf(Protocol):
    """Chunks that a node has for others. Thread-safe."""

    node: str  # incarnation of this node's agent

    def load_key(self, load_id: str) -> bytes | None:
        """Return the key of a load that this node takes part in."""
        ...

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk | NoChunk:
        """Return the chunk, held. Waits so long for one that is on its way."""
        ...


class Rate:
    """A limit of bytes per second over all connections. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s`: 0 for no limit."""
        self._bytes_per_s = bytes_per_s
        # All that send at one time get their pieces within a second: receivers give up who is silent.
        self.piece_bytes = max(4096, min(PIECE_BYTES, int(bytes_per_s / SENDING))) if bytes_per_s else PIECE_BYTES
        self._free_s = 0.0  # when all bytes so far have had their time
        self._lock = threading.Lock()

    def wait_for(self, size_bytes: int) -> None:
        """Return when so many more bytes may be sent."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            starts_s = max(now_s, self._free_s)
            self._free_s = starts_s + size_bytes / self._bytes_per_s
        if starts_s > now_s:
            time.sleep(starts_s - now_s)


class Sending:
    """A body on its way to a receiver, and its part in the node's pace.

    The time counts in which the receiver takes something. One that has died does not make this node a slow one.
    """

    def __init__(self, pace: Pace, connection: socket.socket) -> None:
        self._pace, self._connection = pace, connection
        self._waiting_bytes = 0  # that the kernel has, and the receiver does not
        self._stands_still = False
        pace.begin(time.monotonic())

    def look(self, sent_bytes: int = 0) -> None:
        """Find out whether the receiver takes anything. `sent_bytes`: what the kernel has got since the last look."""
        before_bytes = self._waiting_bytes + sent_bytes
        self._waiting_bytes = _waiting_bytes(self._connection)
        stands_still = not sent_bytes and self._waiting_bytes >= before_bytes
        if stands_still != self._stands_still:
            self._stands_still = stands_still
            (self._pace.pause if stands_still else self._pace.go_on)(time.monotonic())

    def end(self, size_bytes: int) -> None:
        """It is over. `size_bytes`: what the receiver has."""
        if self._stands_still:
            self._pace.go_on(time.monotonic())
        self._pace.end(time.monotonic(), size_bytes)


def _waiting_bytes(connection: socket.socket) -> int:
    """Return the bytes that the kernel has for the connection, and that the receiver has not confirmed."""
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)


class Turns:
    """Lets a few threads at a time do something, in the order in which they came. Thread-safe."""

    def __init__(self, most: int, patience_s: float) -> None:
        """`patience_s`: a thread that waited so long goes on beside the others."""
        self._free = most
        self._patience_s = patience_s
        self._waiting: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, still_there: Callable[[], object]) -> Iterator[None]:
        """Wait for a turn, and have it. `still_there` is called every `ALIVE_S` before. It may raise."""
        turn = threading.Event()
        with self._lock:
            if self._free:
                self._free -= 1
                turn.set()
            else:
                self._waiting.append(turn)
        give_up_s = time.monotonic() + self._patience_s
        try:
            while not turn.wait(min(ALIVE_S, left_s := give_up_s - time.monotonic())) and left_s > ALIVE_S:
                still_there()
            self._leave_line(turn)
            yield
        finally:
            self._leave_line(turn)
            with self._lock:
                if turn.is_set() and self._waiting:
                    self._waiting.popleft().set()
                elif turn.is_set():
                    self._free += 1

    def _leave_line(self, turn: threading.Event) -> None:
        with self._lock, contextlib.suppress(ValueError):  # ValueError: its turn has come
            self._waiting.remove(turn)


_BIND_HINTS = {
    errno.EADDRINUSE: "another program has the port: set LONGSHORE_PEER_PORT to a free one, the same on all nodes",
    errno.EACCES: "ports below 1024 need a privilege: set LONGSHORE_PEER_PORT to a larger one, the same on all nodes",
    errno.EADDRNOTAVAIL: "the node does not have this address: start Ray there with --node-ip-address",
}


class ChunkServer:
    """Serves the chunks of a shelf at one port until it is closed."""

    def __init__(
        self,
        shelf: ChunkShelf,
        host: str,
        port: int,
        *,
        most_connections: int = 1024,
        rate_bytes_per_s: float = 0.0,
        patience_s: float = PATIENCE_S,
        window: RegisteredWindow | None = None,
    ) -> None:
        """
        Args:
            host: Address to listen at: that of the cluster's network, so that nobody else can connect.
            port: 0 for any that is free.
            most_connections: For a further one, that is closed which has been without a request for longest. Without
                any, the further one is closed at once.
            rate_bytes_per_s: Limit of what is sent, all connections together. 0: none.
            patience_s: A receiver that takes no byte, or does not say that it has all, is given up after this.
            window: What receivers may READ by NIXL. None: they get bytes.

        Raises:
            StoreError: Nobody can listen at that address and port.
        """
        self._server = _Server(shelf, most_connections, Rate(rate_bytes_per_s), patience_s, window)
        try:
            self._server.server_bind_to(host, port)
        except OSError as error:
            self._server.server_close()
            raise StoreError(
                f"chunks cannot be served to other nodes: {error.strerror or error}",
                hint=_BIND_HINTS.get(error.errno or 0, ""),
                address=f"{host}:{port}",
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="chunk-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port that it listens at."""
        return int(self._server.server_address[1])

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._server.open)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of chunks that were sent so far."""
        return self._server.sent_bytes

    @property
    def bytes_per_s(self) -> float:
        """Return the rate at which chunks were sent while there was one to send. 0.0: it is not known."""
        return self._server.pace.bytes_per_s(time.monotonic())

    def close(self) -> None:
        """End every connection, and return when each has let its chunk go. Nobody READs any more. Idempotent."""
        self._server.end()
        self._thread.join()
        if self._server.window is not None:
            self._server.window.close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # it does not wait for daemon threads: see `end`
    request_queue_size = 1024

    def __init__(
        self,
        shelf: ChunkShelf,
        most_connections: int,
        rate: Rate,
        patience_s: float,
        window: RegisteredWindow | None,
    ) -> None:
        self.shelf, self.rate, self.patience_s, self.window = shelf, rate, patience_s, window
        self.turns = Turns(SENDING, TURN_S)
        self.pace = Pace()
        self.most_connections = most_connections
        self.open: set[socket.socket] = set()
        self._handlers: set[threading.Thread] = set()
        self._due: dict[socket.socket, float] = {}  # connections from which something must come, and until when
        self._idle: dict[socket.socket, None] = {}  # those that have proved something and ask for nothing, in order
        self.sent_bytes = 0
        self.lock = threading.Lock()
        self._ended = False
        super().__init__(("", 0), _Handler, bind_and_activate=False)

    def server_bind_to(self, host: str, port: int) -> None:
        """Listen. Raises OSError."""
        if ":" in host:
            self.socket.close()
            self.socket = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        self.server_address = (host, port)
        self.server_bind()
        self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            if len(self.open) >= self.most_connections and (victim := self._dispensable()) is not None:
                self._cut(victim)
            refused = self._ended or len(self.open) >= self.most_connections
            if not refused:
                self.open.add(request)
                self._due[request] = time.monotonic() + HEAD_S
        if refused:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can start now
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._handlers.add(threading.current_thread())
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._handlers.discard(threading.current_thread())

    def _dispensable(self) -> socket.socket | None:
        """Return the connection to close when there are too many. None: all are in use.

        Strangers keep no node out, and nodes that have nothing to ask now connect again.
        """
        first = min(self._due, key=self._due.__getitem__, default=None)
        if first is not None and self._due[first] < time.monotonic() + HEAD_S - FRESH_S:
            return first
        return next(iter(self._idle), first)

    def rests(self, connection: socket.socket) -> None:
        """The connection has proved that it is a node's, and is without a request now."""
        with self.lock:
            if connection in self.open:
                self._idle[connection] = None

    def expect(self, connection: socket.socket, until_s: float) -> None:
        """End the connection then, unless `came` is called before."""
        with self.lock:
            self._idle.pop(connection, None)
            self._due[connection] = until_s

    def came(self, connection: socket.socket) -> None:
        """Let the connection go on for as long as it takes."""
        with self.lock:
            self._due.pop(connection, None)

    def service_actions(self) -> None:
        """End connections that are overdue: a stranger that sends a byte now and then keeps no thread."""
        now_s = time.monotonic()
        with self.lock:
            overdue = [connection for connection, until_s in self._due.items() if until_s < now_s]
            for connection in overdue:
                self._cut(connection)

    def _cut(self, connection: socket.socket) -> None:
        """End a connection that is due or idle. Its thread closes it."""
        self._forget(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        self.open.discard(connection)
        self._due.pop(connection, None)
        self._idle.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self._forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.debug("a connection of a peer ended in an error", exc_info=True)

    def end(self) -> None:
        """Stop listening, end every connection and wait for its thread."""
        with self.lock:
            first, self._ended = not self._ended, True
            connections = list(self.open)
        if not first:
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # else the next line waits until the server looks up, 0.5 s
        self.shutdown()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()
        for handler in list(self._handlers):
            handler.join(self.patience_s)


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    server: _Server
    connection: socket.socket

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(IDLE_S)
        self.nonce = secrets.token_hex(16)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_timer(self.connection, socket.SO_SNDTIMEO, min(LOOK_S, self.server.patience_s))
        self.has_proved = False

    def handle_one_request(self) -> None:
        """Answer the next request. A connection that waits for one may be closed in favour of another."""
        if self.has_proved and not self.close_connection:
            self.server.rests(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the head of a request, whose first line is here."""
        if self.has_proved:  # else its time runs since it connected
            self.server.expect(self.connection, time.monotonic() + HEAD_S)
        head, line = b"", b"-"
        while line.strip(b"\r\n"):
            line = self.rfile.readline(HEAD_BYTES + 1 - len(head))
            head += line
            if len(head) > HEAD_BYTES:
                self.close_connection = True
                return False
        rest, self.rfile = self.rfile, io.BytesIO(head)
        try:
            return super().parse_request()
        finally:
            self.rfile = rest

    def do_GET(self) -> None:
        """Answer a request for a chunk."""
        path, range_header = self.path, self.headers.get("Range", "")
        named, asked = _PATH.fullmatch(path), _RANGE.fullmatch(range_header)
        key = self.server.shelf.load_key(named[1]) if named else None
        if not self._is_proved(key, path, range_header):
            # Who has no key does not learn which loads there are.
            self._refuse(401, ("WWW-Authenticate", f'{REALM} nonce="{self.nonce}"'))
            return
        self.has_proved = True
        self.server.came(self.connection)
        if named is None or asked is None:
            self._refuse(400)
            return
        if self.headers.get(NODE_HEADER, "") != self.server.shelf.node:
            self._refuse(410)
            return
        found = self._take(named[1], int(named[2]))
        if isinstance(found, NoChunk):
            self._refuse(found.value)
        else:
            received, wanted = False, ByteRange(int(asked[1]), max(int(asked[1]), int(asked[2]) + 1))
            try:
                received = self._send(found, wanted)
            finally:
                if not received and self.close_connection:
                    self._reset()
                found.release(received)

    def _take(self, load_id: str, chunk: int) -> ServedChunk | NoChunk:
        """Return the chunk, held, or why not. Waits for one that is on its way."""
        left, slow_ms = self.headers.get(LEFT_HEADER, ""), self.headers.get(SLOW_STORE_HEADER, "")
        asker = Asker(
            self.headers.get(ASKER_HEADER, ""),
            float(left) if _LEFT.fullmatch(left) else None,
            int(slow_ms) / 1000 if _MILLISECONDS.fullmatch(slow_ms) else None,
            self.headers.get(HANDED_OVER_HEADER) == "1",
        )
        found: ServedChunk | NoChunk = NoChunk.MISSING
        for _ in range(int(WAIT_S / ALIVE_S)):
            try:
                found = self.server.shelf.take(load_id, chunk, asker, ALIVE_S)
            except LongshoreError:
                return NoChunk.MISSING
            if found not in (NoChunk.COMING, NoChunk.LATE):
                break
            self._say_alive()
        return found

    def _say_alive(self) -> None:
        """Let a receiver that waits know that this node lives (RFC 9110, section 15.2.1)."""
        self.send_response_only(100)
        self.end_headers()

    def _is_proved(self, key: bytes | None, path: str, range_header: str) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        expected = proof(key or secrets.token_bytes(32), self.nonce, path, range_header)
        return scheme == REALM and hmac.compare_digest(given.encode(), expected.encode()) and key is not None

    def _send(self, chunk: ServedChunk, wanted: ByteRange) -> bool:
        """Return whether the receiver has said that it has everything."""
        if wanted.end > chunk.size_bytes or not wanted.size_bytes:
            self._refuse(416)
            return False
        sending = None
        try:
            with self.server.turns.turn(self._say_alive):
                sending = Sending(self.server.pace, self.connection)
                if not (self._let_read(chunk, wanted) or self._send_bytes(chunk, wanted, sending)):
                    return False
            with self.server.lock:
                self.server.sent_bytes += wanted.size_bytes
            self._wait_for_receipt(sending)
            self.connection.settimeout(LOOK_S)
            if self.rfile.readline(3) == b"\r\n":
                self.close_connection = False
                self.connection.settimeout(IDLE_S)
            return not self.close_connection
        finally:
            if sending is not None:
                sending.end(0 if self.close_connection else wanted.size_bytes)

    def _wait_for_receipt(self, sending: Sending) -> None:
        """Return when the receiver says something, or has said nothing for too long."""
        said, give_up_s = select.poll(), time.monotonic() + self.server.patience_s
        said.register(self.connection, select.POLLIN)
        while (left_s := give_up_s - time.monotonic()) > 0 and not said.poll(1000 * min(LOOK_S, left_s)):
            sending.look()

    def _let_read(self, chunk: ServedChunk, wanted: ByteRange) -> bool:
        """Name the range to a receiver that can READ it, and wait while it does. Return False if it needs bytes."""
        window = self.server.window
        if window is None or not chunk.address or self.headers.get(CARRIER_HEADER) != "nixl":
            return False
        metadata = window.metadata()
        if not metadata:
            return False
        self.server.rate.wait_for(wanted.size_bytes)
        self.send_response(200)
        self.send_header(PLACE_HEADER, str(chunk.address + wanted.start))
        self._send_digest(chunk)
        self.send_header("Content-Length", str(len(metadata)))
        self.end_headers()
        self.wfile.write(metadata)
        self.close_connection = True
        said, give_up_s = select.poll(), time.monotonic() + self.server.patience_s
        said.register(self.connection, select.POLLIN)
        while time.monotonic() < give_up_s and not said.poll(PROGRESS_MS):
            window.progress()
        return True

    def _send_bytes(self, chunk: ServedChunk, wanted: ByteRange, sending: Sending) -> bool:
        """Return whether all bytes were sent. The connection is closed unless the receiver says that it has them."""
        self.send_response(206)
        self.send_header("Content-Length", str(wanted.size_bytes))
        self.send_header("Content-Range", f"bytes {wanted.start}-{wanted.end - 1}/{chunk.size_bytes}")
        self._send_digest(chunk)
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        # With a timeout of Python's own the socket would not block, and sendfile would return at each full buffer.
        self.connection.settimeout(None)
        at, end = chunk.offset + wanted.start, chunk.offset + wanted.end
        while at < end:
            size_bytes = min(self.server.rate.piece_bytes, end - at)
            self.server.rate.wait_for(size_bytes)
            takes_s = time.monotonic()  # when it took something last
            while size_bytes:
                try:
                    sent_bytes = os.sendfile(self.connection.fileno(), chunk.descriptor, at, size_bytes)
                except BlockingIOError:  # it takes nothing now
                    if time.monotonic() - takes_s >= self.server.patience_s:
                        raise
                    sending.look()
                    continue
                if not sent_bytes:
                    return False  # the file was cut short
                takes_s = time.monotonic()
                sending.look(sent_bytes)
                at, size_bytes = at + sent_bytes, size_bytes - sent_bytes
        return True

    def _reset(self) -> None:
        """Close the connection so that the kernel sends nothing more of a slot that may have another chunk soon."""
        with self.server.lock, contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.server._forget(self.connection)
            os.close(self.connection.detach())

    def _send_digest(self, chunk: ServedChunk) -> None:
        if chunk.digest:
            self.send_header(DIGEST_HEADER, chunk.digest.hex())

    def _refuse(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: each chunk would be a line."""

    def version_string(self) -> str:
        return "Longshore"
