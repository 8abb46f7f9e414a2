"""A server that reads HTTP requests and answers each with bytes that a test wrote, right or wrong."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable

import psutil

Play = Callable[[socket.socket, int], None]  # one request was read; the number counts requests on the connection


class ScriptedServer:
    """A server that reads requests, plays its script, and records the requests of all connections."""

    def __init__(self, play: Play, tls: ssl.SSLContext | None = None) -> None:
        self._play, self._tls = play, tls
        self.heads: list[str] = []
        self.connections = 0
        self.over = threading.Event()
        self._mine = threading.local()
        server = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    server._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            request_queue_size = 128

            def verify_request(self, request: object, client_address: object) -> bool:
                server.connections += 1
                return True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def head(self) -> str:
        """The request that the calling thread plays for: the last of `heads` may be another connection's."""
        head: str = self._mine.head
        return head

    def close(self) -> None:
        """End, once every connection has."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, client: socket.socket) -> None:
        with self._tls.wrap_socket(client, server_side=True) if self._tls else client as sock:
            sock.settimeout(5)
            for number in range(100):
                head = b""
                while b"\r\n\r\n" not in head:
                    data = sock.recv(65536)
                    if not data:
                        return
                    head += data
                self._mine.head = head.decode("latin-1")
                self.heads.append(self._mine.head)
                self._play(sock, number)


def connections_to(port: int) -> int:
    """Return how many connections this process has to that port."""
    return sum(bool(each.raddr) and each.raddr.port == port for each in psutil.Process().net_connections("tcp"))


def answer(status: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
