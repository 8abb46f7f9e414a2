"""The page's files, without a browser: they name only each other, and their colours can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
from starlette.testclient import TestClient

from cluster import client as verbs
from cluster.errors import ModelNotFound
from cluster.options import LoadOptions
from cluster.request import make_request
from serving.access import PATHS, read_page
from serving.app import make_app
from serving.settings import ServingSettings
from tests.support.planned_models import write_linear_llama
from tests.support.scripted_service import Script, ScriptedService

FILES = {path: data.decode() for path, (data, _) in read_page().items()}
HTML, CSS = FILES["/"], FILES["/page.css"]
SCRIPTS = {path: text for path, text in FILES.items() if path.endswith(".js")}
TEXT_RATIO, SHAPE_RATIO = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService(Script())


@pytest.fixture
def client(service: ScriptedService) -> Iterator[TestClient]:
    with TestClient(make_app(service), base_url="http://localhost", raise_server_exceptions=False) as made:
        yield made


def test_every_file_is_served_and_every_reference_exists(client: TestClient) -> None:
    folder = Path(__file__).parents[2] / "serving" / "page"
    assert sorted(PATHS.values()) == sorted(path.name for path in folder.iterdir())
    for path in PATHS:
        assert client.get(path).status_code == 200
    named = set(re.findall(r'(?:href|src)="([^"#:]+)"', HTML))
    for text in SCRIPTS.values():
        named |= {name.removeprefix("./") for name in re.findall(r'from "([^"]+)"', text)}
    assert {f"/{name}" for name in named} == set(PATHS) - {"/"}


def test_files_name_no_other_server_and_keep_to_the_policy() -> None:
    for path, text in FILES.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(r"\beval\(|new Function|innerHTML|insertAdjacentHTML|document\.write", text), path
        assert not re.search(r"@import|url\(", text), path
    assert not re.search(r"\bstyle=|\bon[a-z]+=|<style|<script(?![^>]*\bsrc=)", HTML)


def test_ids_are_unique_and_every_used_id_exists() -> None:
    ids = re.findall(r'\bid="([^"]+)"', HTML)
    assert len(ids) == len(set(ids))
    used = {name for text in SCRIPTS.values() for name in re.findall(r'\$\("([^"]+)"\)', text)}
    used |= {name for names in re.findall(r'aria-(?:labelledby|describedby)="([^"]+)"', HTML) for name in names.split()}
    used |= set(re.findall(r'\bfor="([^"]+)"', HTML))
    assert used <= set(ids)


def theme(number: int) -> dict[str, str]:
    """Colours of the light (0) or the dark (1) theme, by name."""
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS)
    assert len(pairs) > 10
    return {name: (light, dark)[number] for name, light, dark in pairs}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ratio(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("number", [0, 1], ids=["light", "dark"])
def test_text_and_shapes_stand_out_in_both_themes(number: int) -> None:
    colours = theme(number)
    for ground in ("ground", "panel"):
        for text in ("ink", "soft", "mark", "bad", "good"):
            assert ratio(colours[text], colours[ground]) >= TEXT_RATIO, (text, ground)
        for shape in ("edge", "c-fetched", "c-placed", "c-waiting", "c-verified", "mark"):
            assert ratio(colours[shape], colours[ground]) >= SHAPE_RATIO, (shape, ground)


def test_the_policy_allows_requests_to_the_own_server_only(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy


# -- the picture of a model's plan ---------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids that the coordinator was asked for; it knows "llama"."""
    write_linear_llama(tmp_path)
    request = make_request(LoadOptions(str(tmp_path), tensor_parallel_size=2))
    ids: list[str] = []

    def request_of(model_id: str, **_: Any) -> Any:
        ids.append(model_id)
        if model_id != "llama":
            raise ModelNotFound("no such model", model=model_id)
        return request

    monkeypatch.setattr(verbs, "request_of", request_of)
    return ids


def test_the_plan_of_a_model_is_a_picture(client: TestClient, asked: list[str]) -> None:
    answer = client.get("/v1/models/llama/plan.svg")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/svg+xml")
    assert "2 ranks against" in answer.text
    assert asked == ["llama"]


def test_a_plan_that_cannot_be_drawn_is_a_problem(client: TestClient, asked: list[str], tmp_path: Path) -> None:
    missing = client.get("/v1/models/other/plan.svg")
    assert (missing.status_code, missing.json()["type"]) == (404, "urn:longshore:problem:ModelNotFound")
    for path in tmp_path.iterdir():
        path.unlink()
    gone = client.get("/v1/models/llama/plan.svg")
    assert (gone.status_code, gone.json()["type"]) == (422, "urn:longshore:problem:NotACheckpoint")


def test_plans_of_models_count_as_plans(asked: list[str]) -> None:
    service = ScriptedService(Script(), ServingSettings(plans=1))
    with TestClient(make_app(service), base_url="http://localhost") as client:
        assert client.portal is not None
        client.portal.call(service._plans.acquire)
        busy = client.get("/v1/models/llama/plan.svg")
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "5")
        client.portal.call(service._plans.release)
        assert client.get("/v1/models/llama/plan.svg").status_code == 200
