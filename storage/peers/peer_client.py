"""Reads chunks from other nodes (`storage.peers.chunk_server`), straight into the caller's memory.

    read(peer, ...) -- idle connection, or a new one and its nonce --> GET --> recv into the pieces --> empty line
                            307: the same from the node that is named there, four times at most

The bytes are received as those of a store are (`storage.stores.http_body`).
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from storage.errors import PeerUnavailable, RangeMismatch, ReadEnded, StoreUnavailable
from storage.peers import ASKER_HEADER, NODE_HEADER, REALM, Peer, chunk_path, proof
from storage.stores.http_body import Received, receive, set_receive_timer, usable_receive_buffer_bytes
from storage.stores.object_store import ByteRange
from storage.stores.requests import ReadLimit

MOST_REDIRECTS = 4
MAX_IDLE_S = 15.0  # the server closes idle connections after a longer time
AVOID_S = 30.0  # a node that cannot be reached, or says nothing, is not asked again for this long
MAX_IDLE = 4  # connections kept to each peer
_NONCE = re.compile(REALM + r' nonce="([0-9a-f]{8,64})"')
_LOCATION = re.compile(r"http://([^/\s]{1,256}):(\d{1,5})/.*")


class _Connection:
    def __init__(self, peer: Peer, http_connection: http.client.HTTPConnection, sock: socket.socket) -> None:
        self.peer, self.http, self.sock = peer, http_connection, sock
        self.nonce = ""
        self.since_s = time.monotonic()


class PeerClient:
    """Connections to other nodes. Thread-safe: each read has a connection to itself."""

    def __init__(self, asker: str, *, connect_timeout_s: float = 2.0, read_timeout_s: float = 10.0) -> None:
        """`asker`: this node's id. `read_timeout_s`: a peer that sends no byte for this long is given up."""
        self._asker = asker
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._lock = threading.Lock()
        self._idle: dict[Peer, list[_Connection]] = {}
        self._closed = False
        self._avoid: dict[Peer, float] = {}  # peer -> until when
        self._receive_buffer_bytes = usable_receive_buffer_bytes()

    def read(
        self,
        peer: Peer,
        load_id: str,
        chunk: int,
        key: bytes,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        limit: ReadLimit | None = None,
    ) -> Peer:
        """Read a range of a chunk into `pieces`, as `ReadsPieces.read_pieces` does. Return the node that had it.

        Args:
            peer: The node to ask first. It may name another one.
            key: The load's key.
            byte_range: Within the chunk. Not empty.
            pieces: Together as long as the range.
            limit: Ends the read from another thread.

        Raises:
            PeerUnavailable: The peer does not have the chunk, does not answer, or stopped. Its detail `received_bytes`
                is how many bytes are in the pieces.
            ReadEnded: `limit` was ended.
        """
        limit, received = limit or ReadLimit(), Received()
        for _ in range(MOST_REDIRECTS + 1):
            where: dict[str, Any] = {"peer": str(peer), "load": load_id, "chunk": chunk, "range": str(byte_range)}
            if time.monotonic() < self._avoid.get(peer, 0.0):
                raise PeerUnavailable("a node did not answer just before", **where)
            try:
                elsewhere = self._read(
                    peer, chunk_path(load_id, chunk), key, byte_range, pieces, limit, received, where
                )
            except (OSError, http.client.HTTPException, StoreUnavailable, RangeMismatch) as error:
                if limit.ended:
                    raise ReadEnded("the read was ended", received_bytes=received.bytes, **where) from error
                if isinstance(error, PeerUnavailable):
                    raise
                if isinstance(error, OSError) and not received.bytes:
                    self._avoid[peer] = time.monotonic() + AVOID_S
                details: dict[str, Any] = {**where, "received_bytes": received.bytes, "cause": type(error).__name__}
                raise PeerUnavailable("a node did not send a chunk that it has", **details) from error
            if elsewhere is None:
                return peer
            peer = elsewhere
        raise PeerUnavailable("nodes send each other's requests round", **where)

    def close(self) -> None:
        """Close every idle connection, and the others after their read. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [connection for each in self._idle.values() for connection in each]
            self._idle.clear()
        for connection in idle:
            connection.http.close()

    def _read(
        self,
        peer: Peer,
        path: str,
        key: bytes,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        limit: ReadLimit,
        received: Received,
        where: dict[str, Any],
    ) -> Peer | None:
        """Return None when the pieces are full, else the node that has the chunk."""
        connection, response = self._request(peer, path, key, byte_range, limit)
        keep = False
        try:
            if response.status == 307:
                response.read()
                keep = True
                return _named(response, where)
            if response.status != 206:
                keep = response.status == 404 and not response.read()
                _refused(response.status, where)
            length = response.getheader("Content-Length", "")
            if length != str(byte_range.size_bytes) or response.getheader("Transfer-Encoding"):
                raise RangeMismatch("a node sends another range than was asked for", **where)
            receive(connection.sock, response, pieces, self._read_timeout_s, received, where)
            with contextlib.suppress(OSError):  # the bytes are here; the node gives its hold up by itself
                connection.sock.sendall(b"\r\n")
                keep = True
            return None
        finally:
            if limit.detach() or not keep:
                response.close()
                connection.http.close()
            else:
                self._give_back(connection)

    def _request(
        self, peer: Peer, path: str, key: bytes, byte_range: ByteRange, limit: ReadLimit
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        """Send the request, and return its answer. The connection is closed on every error."""
        connection = self._take_idle(peer)
        if connection is not None:
            try:
                return connection, self._exchange(connection, path, key, byte_range, limit)
            except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected):
                pass  # it was closed while it was idle
        connection = self._connect(peer, limit)
        response = self._exchange(connection, path, key, byte_range, limit)
        challenge = _NONCE.fullmatch(response.getheader("WWW-Authenticate", ""))
        if response.status != 401 or challenge is None:
            return connection, response
        response.read()
        connection.nonce = challenge[1]
        return connection, self._exchange(connection, path, key, byte_range, limit)

    def _exchange(
        self, connection: _Connection, path: str, key: bytes, byte_range: ByteRange, limit: ReadLimit
    ) -> http.client.HTTPResponse:
        range_header = byte_range.http_header()
        headers = {
            "Host": str(connection.peer),
            "Range": range_header,
            NODE_HEADER: connection.peer.node,
            ASKER_HEADER: self._asker,
        }
        if connection.nonce:
            headers["Authorization"] = f"{REALM} {proof(key, connection.nonce, path, range_header)}"
        try:
            limit.attach(connection.sock)
            connection.http.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.http.putheader(name, value)
            connection.http.endheaders()
            return connection.http.getresponse()
        except BaseException:
            limit.detach()
            connection.http.close()
            raise

    def _connect(self, peer: Peer, limit: ReadLimit) -> _Connection:
        connection = http.client.HTTPConnection(peer.host, peer.port)
        sock = socket.create_connection((peer.host, peer.port), timeout=self._connect_timeout_s)
        try:
            limit.attach(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._receive_buffer_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
            set_receive_timer(sock, self._read_timeout_s)
            sock.settimeout(self._read_timeout_s)
        except BaseException:
            limit.detach()
            sock.close()
            raise
        connection.sock = sock
        connection.auto_open = 0
        return _Connection(peer, connection, sock)

    def _take_idle(self, peer: Peer) -> _Connection | None:
        stale: list[_Connection] = []
        found = None
        with self._lock:
            idle = self._idle.get(peer, [])
            while idle and found is None:
                connection = idle.pop()
                if time.monotonic() - connection.since_s > MAX_IDLE_S:
                    stale.append(connection)
                else:
                    found = connection
        for connection in stale:
            connection.http.close()
        return found

    def _give_back(self, connection: _Connection) -> None:
        connection.since_s = time.monotonic()
        with self._lock:
            idle = self._idle.setdefault(connection.peer, [])
            if not self._closed and len(idle) < MAX_IDLE:
                idle.append(connection)
                return
        connection.http.close()


@dataclass(frozen=True, slots=True)
class PeerChunk:
    """A chunk at another node, read by its place in the stored object: a `ReadsPieces`."""

    client: PeerClient
    peer: Peer
    load_id: str
    key: bytes = field(repr=False)  # the load's
    chunk: int
    start: int  # of the chunk in the object

    def read_pieces(
        self,
        key: str,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        etag: str | None = None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        """See `ReadsPieces`. Raises as `PeerClient.read` does."""
        inside = ByteRange(byte_range.start - self.start, byte_range.end - self.start)
        self.client.read(self.peer, self.load_id, self.chunk, self.key, inside, pieces, limit=limit)
        return None


def _named(response: http.client.HTTPResponse, where: dict[str, Any]) -> Peer:
    """Return the node that a redirect names."""
    location = _LOCATION.fullmatch(response.getheader("Location", ""))
    node = response.getheader(NODE_HEADER, "")
    if location is None or not node or int(location[2]) > 65535:
        raise PeerUnavailable("a node names no other node", **where)
    return Peer(location[1].strip("[]"), int(location[2]), node)


def _refused(status: int, where: dict[str, Any]) -> NoReturn:
    why = {401: "it does not know the load", 404: "it does not have the chunk", 410: "its agent was restarted"}
    raise PeerUnavailable(
        f"a node sent no chunk: {why.get(status, 'it answered in no known way')}", status=status, **where
    )
