"""An HTTP proxy as companies have them: CONNECT for https, requests with whole URLs for http, maybe with a password."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class ForwardProxy:
    """Passes all requests on to one local port, whatever host they name. Remembers what it was asked."""

    def __init__(self, port: int, authorization: str | None = None, connect_status: int = 200) -> None:
        self.asked: list[str] = []  # "CONNECT host:port", "GET http://host/path"
        self.authorizations: list[str | None] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_CONNECT(self) -> None:
                if not self.admitted():
                    return
                if connect_status != 200:
                    self.send_error(connect_status)
                    return
                with socket.create_connection(("127.0.0.1", port)) as upstream:
                    self.send_response(200, "Connection established")
                    self.end_headers()
                    back = threading.Thread(target=pump, args=(upstream, self.connection), daemon=True)
                    back.start()
                    pump(self.connection, upstream)
                    back.join(5)
                self.close_connection = True

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not self.admitted():
                    return
                lines = [f"{self.command} {urlsplit(self.path).path} HTTP/1.1"]
                lines += [f"{name}: {value}" for name, value in self.headers.items() if not name.startswith("Proxy-")]
                with socket.create_connection(("127.0.0.1", port)) as upstream:
                    upstream.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + body)
                    upstream.shutdown(socket.SHUT_WR)
                    pump(upstream, self.connection)
                self.close_connection = True

            do_GET = do_HEAD = do_PUT = forward

            def admitted(self) -> bool:
                proxy.asked.append(f"{self.command} {self.path}")
                proxy.authorizations.append(self.headers.get("Proxy-Authorization"))
                if authorization is None or proxy.authorizations[-1] == authorization:
                    return True
                self.send_error(407)
                return False

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until `source` ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
