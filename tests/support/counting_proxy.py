"""An HTTP pass-through that writes down what leaves the store: one line per request, with the bytes of its body.

    with CountingProxy(server.endpoint_url) as proxy:
        ... endpoint_url=proxy.endpoint_url ...
        proxy.requests()          [Request(method, path, range, status, body_bytes), ...]

The Host header is passed on as it is, so the server behind must not mind the port in it being another (signatures
cover what the client sent, which is what arrives).
"""

from __future__ import annotations

import collections
import contextlib
import re
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import psutil


@dataclass(frozen=True, slots=True)
class Request:
    """One request and what came back."""

    method: str
    path: str  # decoded, without the query: "/bucket/key"
    range: tuple[int, int] | None  # half-open, as asked for
    status: int
    body_bytes: int  # of the answer, as they passed; fewer than promised while it comes or when somebody broke off


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server: its head is read, its body is still on the stream."""

    head: bytes
    fields: dict[str, str]  # the head's, by lower-case name
    stream: Any
    has_body: bool


@dataclass(slots=True)
class Passed:
    """Counts the bytes of one body that were passed on."""

    each: Callable[[int], None]
    total_bytes: int = 0

    def __call__(self, size_bytes: int) -> None:
        self.each(size_bytes)
        self.total_bytes += size_bytes


class CountingProxy:
    """Listens on a free port of 127.0.0.1, or of another address; every client connection gets one to the server."""

    def __init__(self, upstream_url: str, address: str = "127.0.0.1") -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._lock = threading.Lock()
        self._answered: list[tuple[Request, Passed]] = []  # the bytes of its body are in the second
        self._connections: dict[threading.Thread, socket.socket] = {}
        # Of this connection: `fields` are its request's headers, by lower-case name; `port` is its client's.
        self.heads = threading.local()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with proxy._lock:
                    proxy._connections[threading.current_thread()] = self.request
                try:
                    with contextlib.suppress(OSError, EOFError):
                        proxy._serve(self.request)
                finally:
                    with proxy._lock:
                        del proxy._connections[threading.current_thread()]

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            allow_reuse_address = True
            request_queue_size = 128

        self._server = Server((address, 0), Handler)
        self.endpoint_url = f"http://{address}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def requests(self, method: str = "GET") -> list[Request]:
        """Requests so far, in the order in which their answers began; whoever has an answer whole finds it here."""
        with self._lock:
            answered = [(request, passed.total_bytes) for request, passed in self._answered]
        return [replace(request, body_bytes=size) for request, size in answered if request.method == method]

    def bytes_by_path(self) -> dict[str, int]:
        """Body bytes of successful GETs of objects, by path."""
        found: collections.Counter[str] = collections.Counter()
        for request in self.requests():
            if request.status in (200, 206) and request.path.count("/") > 1:
                found[request.path] += request.body_bytes
        return dict(found)

    def before_request(self, method: str, path: str, byte_range: tuple[int, int] | None) -> None:
        """Called before a request goes on to the server; for kinds of proxy that delay."""

    def refusal(self, method: str, path: str, byte_range: tuple[int, int] | None) -> bytes | None:
        """An answer to give instead of the server's; for kinds of proxy that refuse."""
        return None

    def passing(self, path: str, size_bytes: int) -> None:
        """Called before so many bytes of an answer's body are passed on; for kinds of proxy that are slow."""

    def pass_answer(self, answer: Answer, client: socket.socket, count: Callable[[int], None]) -> None:
        """Pass an answer on, and say how many bytes of its body go; for kinds of proxy that damage it."""
        client.sendall(answer.head)
        if answer.has_body:
            _pass_body(answer.stream, client, answer.fields, count)

    def after_request(self, method: str, path: str, byte_range: tuple[int, int] | None) -> None:
        """Called when a request that was not refused has been answered, or its connection was lost."""

    def clear(self) -> None:
        """Forget what was written down."""
        with self._lock:
            self._answered.clear()

    def close(self) -> None:
        """Stop listening and end every connection; no thread is left."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
        with self._lock:
            connections = dict(self._connections)
        for thread, client in connections.items():
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, request: Request, passed: Passed) -> None:
        with self._lock:
            self._answered.append((request, passed))

    def _serve(self, client: socket.socket) -> None:
        self.heads.port = client.getpeername()[1]
        with socket.create_connection(self._upstream) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with client.makefile("rb") as from_client, server.makefile("rb") as from_server:
                while True:
                    head, fields = _read_head(from_client)
                    self.heads.fields = fields
                    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
                    expects = fields.get("expect", "").lower() == "100-continue"
                    if expects:  # answered here, so that the body follows at once
                        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                        head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
                    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", fields.get("range", ""))
                    byte_range = (int(asked[1]), int(asked[2]) + 1) if asked else None
                    path = unquote(urlsplit(target).path)
                    self.before_request(method, path, byte_range)
                    refusal = self.refusal(method, path, byte_range)
                    if refusal is not None:  # (of a request without a body)
                        status = int(refusal.split(b" ", 2)[1])
                        self._note(Request(method, path, byte_range, status, 0), Passed(lambda size_bytes: None))
                        client.sendall(refusal)
                        continue
                    try:
                        server.sendall(head)
                        _pass_body(from_client, server, fields)
                        answer, answer_fields = _read_head(from_server)
                        status = int(answer.split(b" ", 2)[1])
                        has_body = method != "HEAD" and status not in (204, 304)
                        passed = Passed(lambda size_bytes, path=path: self.passing(path, size_bytes))  # type: ignore[misc]
                        self._note(Request(method, path, byte_range, status, 0), passed)
                        self.pass_answer(Answer(answer, answer_fields, from_server, has_body), client, passed)
                    finally:
                        self.after_request(method, path, byte_range)
                    if "close" in (fields.get("connection", ""), answer_fields.get("connection", "")):
                        return


def ports_of(pid: int) -> set[int]:
    """Ports of a process's own TCP connections, by which a proxy tells who asks; none when it is dead."""
    try:
        return {connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp")}
    except psutil.NoSuchProcess:
        return set()


def _read_head(stream: object) -> tuple[bytes, dict[str, str]]:
    lines = []
    while True:
        line = stream.readline(65536)  # type: ignore[attr-defined]
        if not line:
            raise EOFError
        lines.append(line)
        if line == b"\r\n":
            break
    fields = {}
    for line in lines[1:-1]:
        name, _, value = line.decode("latin-1").partition(":")
        fields[name.strip().lower()] = value.strip()
    return b"".join(lines), fields


def _pass_body(
    stream: object, to: socket.socket, fields: dict[str, str], passing: Callable[[int], None] = lambda size: None
) -> int:
    """Pass one body on; its length without chunk framing."""
    if "chunked" in fields.get("transfer-encoding", "").lower():
        total = 0
        while True:
            line = stream.readline(1024)  # type: ignore[attr-defined]
            size = int(line.split(b";")[0], 16)
            to.sendall(line)
            passing(size)
            to.sendall(stream.read(size + 2))  # type: ignore[attr-defined]
            total += size
            if not size:
                return total
    left = total = int(fields.get("content-length", 0))
    while left:
        data = stream.read1(min(left, 1 << 20))  # type: ignore[attr-defined]
        if not data:
            raise EOFError
        passing(len(data))
        to.sendall(data)
        left -= len(data)
    return total
