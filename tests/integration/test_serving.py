"""The HTTP service over a real cluster and a real bucket: loads, views, streams, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
import httpx2 as httpx

from cluster.config import Config
from serving.service import Service
from serving.settings import ServingSettings, digest_of
from tests.support.changed_models import changed_copy
from tests.support.http_servers import http_server
from tests.support.ray_clusters import CREDENTIALS_FILE, Longshore, eventually
from tests.support.stored_models import StoredModel, publish_to

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-sufficient-length"


@pytest.fixture
def api(longshore: Longshore, llama: StoredModel) -> Iterator[httpx.Client]:
    settings = ServingSettings(endpoints=llama.server.endpoint_url, token_sha256=digest_of(TOKEN))
    with (
        http_server(Service(settings, Config(), longshore.address)) as url,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as client,
    ):
        yield client


def frames(client: httpx.Client, path: str, **params: Any) -> list[dict[str, Any]]:
    """Every event of a stream until it ends: {"event", "id", "data"}."""
    with client.stream("GET", path, params=params) as answer:
        return frames_of(answer)


def frames_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    text = "".join(answer.iter_text())
    found = []
    for part in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append({**fields, "data": json.loads(fields["data"])})
    return found


def state_of(client: httpx.Client, model_id: str) -> str:
    return str(client.get(f"/v1/models/{model_id}").json()["progress"]["state"])


def test_a_model_is_loaded_watched_and_freed(api: httpx.Client, readable: dict[str, Any], llama: StoredModel) -> None:
    answer = api.post("/v1/models:load", json={**readable, "tensor_parallel_size": 2})
    assert answer.status_code in (200, 202), answer.text
    model_id = answer.json()["model_id"]
    assert answer.headers["location"] == f"/v1/models/{model_id}"

    told = frames(api, f"/v1/loads/{model_id}/events", until="ready")
    kinds = [frame["event"] for frame in told]
    assert kinds[-1] == "end"
    assert told[-1]["data"] == {"state": "ready", "error": ""}
    numbered = [frame for frame in told if "id" in frame]
    assert [int(frame["id"]) for frame in numbered] == list(range(1, len(numbered) + 1))
    assert sorted(frame["data"]["rank"] for frame in numbered if frame["event"] == "rank_ready") == [0, 1]
    last = [frame["data"] for frame in told if frame["event"] == "progress"][-1]
    assert (last["state"], last["ranks_ready"], last["placed_bytes"]) == ("ready", 2, last["total_bytes"])

    again = frames(api, f"/v1/loads/{model_id}/events", until="ready", after=len(numbered) - 1)
    assert [frame["id"] for frame in again if "id" in frame] == [str(len(numbered))]

    chunks = api.get(f"/v1/loads/{model_id}/chunks").json()
    (node,) = chunks["nodes"]
    assert sum(count for count, _ in node["runs"]) == chunks["chunk_count"] > 20
    assert {letter for _, letter in node["runs"]} == {"d", "-"}  # (nobody needs the headers)
    assert [shard["key"] for shard in chunks["shards"]] == sorted(
        p.name for p in Path(llama.folder).glob("*.safetensors")
    )

    resident = api.post("/v1/models:load", json={**readable, "tensor_parallel_size": 2})
    assert (resident.status_code, resident.json()) == (200, {"model_id": model_id, "state": "ready", "ready": True})
    assert [model["progress"]["model_id"] for model in api.get("/v1/models").json()["models"]] == [model_id]
    cluster_now = api.get("/v1/cluster").json()
    assert len(cluster_now["nodes"]) == 1
    assert api.get("/readyz").json()["coordinator"] == cluster_now["coordinator_incarnation"]

    freed = api.delete(f"/v1/models/{model_id}")
    assert (freed.status_code, freed.json()) == (200, {"model_id": model_id, "freed": True, "holders": 0})
    assert eventually(lambda: state_of(api, model_id) == "released", "it is not freed")
    assert frames(api, f"/v1/loads/{model_id}/events")[-1]["data"]["state"] == "released"


@pytest.fixture(scope="module")
def next_llama(llama: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    folder = changed_copy(llama.folder, tmp_path_factory.mktemp("next") / "llama", flip=3)
    return publish_to(llama.server, folder, "llama-over-http")


def test_a_model_is_updated_and_scaled(
    api: httpx.Client, readable: dict[str, Any], llama: StoredModel, next_llama: StoredModel
) -> None:
    model_id = api.post("/v1/models:load", json=readable).json()["model_id"]
    frames(api, f"/v1/loads/{model_id}/events", until="ready")
    path = f"/v1/models/{model_id}"
    for anonymous in (httpx.post(f"{api.base_url}{path}:{verb}", json={}) for verb in ("update", "scale")):
        assert anonymous.status_code == 401

    updated = api.post(f"{path}:update?wait_s=60", json={"uri": next_llama.uri})
    assert updated.status_code == 200, updated.text
    report = updated.json()["report"]
    assert report["ranks"] == ["exchanged"]
    assert api.get(path).json()["revision"] == report["revision"] != report["old_revision"]
    refused = api.post(f"{path}:update", json={"uri": next_llama.uri, "revision": "0" * 64})
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:longshore:problem:RevisionMismatch")

    begun = api.post(f"{path}:scale?wait_s=0", json={"data_parallel_size": 2})
    assert (begun.status_code, begun.json()["done"]) == (202, False)
    assert eventually(
        lambda: len(api.get(path).json()["ranks"]) == 2 and state_of(api, model_id) == "ready", "no replica"
    )
    assert eventually(lambda: "has 2 replicas now" in api.get(path).json()["update"], "it does not end")
    done = api.post(f"{path}:scale?wait_s=60", json={"data_parallel_size": 1}).json()
    assert (done["done"], done["report"]["ranks"]) == (True, [1])
    for verb, body in (("update", {}), ("scale", {"data_parallel_size": 2})):
        assert api.post(f"/v1/models/no-such-model:{verb}", json=body).status_code == 404
    assert api.delete(path).json()["freed"]


def test_a_plan_and_its_picture(api: httpx.Client, readable: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(CREDENTIALS_FILE))
    body = {name: value for name, value in readable.items() if name != "device"}
    plan = api.post("/v1/models:plan", json={**body, "tensor_parallel_size": 2, "memory": "2x24GB"})
    assert plan.status_code == 200, plan.text
    assert [rank["rank"] for rank in plan.json()["ranks"]] == [0, 1]
    assert plan.json()["fit"]["fits"] is True
    picture = api.post("/v1/models:plan?picture=true", json=body)
    assert picture.headers["content-type"] == "image/svg+xml"
    assert picture.text.lstrip().startswith("<svg")


def test_an_impossible_load_is_a_problem_or_ends_with_an_error(api: httpx.Client, readable: dict[str, Any]) -> None:
    answer = api.post("/v1/models:load", json={**readable, "uri": "s3://models/nothing-here"})
    if answer.status_code == 202:  # it was under way before that was found
        told = frames(api, f"/v1/loads/{answer.json()['model_id']}/events")
        assert told[-1]["data"]["state"] == "failed"
        assert "nothing" in told[-1]["data"]["error"]
    else:
        assert answer.status_code in (404, 422)
        assert answer.json()["detail"]
    for path in ("/v1/models/no-such-model", "/v1/loads/no-such-model/events", "/v1/loads/no-such-model/chunks"):
        assert api.get(path).status_code == 404
    assert api.delete("/v1/models/no-such-model").status_code == 404


def test_a_load_can_be_cancelled(api: httpx.Client, readable: dict[str, Any], longshore: Longshore) -> None:
    """More GPUs than there are: it waits, says for what, and DELETE ends it."""
    wanted = {**readable, "device": "cuda", "tensor_parallel_size": 2, "data_parallel_size": 8}
    answer = api.post("/v1/models:load", json={**wanted, "wait_for_resources_s": 600})
    assert answer.status_code == 202, answer.text
    model_id = answer.json()["model_id"]
    eventually(lambda: state_of(api, model_id) == "waiting", "it does not wait")
    message = api.get(f"/v1/models/{model_id}").json()["progress"]["message"]
    assert "waiting for resources" in message
    assert api.delete(f"/v1/models/{model_id}").json()["freed"]
    assert state_of(api, model_id) == "released"


def test_streams_and_loads_are_bounded(longshore: Longshore, readable: dict[str, Any], llama: StoredModel) -> None:
    settings = ServingSettings(endpoints=llama.server.endpoint_url, streams=1, loads=1)
    with (
        http_server(Service(settings, Config(), longshore.address)) as url,
        httpx.Client(base_url=url, timeout=60) as api,
    ):
        wanted = {**readable, "device": "cuda", "data_parallel_size": 16, "wait_for_resources_s": 600}
        model_id = api.post("/v1/models:load", json=wanted).json()["model_id"]
        busy = api.post("/v1/models:load", json=readable)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "5")
        with api.stream("GET", f"/v1/loads/{model_id}/events") as first:
            assert first.status_code == 200
            parts = first.iter_text()
            next(parts)
            assert api.get(f"/v1/loads/{model_id}/events").status_code == 429
        assert api.delete(f"/v1/models/{model_id}").json()["freed"]

        def told() -> list[dict[str, Any]]:
            """Nothing while the stream above still has its place: the service notices later that its reader left."""
            with api.stream("GET", f"/v1/loads/{model_id}/events") as answer:
                return [] if answer.status_code == 429 else frames_of(answer)

        assert eventually(told, "no place for a stream", 60)[-1]["event"] == "end"
