"""Event streams of the HTTP service over a scripted load: how many, where they begin, no place is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
from starlette.testclient import TestClient

from cluster.telemetry.report import ClusterStatus
from serving.app import make_app
from serving.settings import ServingSettings
from tests.support.scripted_service import Script, ScriptedService

pytestmark = pytest.mark.slow

PATH = "/v1/loads/llama-70b-3f9a21c4/events"


def ended(events: int) -> Script:
    """Return a load that failed after this many events."""
    script = Script(part=0.5, error="the store is gone")
    for number in range(events):
        script.note("note", f"event {number}")
    return script


async def status_of(app: Any, *, gone: bool = False) -> int:
    """Ask for the stream until it ends, or as a client that is `gone` when the answer begins (then 0)."""
    found: list[int] = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        if gone:
            raise OSError("the client is gone")
        if message["type"] == "http.response.start":
            found.append(message["status"])

    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.4"},  # a server whose `send` says that the client is gone
        "method": "GET",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not gone:
            raise
    return found[0] if found else 0


class SlowlyAsked(ScriptedService):
    """A cluster that answers concurrent requests at the same moment."""

    async def status(self) -> ClusterStatus:
        await asyncio.sleep(0.2)
        return await super().status()


def test_concurrent_streams_are_limited() -> None:
    app = make_app(SlowlyAsked(ended(0), ServingSettings(streams=1)))

    async def ask() -> list[int]:
        return await asyncio.gather(*(status_of(app) for _ in range(4)))

    assert sorted(asyncio.run(ask())) == [200, 429, 429, 429]


def test_a_client_that_leaves_early_frees_its_stream() -> None:
    app = make_app(ScriptedService(ended(3), ServingSettings(streams=1)))

    async def ask() -> list[int]:
        return [await status_of(app, gone=True), await status_of(app, gone=True), await status_of(app)]

    assert asyncio.run(ask()) == [0, 0, 200]


@pytest.mark.parametrize(("headers", "first"), [({}, 1), ({"last-event-id": "3"}, 4), ({"last-event-id": "9"}, None)])
def test_a_stream_resumes_after_the_load_ended(headers: dict[str, str], first: int | None) -> None:
    with TestClient(make_app(ScriptedService(ended(5))), base_url="http://localhost") as client:
        answer = client.get(PATH, headers=headers)
        assert client.get(PATH, headers={"last-event-id": "x"}).status_code == 422
    numbers = [int(line.removeprefix("id: ")) for line in answer.text.split("\n") if line.startswith("id: ")]
    assert numbers == ([] if first is None else list(range(first, 6)))
    assert answer.text.rstrip().split("\n\n")[-1].startswith("event: end\n")
