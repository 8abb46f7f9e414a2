"""Reads of ranges over plain HTTP/1.1, straight into the caller's memory: the hot path of every S3 load.

    read_range(path, headers, range, pieces, etag)
        pooled connection --> send GET --> check_answer(status, headers) --> receive: recv into piece after piece
             ^                                   |  refused: error body read (64 KiB at most), connection closed
             +---- returned to the pool only if every byte of the answer was read

SDKs copy each byte two or three times; this copies none (`storage.stores.http_get`).

Every answer is checked before a byte of it is stored: 200 for a range, no If-Match, another range, another length, an
encoding. Through an HTTP proxy, a connection to an https store is a tunnel, and a request to an http store contains the
full URL. Only one thing is retried: a request on a kept-alive connection that the server had closed while it was idle.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from storage.errors import ReadEnded, StoreError, StoreUnavailable
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
from storage.stores.requests import Proxy, ReadLimit, host_and_port, proxy_refusal, tls_context
from storage.stores.s3.answers import MAX_ERROR_BODY_BYTES, check_answer, connection_error, head_of, refusal


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The host and port for the requests of one bucket."""

    host: str
    port: int
    tls: bool
    proxy: Proxy | None = None  # the proxy between us and the host

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def address(self) -> str:
        """Return host:port in the form of a request line."""
        return host_and_port(self.host, self.port)


class WireClient:
    """Kept-alive connections to one endpoint. Thread-safe: each request has a connection to itself."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        uri: str,
        read_timeout_s: float,
        connect_timeout_s: float,
        ca_bundle: str | None = None,
        max_idle: int = 64,
    ) -> None:
        """`uri` is for messages. Raises StoreError when `ca_bundle` cannot be read."""
        self.endpoint = endpoint
        self._uri = uri
        self._read_timeout_s = read_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._idle: IdleConnections[http.client.HTTPConnection] = IdleConnections(max_idle)
        self._tls: ssl.SSLContext | None = tls_context(ca_bundle, uri) if endpoint.tls else None
        self._receive_buffer_bytes = usable_receive_buffer_bytes()

    def read_range(
        self,
        path: str,
        headers: Mapping[str, str],
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        key: str,
        etag: str | None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        """Send GET for `path` (percent-encoded), read into `pieces` (see ReadsPieces) and return the answer's ETag.

        Raises the errors of a read.
        """
        where: dict[str, Any] = {"uri": self._uri, "key": key, "range": str(byte_range)}
        limit = limit or ReadLimit()
        received = Received()
        try:
            connection, sock, response = self._request(path, headers, limit)
            try:
                found = self._check(response, byte_range, etag, key)
                receive(sock, response, pieces, self._read_timeout_s, received, where)
            except BaseException:
                # Unread bytes would be taken for the next answer. The response holds the socket, too.
                limit.detach()
                response.close()
                connection.close()
                raise
        except (OSError, http.client.HTTPException, StoreUnavailable) as error:
            if limit.ended:
                raise ReadEnded(
                    "the read was ended, because its time was over or its bytes were no longer needed",
                    received_bytes=received.bytes,
                    **where,
                ) from error
            if isinstance(error, StoreUnavailable):
                raise
            raise self._translated(error, key, byte_range, received) from error
        if limit.detach() or response.will_close:
            connection.close()
        else:
            self._idle.give_back(connection)
        return found

    def close(self) -> None:
        """Close idle connections now, and those in use when their request is done."""
        self._idle.close()

    def _translated(self, error: Exception, key: str, byte_range: ByteRange, received: Received) -> StoreError:
        endpoint = str(self.endpoint)
        found = connection_error(
            error, uri=self._uri, endpoint=endpoint, timeout_s=self._read_timeout_s, proxy=self.endpoint.proxy
        )
        if received.bytes:
            found = found.with_details(received_bytes=received.bytes)
        return found.with_details(key=key, range=str(byte_range))

    def _request(
        self, path: str, headers: Mapping[str, str], limit: ReadLimit
    ) -> tuple[http.client.HTTPConnection, socket.socket, http.client.HTTPResponse]:
        """Send a GET and read the head of its answer. The connection is closed on every error."""
        if self.endpoint.proxy is not None and not self.endpoint.tls:  # RFC 9112, 3.2.2: the absolute form
            path, headers = f"{self.endpoint}{path}", {**headers, **self.endpoint.proxy.headers()}
        connection = self._take_idle()
        if connection is not None:
            try:
                return connection, *send_get(connection, path, headers, limit)
            except (ConnectionResetError, BrokenPipeError, ConnectionAbortedError):
                pass  # the server closed it while it was idle; a GET is safe to send again
        connection = self._connect(limit)
        return connection, *send_get(connection, path, headers, limit)

    def _connect(self, limit: ReadLimit) -> http.client.HTTPConnection:
        endpoint = self.endpoint
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, context=self._tls)
        else:
            connection = http.client.HTTPConnection(endpoint.host, endpoint.port)
        peer = endpoint.proxy or endpoint
        raw = open_socket(
            peer.host,
            peer.port,
            limit,
            connect_timeout_s=self._connect_timeout_s,
            read_timeout_s=self._read_timeout_s,
            buffer_bytes=self._receive_buffer_bytes,
        )
        try:
            sock = raw
            if self._tls is not None:  # the connect timeout covers the tunnel and the handshake
                if endpoint.proxy is not None:
                    self._open_tunnel(raw, endpoint.proxy)
                sock = self._tls.wrap_socket(raw, server_hostname=endpoint.host)
            sock.settimeout(self._read_timeout_s)
        except BaseException:
            limit.detach()
            raw.close()
            raise
        use_socket(connection, sock)
        return connection

    def _open_tunnel(self, raw: socket.socket, proxy: Proxy) -> None:
        """Let the proxy connect `raw` to the store (CONNECT, RFC 9110, 9.3.6). Raises what `proxy_refusal` returns."""
        lines = [f"CONNECT {self.endpoint.address} HTTP/1.1", f"Host: {self.endpoint.address}", "User-Agent: longshore"]
        lines += [f"{name}: {value}" for name, value in proxy.headers().items()]
        raw.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        with http.client.HTTPResponse(raw, method="CONNECT") as answer:
            answer.begin()
            if not 200 <= answer.status < 300:
                raise proxy_refusal(answer.status, uri=self._uri, endpoint=str(self.endpoint), proxy=str(proxy))

    def _take_idle(self) -> http.client.HTTPConnection | None:
        if self._idle.closed:
            raise StoreError("the store was closed", uri=self._uri)
        return self._idle.take()

    def _check(
        self, response: http.client.HTTPResponse, byte_range: ByteRange, etag: str | None, key: str
    ) -> str | None:
        headers = head_of(response.getheaders(), uri=self._uri, key=key)
        if response.status in (200, 206):
            if ("content-length" not in headers or "etag" not in headers) and not _has_more(response):
                # http.client takes the end of the stream for the end of the head, so headers were cut off.
                raise StoreUnavailable("the answer ended in its head", cause="EOFError", uri=self._uri, key=key)
            return check_answer(
                response.status, headers, byte_range, etag, uri=self._uri, key=key, range=str(byte_range)
            )
        body = b""
        with contextlib.suppress(OSError, http.client.HTTPException):  # the status is enough for the error
            body = response.read(MAX_ERROR_BODY_BYTES)
        raise refusal(response.status, headers, body, etag, uri=self._uri, key=key, range=str(byte_range))


def _has_more(response: http.client.HTTPResponse) -> bool:
    """Return whether any byte follows the head. Waits as long as a read may take."""
    return response.fp is not None and bool(response.fp.peek(1))
