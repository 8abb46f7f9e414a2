"""The door of the HTTP service: tokens, hosts, origins, rates, sizes: for every route, and for those that are none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
from starlette.testclient import TestClient

from cluster.config import Config
from cluster.errors import ConfigError
from serving import access
from serving.access import Rates
from serving.app import make_app
from serving.service import Service
from serving.settings import SHORTEST_TOKEN, ServingSettings, digest_of

TOKEN = "correct-horse-battery-staple"
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/llama-1"),
    ("DELETE", "/v1/models/llama-1"),
    ("POST", "/v1/models:load"),
    ("POST", "/v1/models:plan"),
    ("GET", "/v1/loads/llama-1/events"),
    ("GET", "/v1/loads/llama-1/chunks"),
    ("GET", "/v1/cluster"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/route"),
]


def client_of(base_url: str = "http://localhost:8000", **settings: Any) -> TestClient:
    app = make_app(Service(ServingSettings(**settings), Config()))
    return TestClient(app, base_url=base_url, raise_server_exceptions=False)


@pytest.fixture
def guarded() -> Iterator[TestClient]:
    with client_of("http://longshore.example", token_sha256=digest_of(TOKEN)) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"x-token": TOKEN},
    ],
)
def test_requests_without_the_token_are_refused(
    guarded: TestClient, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = guarded.request(method, path, headers=headers, params={"token": TOKEN})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == "application/problem+json"
    assert TOKEN not in answer.text


def test_the_page_and_the_health_check_need_no_token(guarded: TestClient) -> None:
    for path in ("/", "/page.js", "/page.css", "/healthz"):
        assert guarded.get(path).status_code == 200
        head = guarded.head(path)  # as load balancers and `curl -I` ask
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["x-content-type-options"] == "nosniff"


def test_with_the_token_a_request_is_looked_at(guarded: TestClient) -> None:
    answer = guarded.post("/v1/models:load", headers={"authorization": f"bearer {TOKEN}"}, json={})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "[::2]:8000",
        "localhost:80@evil.example",
        "[::1]evil.example",
        "localhost.",
    ],
)
def test_without_a_token_only_this_machines_names_are_answered(host: str) -> None:
    with client_of() as client:
        assert client.get("/healthz", headers={"host": host}).status_code == 403
        for good in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"):
            assert client.get("/healthz", headers={"host": good}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:9"},
    ],
)
def test_without_a_token_cross_site_changes_are_refused(headers: dict[str, str]) -> None:
    with client_of() as client:
        assert client.post("/v1/models:load", json={}, headers=headers).status_code == 403
        assert client.delete("/v1/models/llama-1", headers=headers).status_code == 403
        own = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
        assert client.post("/v1/models:load", json={}, headers=own).status_code == 422


def test_without_a_token_cross_site_reads_are_refused() -> None:
    """No answer of a GET could be read by them, but a picture or a stream costs what its reader wants to have."""
    foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    with client_of() as client:
        for path in ("/v1/models/llama-1/plan.svg", "/v1/loads/llama-1/events", "/v1/cluster", "/openapi.json"):
            assert client.get(path, headers=foreign).status_code == 403
        for path in ("/", "/page.js", "/healthz"):  # (a link to the page is one from another site)
            assert client.get(path, headers=foreign).status_code == 200


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "cross-site"}, {"host": "evil.example"}])
def test_refused_cross_site_requests_use_up_no_rate(headers: dict[str, str]) -> None:
    with client_of(requests_per_minute=3) as client:
        answers = [client.get("/openapi.json", headers=headers).status_code for _ in range(9)]
        assert answers == [403] * 9
        assert client.get("/openapi.json").status_code == 200


@pytest.mark.parametrize("listening", ["10.1.2.3", "[fd00::1]"])
def test_reachable_services_without_a_token_refuse_requests(listening: str) -> None:
    """`serve run` and a RayService choose the address: the settings do not know it, and Host headers prove nothing."""
    with client_of(f"http://{listening}:8000") as client:
        for path in ("/", "/healthz", "/v1/models"):
            answer = client.get(path, headers={"host": "localhost"})
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:longshore:problem:ListensBeyond")
    with client_of(f"http://{listening}:8000", token_sha256=digest_of(TOKEN)) as client:
        assert client.get("/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_slow_bodies_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow bodies do not block other requests."""
    monkeypatch.setattr(access, "BODY_S", 0.3)
    monkeypatch.setattr(access, "BODIES", 2)
    app = make_app(Service(ServingSettings(), Config()))

    async def never_whole() -> Any:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def ask(method: str, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": b""}
        await app({**scope, "headers": [(b"host", b"localhost"), *headers]}, never_whole, send)
        return said[0]["status"], said[1]["body"]

    async def ask_all() -> None:
        slow = ("POST", "/v1/models:plan", (b"content-type", b"application/json"), (b"content-length", b"100"))
        for _ in range(2):  # the places of the first ones are given back
            *answers, health = await asyncio.gather(*(ask(*slow) for _ in range(3)), ask("GET", "/healthz"))
            assert [status for status, _ in answers] == [408, 408, 429]
            assert b"urn:longshore:problem:RequestTimeout" in answers[0][1]
            assert health[0] == 200

    asyncio.run(asyncio.wait_for(ask_all(), 60))


def test_bodies_are_bounded_whatever_their_declared_length() -> None:
    with client_of(body_bytes=1024) as client:
        assert client.post("/v1/models:load", content=b" " * 1025).status_code == 413
        assert client.post("/v1/models:load", content=(b" " * 100 for _ in range(11))).status_code == 413
        assert client.post("/v1/models:load", content=b"", headers={"content-length": "-1"}).status_code == 400
        small = client.post(
            "/v1/models:load", content=b"{}" + b" " * 1022, headers={"content-type": "application/json"}
        )
        assert small.status_code == 422


def test_clients_above_the_rate_get_retry_after() -> None:
    with client_of(requests_per_minute=3) as client:
        answers = [client.get("/healthz") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_callers_with_the_token_are_counted_by_their_addresses() -> None:
    """Else a handful of open pages would use up what everybody may ask."""
    app = make_app(Service(ServingSettings(token_sha256=digest_of(TOKEN), requests_per_minute=2), Config()))
    own = {"authorization": f"Bearer {TOKEN}"}
    for address in ("10.0.0.1", "10.0.0.2"):
        client = TestClient(app, client=(address, 1), raise_server_exceptions=False)
        assert [client.get("/openapi.json", headers=own).status_code for _ in range(3)] == [200, 200, 429]
        assert client.get("/openapi.json").status_code == 401  # who guesses is counted apart


@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 100), st.integers(0, 2)), max_size=60))
def test_clients_get_at_most_a_burst_and_the_rate(per_minute: int, asked: list[tuple[float, int]]) -> None:
    now_s = 0.0
    rates = Rates(per_minute, lambda: now_s)
    got: dict[int, int] = {}
    for after_s, caller in asked:
        now_s += after_s
        got[caller] = got.get(caller, 0) + (rates.wait_s(str(caller)) == 0)
    assert all(count <= per_minute * (1 + now_s / 60) + 1e-6 for count in got.values())


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/page.js/../../pyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/%00",
        "/page/index.html",
        "/v1/loads/a%0d%0aset-cookie:%20x/events",
        "/v1/models/",
        "//v1/models",
    ],
)
def test_paths_cannot_leave_the_folder(path: str) -> None:
    with client_of() as client:
        answer = client.get(path, follow_redirects=False)
    assert answer.status_code in (400, 404, 422)
    assert "root:" not in answer.text
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "longshore.example", ""])
def test_without_a_token_it_listens_on_this_machine_only(host: str) -> None:
    with pytest.raises(ConfigError, match="this machine only"):
        ServingSettings.from_env({"LONGSHORE_HTTP_HOST": host})
    settings = ServingSettings.from_env({"LONGSHORE_HTTP_HOST": host, "LONGSHORE_HTTP_TOKEN": TOKEN})
    assert TOKEN not in repr(settings)
    assert TOKEN not in settings.model_dump_json()


def test_invalid_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="LONGSHORE_HTTP_PORT"):
        ServingSettings.from_env({"LONGSHORE_HTTP_PORT": "99999"})
    with pytest.raises(ConfigError, match=str(SHORTEST_TOKEN)):
        ServingSettings.from_env({"LONGSHORE_HTTP_TOKEN": "short"})
    with pytest.raises(ConfigError, match="LONGSHORE_HTTP_ENDPOINTS"):
        ServingSettings.from_env({"LONGSHORE_HTTP_ENDPOINTS": "not a server"})
