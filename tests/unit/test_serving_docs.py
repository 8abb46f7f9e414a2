"""docs/serving.md agrees with the service's settings and routes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")

from cluster.telemetry.chunk_map import MEANINGS
from serving.app import make_app
from serving.settings import ENV_PREFIX, ServingSettings
from tests.support.scripted_service import Script, ScriptedService

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()


def test_every_setting_is_listed_with_its_default() -> None:
    rows = dict(re.findall(rf"^\| `{ENV_PREFIX}(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    assert rows.pop("TOKEN") == "none"
    fields = {name: field for name, field in ServingSettings.model_fields.items() if name != "token_sha256"}
    assert rows == {name.upper(): str(field.default) for name, field in fields.items()}


def test_every_route_has_an_example_and_every_example_a_route() -> None:
    paths = make_app(ScriptedService(Script())).openapi()["paths"]
    used = {
        path.split("?")[0].replace("llama-70b-3f9a21c4", "{model_id}") for path in re.findall(r'"\$API([^"]+)"', PAGE)
    }
    assert used == {path for path in paths if path.startswith("/v1/")}


def test_letters_of_chunks_are_explained() -> None:
    for letter in MEANINGS:
        assert f"`{letter}`" in PAGE
