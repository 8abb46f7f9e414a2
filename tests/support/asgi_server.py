"""The HTTP service as a real server on a real socket, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from serving.app import make_app
from serving.service import Service

STARTED_S = 20.0


@contextlib.contextmanager
def http_server(service: Service) -> Iterator[str]:
    """Its URL."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        give_up_s = time.monotonic() + STARTED_S
        while not server.started and time.monotonic() < give_up_s:
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
