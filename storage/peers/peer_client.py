"""Reads chunks from other nodes (`storage.peers.chunk_server`) straight into the caller's memory.

    read(peer, ...) -- idle connection, or a new one and its nonce --> GET --> recv into the pieces --> empty line

A peer that sends far more slowly than others did is given up, and what it has sent stays. With NIXL a peer may answer
where the bytes are, and they are READ from there. If that fails, the rest is asked for as bytes.
The bytes are received as those of a store are (`storage.stores.http_get`).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from storage.checksum import DIGEST_SIZES
from storage.errors import PeerUnavailable, RangeMismatch, ReadEnded, StoreUnavailable
from storage.peers import (
    ASKER_HEADER,
    CARRIER_HEADER,
    DIGEST_HEADER,
    HANDED_OVER_HEADER,
    LEFT_HEADER,
    NODE_HEADER,
    PASSED_HASH,
    PATIENCE_S,
    PLACE_HEADER,
    READ_TIMEOUT_S,
    REALM,
    SLOW_STORE_HEADER,
    Asker,
    Peer,
    chunk_path,
    proof,
)
from storage.peers.nixl_carrier import MOST_METADATA_BYTES, NixlFailed, NixlReader, Place
from storage.stores.http_get import (
    IdleConnections,
    Received,
    open_socket,
    receive,
    send_get,
    usable_receive_buffer_bytes,
    use_socket,
)
from storage.stores.object_store import ByteRange
from storage.stores.requests import ReadLimit

AVOID_S = 30.0  # a node that cannot be reached, or says nothing, is not asked again for this long
MAX_IDLE = 4  # connections kept to each peer
_NONCE = re.compile(REALM + r' nonce="([0-9a-f]{8,64})"')
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_SIZES[PASSED_HASH]}}}")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}")
_READ_S = PATIENCE_S - 2.0  # for a range by NIXL, well before the peer gives its hold up
TOO_SLOW = 24.0  # times slower than this node's other bodies: a healthy peer may send 8 at one time, not quite evenly
GRACE_S = 4.0  # before anybody is called slow
_REMEMBERS_S = 10.0  # of receiving
ENOUGH_BODIES = 16  # to know a link's rate
KNOWN_S = 600.0  # after this a link may be another one: a node that was slow is tried again


class _Connection:
    def __init__(self, peer: Peer, http_connection: http.client.HTTPConnection, sock: socket.socket) -> None:
        self.peer, self.http, self.sock = peer, http_connection, sock
        self.nonce = ""

    def close(self) -> None:
        self.http.close()


class Pace:
    """Rate at which bodies come to a node, to notice one that is far slower than the others, or leave it. Thread-safe.

    All that come at one time share the node's link. So each is expected to get its share of what comes in all.
    """

    def __init__(self) -> None:
        self._bodies = 0  # that come now
        self._bytes = self._busy_s = 0.0  # of bodies that have come; time with at least one. Both fade.
        self._since_s = self._ended_s = 0.0
        self._ended = 0  # bodies, ever
        self._lock = threading.Lock()

    def bytes_per_s(self, now_s: float) -> float:
        """Return the rate of all bodies together while there was any. 0.0: there were too few, or none for KNOWN_S."""
        with self._lock:
            self._look(now_s)
            known = self._ended >= ENOUGH_BODIES and self._busy_s > 0 and now_s - self._ended_s < KNOWN_S
            return self._bytes / self._busy_s if known else 0.0

    def begin(self, now_s: float) -> None:
        """A body begins to come."""
        with self._lock:
            self._look(now_s)
            self._bodies += 1

    def end(self, now_s: float, size_bytes: int) -> None:
        """A body has ended. `size_bytes`: what came of it."""
        with self._lock:
            self._look(now_s)
            self._bodies -= 1
            self._ended, self._ended_s = self._ended + 1, now_s
            self._bytes += size_bytes
            if self._busy_s > _REMEMBERS_S:
                self._bytes, self._busy_s = self._bytes / 2, self._busy_s / 2

    def pause(self, now_s: float) -> None:
        """A body does not come, and its time does not count until it goes on."""
        with self._lock:
            self._look(now_s)
            self._bodies -= 1

    def go_on(self, now_s: float) -> None:
        """A body comes again after a pause."""
        with self._lock:
            self._look(now_s)
            self._bodies += 1

    def is_slow(self, came_bytes: int, took_s: float) -> bool:
        """Return whether a body of which so much came in that time is far slower than the others."""
        if took_s <= GRACE_S:
            return False
        with self._lock:
            expected_bytes_per_s = self._bytes / max(self._busy_s, took_s) / max(1, self._bodies)
        return came_bytes < took_s * expected_bytes_per_s / TOO_SLOW

    def _look(self, now_s: float) -> None:
        if self._bodies:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s


class PeerClient:
    """Connections to other nodes. Thread-safe: each read has a connection to itself."""

    def __init__(
        self,
        asker: str,
        *,
        connect_timeout_s: float = 2.0,
        read_timeout_s: float = READ_TIMEOUT_S,
        nixl: NixlReader | None = None,
    ) -> None:
        """
        Args:
            asker: This node's id.
            read_timeout_s: A peer that sends no byte for this long is given up. One that lives sends some each second.
            nixl: READs from peers that let it. None: all send bytes.
        """
        self._asker = Asker(asker)
        self._nixl = nixl
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._idle: IdleConnections[_Connection] = IdleConnections(MAX_IDLE)
        self._avoid: dict[Peer, float] = {}  # peer -> until when
        self._receive_buffer_bytes = usable_receive_buffer_bytes()
        self._pace = Pace()

    def read(
        self,
        peer: Peer,
        load_id: str,
        chunk: int,
        key: bytes,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        asker: Asker | None = None,
        limit: ReadLimit | None = None,
        passed: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        """Read a range of a chunk into `pieces`, as `ReadsPieces.read_pieces` does.

        Args:
            peer: The node to ask.
            key: The load's key.
            byte_range: Within the chunk. Not empty.
            pieces: Together as long as the range.
            asker: This node, with more about it. None: only its id.
            limit: Ends the read from another thread.
            passed: Called before the first byte with the digest that the peer passes on; empty: none.

        Raises:
            PeerUnavailable: The peer does not have the chunk, does not answer, stopped, or is far too slow. Its detail
                `received_bytes` is how many bytes are in the pieces. A `status` of 404: only the chunk is missing. 425
                or 504: it is still on its way to the peer.
            ReadEnded: `limit` was ended.
        """
        limit, received = limit or ReadLimit(), Received()
        where: dict[str, Any] = {"peer": str(peer), "load": load_id, "chunk": chunk, "range": str(byte_range)}
        if time.monotonic() < self._avoid.get(peer, 0.0):
            raise PeerUnavailable("a node did not answer just before", **where)
        path = chunk_path(load_id, chunk)
        try:
            nixl = self._nixl if self._nixl is not None and self._nixl.can_read(peer) else None
            about = limit, received, where, _headers(asker or self._asker)
            left = self._read(peer, path, key, byte_range, pieces, *about, nixl, passed)
            if left is not None:
                rest = ByteRange(byte_range.start + received.bytes, byte_range.end)
                self._read(peer, path, key, rest, left, *about, None, passed)
        except (OSError, http.client.HTTPException, StoreUnavailable, RangeMismatch) as error:
            if limit.ended:
                raise ReadEnded("the read was ended", received_bytes=received.bytes, **where) from error
            if isinstance(error, PeerUnavailable):
                raise
            if isinstance(error, OSError) and not received.bytes:
                self._avoid[peer] = time.monotonic() + AVOID_S
            details: dict[str, Any] = {**where, "received_bytes": received.bytes, "cause": type(error).__name__}
            raise PeerUnavailable("a node did not send a chunk that it has", **details) from error

    def close(self) -> None:
        """Close every idle connection, and the others after their read. Idempotent."""
        self._idle.close()

    def chunk(self, peer: Peer, load_id: str, key: bytes, chunk: int, start: int, asker: Asker) -> PeerChunk:
        """Return a chunk of another node, to be read by its place in the stored object, where it begins at `start`."""
        return PeerChunk(self, peer, load_id, key, chunk, start, asker)

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
        headers: dict[str, str],
        nixl: NixlReader | None,
        passed: Callable[[bytes], object],
    ) -> Iterable[memoryview] | None:
        """Return the pieces that are still to be read, as bytes, if `nixl` failed. Otherwise all is there."""
        if nixl is not None:
            headers = {**headers, CARRIER_HEADER: "nixl"}
        connection, response = self._request(peer, path, key, byte_range, limit, headers)
        keep = False
        try:
            digest = response.getheader(DIGEST_HEADER, "")
            passed(bytes.fromhex(digest) if _DIGEST.fullmatch(digest) else b"")
            if nixl is not None and response.status == 200:
                left = _read_at(nixl, _place(peer, response, where), pieces, limit, received)
                keep = left is None and self._acknowledge(connection)
                return left
            if response.status != 206:
                keep = response.status in (404, 425, 503, 504) and not response.read()
                _refused(response.status, where)
            length = response.getheader("Content-Length", "")
            if length != str(byte_range.size_bytes) or response.getheader("Transfer-Encoding"):
                raise RangeMismatch("a node sends another range than was asked for", **where)
            before_bytes = received.bytes
            self._pace.begin(time.monotonic())
            try:
                about = self._read_timeout_s, received, where
                receive(connection.sock, response, pieces, *about, is_slow=self._pace.is_slow)
            finally:
                self._pace.end(time.monotonic(), received.bytes - before_bytes)
            keep = self._acknowledge(connection)
            return None
        finally:
            if limit.detach() or not keep:
                response.close()
                connection.close()
            else:
                self._idle.give_back(connection, peer)

    def _acknowledge(self, connection: _Connection) -> bool:
        """Tell the peer that every byte is here. Return whether the connection can be used again."""
        with contextlib.suppress(OSError):  # the bytes are here; the node gives its hold up by itself
            connection.sock.sendall(b"\r\n")
            return True
        return False

    def _request(
        self, peer: Peer, path: str, key: bytes, byte_range: ByteRange, limit: ReadLimit, about: dict[str, str]
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        """Send the request, and return its answer. The connection is closed on every error."""
        connection = self._idle.take(peer)
        if connection is not None:
            try:
                return connection, self._exchange(connection, path, key, byte_range, limit, about)
            except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected):
                pass  # it was closed while it was idle
        connection = self._connect(peer, limit)
        response = self._exchange(connection, path, key, byte_range, limit, about)
        nonce = _nonce_in(response)
        if not nonce:
            return connection, response
        response.read()
        connection.nonce = nonce
        return connection, self._exchange(connection, path, key, byte_range, limit, about)

    def _exchange(
        self,
        connection: _Connection,
        path: str,
        key: bytes,
        byte_range: ByteRange,
        limit: ReadLimit,
        about: dict[str, str],
    ) -> http.client.HTTPResponse:
        range_header = byte_range.http_header()
        headers = {"Host": str(connection.peer), "Range": range_header, NODE_HEADER: connection.peer.node, **about}
        if connection.nonce:
            headers["Authorization"] = f"{REALM} {proof(key, connection.nonce, path, range_header)}"
        return send_get(connection.http, path, headers, limit)[1]

    def _connect(self, peer: Peer, limit: ReadLimit) -> _Connection:
        connection = http.client.HTTPConnection(peer.host, peer.port)
        sock = open_socket(
            peer.host,
            peer.port,
            limit,
            connect_timeout_s=self._connect_timeout_s,
            read_timeout_s=self._read_timeout_s,
            buffer_bytes=self._receive_buffer_bytes,
        )
        sock.settimeout(self._read_timeout_s)
        use_socket(connection, sock)
        return _Connection(peer, connection, sock)


@dataclass(slots=True)
class PeerChunk:
    """A chunk at another node, read by its place in the stored object: a `ReadsPieces`."""

    client: PeerClient
    peer: Peer
    load_id: str
    key: bytes = field(repr=False)  # the load's
    chunk: int
    start: int  # of the chunk in the object
    asker: Asker
    digest: bytes = b""  # that the peer passed on

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
        about = self.peer, self.load_id, self.chunk, self.key, inside, pieces
        self.client.read(*about, asker=self.asker, limit=limit, passed=self._pass)
        return None

    def _pass(self, digest: bytes) -> None:
        self.digest = digest


def _headers(asker: Asker) -> dict[str, str]:
    """Return the headers that say who asks."""
    headers = {ASKER_HEADER: asker.node_id}
    if asker.share_left is not None:
        headers[LEFT_HEADER] = f"{asker.share_left:.6f}"
    if asker.slow_store_s is not None:
        headers[SLOW_STORE_HEADER] = str(min(999_999_999, round(asker.slow_store_s * 1000)))
    if asker.hands_over:
        headers[HANDED_OVER_HEADER] = "1"
    return headers


def serves_chunks(host: str, port: int, timeout_s: float) -> bool:
    """Return whether what answers at this address is a chunk server. Raises OSError when there is no connection."""
    with socket.create_connection((host, port), timeout_s) as sock:
        connection = http.client.HTTPConnection(host, port)
        use_socket(connection, sock)
        try:
            connection.request("GET", chunk_path("none", 0))
            return bool(_nonce_in(connection.getresponse()))
        except (OSError, http.client.HTTPException):
            return False


def _place(peer: Peer, response: http.client.HTTPResponse, where: dict[str, Any]) -> Place:
    """Return where the peer says that the range is. Raises RangeMismatch."""
    address, length = response.getheader(PLACE_HEADER, ""), response.getheader("Content-Length", "")
    if not (_NUMBER.fullmatch(address) and _NUMBER.fullmatch(length) and int(length) <= MOST_METADATA_BYTES):
        raise RangeMismatch("a node names no place that can be read", **where)
    return Place(peer, response.read(), int(address))


def _read_at(
    nixl: NixlReader, place: Place, pieces: Iterable[memoryview], limit: ReadLimit, received: Received
) -> Iterable[memoryview] | None:
    """READ into the pieces. Return None, or after a failure those that are still to be filled."""
    give_up_s = time.monotonic() + _READ_S
    pieces = iter(pieces)
    for piece in pieces:
        if limit.ended:
            raise ConnectionAbortedError
        try:
            nixl.read(replace(place, address=place.address + received.bytes), piece, give_up_s)
        except NixlFailed:
            return itertools.chain((piece,), pieces)
        received.bytes += len(piece)
    return None


def _nonce_in(response: http.client.HTTPResponse) -> str:
    """Return the nonce with which a chunk server refuses a connection's first request. Empty: this is no refusal."""
    challenge = _NONCE.fullmatch(response.getheader("WWW-Authenticate", ""))
    return challenge[1] if response.status == 401 and challenge is not None else ""


def _refused(status: int, where: dict[str, Any]) -> NoReturn:
    why = {
        401: "it does not know the load",
        404: "it does not have the chunk",
        410: "its agent was restarted",
        425: "the chunk is still on its way to it",
        503: "it is far slower than others",
        504: "it still reads the chunk from the store",
    }
    raise PeerUnavailable(
        f"a node sent no chunk: {why.get(status, 'it answered in no known way')}", status=status, **where
    )
