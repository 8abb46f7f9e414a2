"""A server that reads HTTP requests and plays what it is told: the ways in which an answer can be bad."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable

Play = Callable[[socket.socket, int], None]  # one request was read; the number counts requests on the connection


class ScriptedServer:
    """Reads requests, plays what it is told, and remembers the requests of all connections."""

    def __init__(self, play: Play, tls: ssl.SSLContext | None = None) -> None:
        self._play = play
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heads: list[str] = []
        self.connections = 0
        self._mine = threading.local()
        self.over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def head(self) -> str:
        """Of the request that the calling thread plays for: the last of `heads` may be another connection's."""
        head: str = self._mine.head
        return head

    def close(self) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        try:
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
        except OSError:
            return
        finally:
            client.close()


def answer(status: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
