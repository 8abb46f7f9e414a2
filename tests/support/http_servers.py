"""HTTP servers in threads of a test's process: with a handler of the test, or Longshore's own service."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from tests.support.ray_clusters import eventually

if TYPE_CHECKING:
    from serving.service import Service


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """Serve on a free port of 127.0.0.1, for as long as the block. The handler may note requests in `server.asked`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def place(server: ThreadingHTTPServer) -> str:
    """Return its URL."""
    return f"http://127.0.0.1:{server.server_address[1]}"


@contextlib.contextmanager
def http_server(service: Service) -> Iterator[str]:
    """Serve Longshore's HTTP service; yields its URL."""
    import uvicorn

    from serving.app import make_app

    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        eventually(lambda: server.started, "the service does not start")
        try:
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
