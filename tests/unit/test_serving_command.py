"""`longshore serve` watches its application: it waits while that is busy and reports when it is gone."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler

import pytest

from cluster.errors import ClusterLost
from serving import command
from tests.support.http_servers import place, serving

pytestmark = pytest.mark.slow


class Busy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(429)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_the_command_ends_when_its_application_is_gone_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(command, "LOOK_S", 0.01)
    monkeypatch.setattr(command, "SILENT_S", 3.0)
    monkeypatch.setattr(command, "stop", lambda: stopped.append(True))
    ended: list[BaseException] = []

    def serve() -> None:
        try:
            command.serve_until_interrupted(None, None, None, lambda url: None)
        except ClusterLost as error:
            ended.append(error)

    with serving(Busy) as server:
        monkeypatch.setattr(command, "start", lambda settings, address: f"{place(server)}/")
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        while len(server.asked) < 3 and thread.is_alive():  # type: ignore[attr-defined]
            thread.join(0.01)
        assert thread.is_alive()
    thread.join(60)
    assert len(ended) == 1
    assert not stopped  # of a cluster that is lost nothing can be taken away, and another's is not ours
