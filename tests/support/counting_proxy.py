"""An HTTP proxy in front of a store that records each request and the bytes of its answer.

    with CountingProxy(server.endpoint_url) as proxy:
        ... endpoint_url=proxy.endpoint_url ...
        proxy.requests()          [Request(method, path, range, status, body_bytes), ...]

The Host header is passed on as it is, so the server behind must not mind the port in it being another (signatures
cover what the client sent, which is what arrives).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.client import responses
from typing import Any, Self
from urllib.parse import unquote, urlsplit


@dataclass(slots=True)
class Request:
    """One request and what came back."""

    method: str
    path: str  # decoded, without the query: "/bucket/key"
    range: tuple[int, int] | None  # half-open, as asked for
    status: int = 0  # 0 until the answer has begun
    body_bytes: int = 0  # of the answer, as they passed; fewer than promised while it comes or when somebody broke off
    fields: dict[str, str] = field(default_factory=dict, repr=False)  # its headers, by lower-case name
    client_port: int = 0

    @property
    def is_weights(self) -> bool:
        """Return whether it asks for a range of a shard: manifest, index and whole files are not weights."""
        return self.method == "GET" and self.range is not None and self.path.endswith(".safetensors")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server: its head is read, its body is still on the stream."""

    head: bytes
    fields: dict[str, str]  # the head's, by lower-case name
    stream: Any
    has_body: bool


def s3_refusal(status: int, code: str, message: str = "as the test has it") -> bytes:
    """Return an answer with S3's error document; without its code when `code` is empty."""
    named = f"<Code>{code}</Code>" if code else ""
    body = f"<?xml version='1.0'?><Error>{named}<Message>{message}</Message></Error>"
    head = f"HTTP/1.1 {status} {responses.get(status, 'Refused')}\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class CountingProxy:
    """Listens on a free port of 127.0.0.1, or of another address; every client connection gets one to the server."""

    def __init__(self, upstream_url: str, address: str = "127.0.0.1") -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._lock = threading.Lock()
        self._answered: list[Request] = []
        self._connections: dict[threading.Thread, socket.socket] = {}
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
        """Requests so far, in the order in which their answers began. Every complete answer is included."""
        with self._lock:
            return [replace(request) for request in self._answered if request.method == method]

    def bytes_by_path(self) -> dict[str, int]:
        """Body bytes of successful GETs of objects, by path."""
        found: collections.Counter[str] = collections.Counter()
        for request in self.requests():
            if request.status in (200, 206) and request.path.count("/") > 1:
                found[request.path] += request.body_bytes
        return dict(found)

    def before_request(self, request: Request) -> None:
        """Called before a request goes on to the server; for kinds of proxy that delay."""

    def refusal(self, request: Request) -> bytes | None:
        """An answer to give instead of the server's; for kinds of proxy that refuse."""
        return None

    def passing(self, request: Request, size_bytes: int) -> None:
        """Hook before this many bytes of an answer's body are passed on. Slow proxies override it."""

    def pass_answer(self, answer: Answer, client: socket.socket, count: Callable[[int], None]) -> None:
        """Pass an answer on, and say how many bytes of its body go; for kinds of proxy that damage it."""
        client.sendall(answer.head)
        if answer.has_body:
            _pass_body(answer.stream, client, answer.fields, count)

    def after_request(self, request: Request) -> None:
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _note(self, request: Request, answer: bytes) -> None:
        request.status = int(answer.split(b" ", 2)[1])
        with self._lock:
            self._answered.append(request)

    def _serve(self, client: socket.socket) -> None:
        with socket.create_connection(self._upstream) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with client.makefile("rb") as from_client, server.makefile("rb") as from_server:
                while True:
                    head, fields = _read_head(from_client)
                    method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
                    if fields.get("expect", "").lower() == "100-continue":  # answered here, so the body follows at once
                        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                        head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
                    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", fields.get("range", ""))
                    byte_range = (int(asked[1]), int(asked[2]) + 1) if asked else None
                    path = unquote(urlsplit(target).path)
                    request = Request(method, path, byte_range, fields=fields, client_port=client.getpeername()[1])
                    self.before_request(request)
                    refusal = self.refusal(request)
                    if refusal is not None:  # (of a request without a body)
                        self._note(request, refusal)
                        client.sendall(refusal)
                        continue
                    try:
                        server.sendall(head)
                        _pass_body(from_client, server, fields)
                        answer, answer_fields = _read_head(from_server)
                        self._note(request, answer)
                        has_body = method != "HEAD" and request.status not in (204, 304)
                        whole = Answer(answer, answer_fields, from_server, has_body)
                        self.pass_answer(whole, client, functools.partial(self._count, request))
                    finally:
                        self.after_request(request)
                    if "close" in (fields.get("connection", ""), answer_fields.get("connection", "")):
                        return

    def _count(self, request: Request, size_bytes: int) -> None:
        self.passing(request, size_bytes)
        request.body_bytes += size_bytes


def _read_head(stream: Any) -> tuple[bytes, dict[str, str]]:
    lines = []
    while not lines or lines[-1] != b"\r\n":
        lines.append(stream.readline(65536))
        if not lines[-1]:
            raise EOFError
    named = (line.decode("latin-1").partition(":") for line in lines[1:-1])
    return b"".join(lines), {name.strip().lower(): value.strip() for name, _, value in named}


def _pass_body(
    stream: Any, to: socket.socket, fields: dict[str, str], passing: Callable[[int], None] = lambda size: None
) -> None:
    """Pass one body on, chunk framing and all."""
    if "chunked" in fields.get("transfer-encoding", "").lower():
        size = -1
        while size:
            line = stream.readline(1024)
            size = int(line.split(b";")[0], 16)
            to.sendall(line)
            passing(size)
            to.sendall(stream.read(size + 2))
        return
    left = int(fields.get("content-length", 0))
    while left:
        data = stream.read1(min(left, 1 << 20))
        if not data:
            raise EOFError
        passing(len(data))
        to.sendall(data)
        left -= len(data)
