"""The HTTP service refuses bad requests before it asks a cluster, and explains each refusal."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
import httpx2 as httpx
from starlette.testclient import TestClient

import cluster.errors as load_errors
import storage.errors as byte_errors
from cluster import client as cluster_client
from cluster.config import Config
from cluster.layouts.mesh import Layout
from cluster.request import StoreAccess
from cluster.telemetry.scale_report import ScaleReport
from serving.app import make_app
from serving.schemas import MEDIA_TYPE, problem_of, status_of
from serving.service import Service
from serving.settings import ServingSettings
from storage.errors import LongshoreError
from storage.store_ref import StoreRef
from tests.support.checkpoints import write_tiny_llama
from tests.support.http_servers import http_server
from tests.support.scripted_service import Script, ScriptedService
from tests.support.stored_models import StoredModel

NOWHERE = "127.0.0.1:1"  # no cluster


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = make_app(Service(ServingSettings(), Config()))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as made:
        yield made


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"uri": "file:///etc"}, 403, "SourceRefused"),
        ({"uri": "/etc"}, 422, "ConfigError"),
        ({"uri": "memory://x"}, 403, "SourceRefused"),
        ({"uri": "s3://bucket/x", "endpoint_url": "http://169.254.169.254"}, 403, "SourceRefused"),
        ({"uri": "http://169.254.169.254/latest"}, 403, "SourceRefused"),
        ({"uri": "s3://bucket/x", "profile": "root"}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "offload_folder": "/etc"}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "credentials": {}}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "layout_rules": "/etc/passwd"}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "tensor_parallel_size": 0}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "tensor_parallel_size": 10**9}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "quantization": "int3"}, 422, "ConfigError"),
        ({"uri": "s3://bucket/x", "dtype": "int8"}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "dtype": "fp32", "quantization": "fp8"}, 422, "ConfigError"),
        ({"uri": "s3://bucket/x", "fit": "maybe"}, 422, "BadRequest"),
        ({"uri": "s3://bucket/x", "revision": "5f0c"}, 422, "BadRequest"),
        ({"uri": "s3://BAD BUCKET/x"}, 422, "InvalidUri"),
        ({"uri": "x" * 5000}, 422, "BadRequest"),
        ([], 422, "BadRequest"),
        (None, 422, "BadRequest"),
    ],
)
@pytest.mark.parametrize("verb", ["load", "plan"])
def test_bad_requests_are_refused_before_a_cluster_is_asked(
    client: TestClient, verb: str, body: Any, status: int, kind: str
) -> None:
    answer = client.post(f"/v1/models:{verb}", json=body)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:longshore:problem:{kind}")
    assert answer.headers["content-type"] == MEDIA_TYPE


@pytest.mark.parametrize(
    ("verb", "body", "status", "kind"),
    [
        ("update", {"uri": "/etc"}, 422, "ConfigError"),
        ("update", {"uri": "file:///etc"}, 403, "SourceRefused"),
        ("update", {"uri": "s3://bucket/x", "endpoint_url": "http://169.254.169.254"}, 403, "SourceRefused"),
        (
            "update",
            {"uri": "s3://bucket/x"},
            403,
            "SourceRefused",
        ),  # the model's own server is none that requests may name
        ("update", {"endpoint_url": "http://169.254.169.254"}, 403, "SourceRefused"),  # of the model's own place
        ("update", {"uri": "s3://BAD BUCKET/x"}, 422, "InvalidUri"),
        ("update", {"uri": "s3://bucket/x", "profile": "root"}, 422, "BadRequest"),
        ("update", {"uri": "s3://bucket/x", "credentials": {}}, 422, "BadRequest"),
        ("update", {"uri": "s3://bucket/x", "revision": "5f0c"}, 422, "BadRequest"),
        ("update", {"streaming": 2}, 422, "BadRequest"),
        ("update", None, 422, "BadRequest"),
        ("scale", {"data_parallel_size": 0}, 422, "BadRequest"),
        ("scale", {"data_parallel_size": 10**9}, 422, "BadRequest"),
        ("scale", {"data_parallel_size": 2, "tensor_parallel_size": 2}, 422, "BadRequest"),
        ("scale", {}, 422, "BadRequest"),
    ],
)
def test_bad_changes_of_a_model_are_refused_before_they_begin(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, verb: str, body: Any, status: int, kind: str
) -> None:
    store = StoreAccess(StoreRef("s3", "bucket", "m", endpoint_url="http://10.0.0.1:9000"))
    now = SimpleNamespace(uri=store.ref.uri, store=store, signed_name="")
    monkeypatch.setattr(cluster_client, "request_of", lambda *_, **__: now)
    monkeypatch.setattr(cluster_client, f"a{verb}", None)
    answer = client.post(f"/v1/models/m-1:{verb}", json=body)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:longshore:problem:{kind}"), answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE


def test_a_change_that_takes_long_goes_on_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts among what is under way, and its answer has the report once it is done in time."""
    script, ends = Script(part=1.0), threading.Event()
    report = ScaleReport(script.model_id, 1, Layout(data_parallel_size=2), (1,))

    async def scales(model_id: str, data_parallel_size: int, **_: Any) -> ScaleReport:
        assert (model_id, data_parallel_size) == (script.model_id, 2)
        await asyncio.to_thread(ends.wait, 20)
        return report

    monkeypatch.setattr(cluster_client, "ascale", scales)
    path, body = f"/v1/models/{script.model_id}:scale", {"data_parallel_size": 2}
    service = ScriptedService(script, ServingSettings(loads=1))
    with http_server(service) as url, httpx.Client(base_url=url, timeout=60) as made:
        answer = made.post(f"{path}?wait_s=0", json=body)
        assert (answer.status_code, answer.json()["done"]) == (202, False)
        assert answer.headers["location"] == f"/v1/models/{script.model_id}"
        assert made.post(path, json=body).status_code == 429
        ends.set()
        answers = (made.post(path, json=body) for _ in range(200))
        done = next(answer for answer in answers if answer.status_code != 429)
    assert done.status_code == 200
    assert done.json() == {
        "model_id": script.model_id,
        "done": True,
        "report": report.as_dict() | {"ranks": [1], "hosts": []},
    }


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_json_needs_its_content_type(client: TestClient, headers: dict[str, str]) -> None:
    """A form of another site's page needs no leave of ours to send such a body; `curl -d` sends it so too."""
    answer = client.post("/v1/models:load", content=b'{"uri": "s3://models/llama"}', headers=headers)
    assert answer.status_code == 422
    assert "content-type: application/json" in answer.json()["hint"]


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"uri":' + b'{"a":' * 30_000 + b"1" + b"}" * 30_001,
        b'{"uri": "s3://m/x", "gpu_memory_utilization": NaN}',
        b'{"uri": "s3://m/x", "reserve_bytes": Infinity}',
        b'{"uri": "s3://m/x", "gpu_memory_utilization": 1e400}',
        b'{"uri": "s3://m/x", "tensor_parallel_size": ' + b"9" * 5000 + b"}",
        b'{"uri": "s3://m/x", "\\ud800": 1}',
        b'{"uri": "s3://m/\\ud800"}',
        b'{"uri": "s3://m/\\u0000"}',
        b'{"uri": "s3://m/\xff"}',
        b'{"uri": "s3://m/x", "layout_rules": {"\\ud800": "column"}}',
        b'{"uri": "s3://m/x", "uri": "file:///etc"}',
    ],
    ids=lambda body: repr(body[:60]),
)
def test_odd_json_is_a_problem(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/models:load", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 403, 422)
    assert answer.headers["content-type"] == MEDIA_TYPE


@pytest.mark.parametrize(
    "body",
    [
        {"uri": "s3://AKIA:SEKRET@models/llama"},
        {"uri": "s3://models/llama?X-Amz-Signature=SEKRET"},
        {"uri": "az://models/llama?sv=1&sig=SEKRET"},
        {"uri": "memory://llama#SEKRET"},
        {"uri": "https://models.s3.amazonaws.com/llama?X-Amz-Signature=SEKRET"},
        {"uri": "s3://models/llama", "endpoint_url": "http://user:SEKRET@127.0.0.1:9"},
        {"uri": "s3://models/llama", "endpoint_url": "http://127.0.0.1:9?key=SEKRET"},
    ],
)
def test_secrets_in_requests_come_back_nowhere(
    client: TestClient, body: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for verb in ("load", "plan"):
        answer = client.post(f"/v1/models:{verb}", json=body)
        assert answer.status_code in (403, 422)
        assert "SEKRET" not in answer.text
    assert "SEKRET" not in caplog.text


def kinds_of(module: Any) -> list[type[LongshoreError]]:
    return [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, LongshoreError)]


@pytest.mark.parametrize("kind", [*kinds_of(byte_errors), *kinds_of(load_errors)], ids=lambda kind: kind.__name__)
def test_every_error_becomes_a_problem_document(kind: type[LongshoreError]) -> None:
    error = kind("what was wrong", hint="what to do", size=3, odd=object)
    answer = problem_of(error)
    assert answer.status_code == status_of(error) >= 400
    assert answer.media_type == MEDIA_TYPE
    assert b"what was wrong" in bytes(answer.body)
    assert b"what to do" in bytes(answer.body)


@pytest.mark.parametrize(
    ("body", "where"),
    [(b'{"uri": ', ", at character 8"), (b"not json", ", at character 0"), (b"\xff", ""), (b"[" * 100_000, "")],
)
@pytest.mark.parametrize("verb", ["load", "plan"])
def test_an_invalid_json_body_is_400_as_documented(client: TestClient, verb: str, body: bytes, where: str) -> None:
    path = f"/v1/models:{verb}"
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (400, MEDIA_TYPE)
    said = answer.json()
    assert (said["type"], said["status"]) == ("urn:longshore:problem:NoJson", 400)
    assert said["detail"].startswith("the body is no JSON")
    assert said["detail"].endswith(where)
    assert "content-type: application/json" in said["hint"]
    listed = client.get("/openapi.json").json()["paths"][path]["post"]["responses"]["400"]
    assert listed["content"] == {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
    assert "| 400, 408 | the body is no JSON (`urn:longshore:problem:NoJson`)" in page


def test_names_with_lone_surrogates_are_returned_intact() -> None:
    odd = "tensor '\ud800' is not there"
    script = Script(part=0.5, error=odd)
    with TestClient(make_app(ScriptedService(script)), base_url="http://localhost") as made:
        (of_all,) = made.get("/v1/models").json()["models"]
        (of_cluster,) = made.get("/v1/cluster").json()["models"]
        alone = made.get(f"/v1/models/{script.model_id}").json()
    assert of_all["error"] == of_cluster["error"] == alone["error"] == odd
    answer = problem_of(LongshoreError(odd, hint="\udfff", size=float("nan"), rate=float("inf")))
    assert json.loads(bytes(answer.body))["detail"] == odd


def test_unexpected_errors_show_only_their_class() -> None:
    answer = problem_of(KeyError("secret"))
    assert answer.status_code == 500
    assert b"secret" not in bytes(answer.body)


def test_every_operation_documents_itself_and_its_problems(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            if path != "/healthz":
                assert {"401", "429", "503"} <= set(operation["responses"]), (method, path)
    assert "Problem" in document["components"]["schemas"]
    for schema in ("LoadBody", "PlanBody", "UpdateBody", "ScaleBody", "Begun", "Change", "Problem"):
        assert document["components"]["schemas"][schema].get("examples"), schema


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_default_endpoint_is_that_of_the_pod(
    name: str, llama: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Secret gives the pods their endpoint and keys."""
    keys = llama.server.credentials()
    for variable, value in {
        name: llama.server.endpoint_url,
        "AWS_REGION": llama.server.region,
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
    }.items():
        monkeypatch.setenv(variable, str(value))
    app = make_app(Service(ServingSettings(), Config(), NOWHERE))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        planned = client.post("/v1/models:plan", json={"uri": llama.uri})
        assert planned.status_code == 200, planned.text
        other = {"uri": llama.uri, "endpoint_url": "http://127.0.0.1:9"}
        refused = client.post("/v1/models:plan", json=other)
        assert (refused.status_code, refused.json()["type"]) == (403, "urn:longshore:problem:SourceRefused")


def test_only_the_revision_that_is_asked_for(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    app = make_app(Service(ServingSettings(schemes="file"), Config(), NOWHERE))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        planned = client.post("/v1/models:plan", json={"uri": f"file://{tmp_path}"})
        revision = planned.json()["revision"]
        assert client.post("/v1/models:plan", json={"uri": f"file://{tmp_path}", "revision": revision}).is_success
        refused = client.post("/v1/models:plan", json={"uri": f"file://{tmp_path}", "revision": "0" * 64})
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:longshore:problem:RevisionMismatch")
        assert refused.json()["details"]["found"] == revision


def test_a_replica_that_ends_leaves_no_thread() -> None:
    others = set(threading.enumerate())
    service = Service(ServingSettings(endpoints="http://127.0.0.1:9"), Config(), NOWHERE)
    with TestClient(make_app(service), base_url="http://localhost", raise_server_exceptions=False) as client:
        assert client.get("/v1/models").status_code == 503
        ours = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("longshore-http")]
        assert ours
    for thread in ours:
        thread.join(10)
        assert not thread.is_alive()
