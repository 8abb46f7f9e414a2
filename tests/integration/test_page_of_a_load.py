"""The page in headless Chromium, while a real load runs on a real cluster out of a real bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")
import httpx2 as httpx

from cluster.config import Config
from serving.service import Service
from serving.settings import ServingSettings, digest_of
from tests.support.browser import WAIT_MS, Watched, axe_violations, chromium, expect, watched
from tests.support.http_servers import http_server
from tests.support.ray_clusters import CREDENTIALS_FILE, Longshore
from tests.support.stored_models import StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long]

TOKEN = "a-token-of-sufficient-length"
RANKS = 4


@pytest.fixture
def body(readable: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A request for the model, with credentials that the nodes have themselves; the service plans in this process."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(CREDENTIALS_FILE))
    return readable


@pytest.fixture
def seen(longshore: Longshore, llama: StoredModel) -> Iterator[Watched]:
    settings = ServingSettings(endpoints=llama.server.endpoint_url, token_sha256=digest_of(TOKEN))
    with (
        chromium() as browser,
        http_server(Service(settings, Config(), longshore.address)) as url,
        watched(browser, url) as found,
    ):
        found.page.set_default_timeout(2 * WAIT_MS)
        found.page.locator("#token").fill(TOKEN)
        found.page.keyboard.press("Enter")
        yield found


def test_a_load_from_nothing_to_ready_to_released(seen: Watched, body: dict[str, Any], tmp_path: Path) -> None:
    page = seen.page
    expect(page.locator("#no-models")).to_be_visible(timeout=2 * WAIT_MS)
    with httpx.Client(base_url=seen.origin, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as api:
        answer = api.post("/v1/models:load", json={**body, "tensor_parallel_size": RANKS})
        assert answer.status_code in (200, 202), answer.text
        model_id = answer.json()["model_id"]
        expect(page.locator("#load-title")).to_have_text(model_id, timeout=2 * WAIT_MS)
        expect(page.locator("#state")).to_have_text("ready", timeout=2 * WAIT_MS)
        expect(page.locator("#news")).to_contain_text(f"{model_id} is ready")

        now = api.get("/v1/cluster").json()
        (model,) = now["models"]
        assert [rank["state"] for rank in model["ranks"]] == ["ready"] * RANKS
        assert sum(rank["total_bytes"] for rank in model["ranks"]) == model["progress"]["total_bytes"]
        rows = page.locator("#ranks tbody tr")
        expect(rows).to_have_count(RANKS)
        for row in rows.all():
            expect(row.locator("td").nth(3)).to_have_text("ready")
            expect(row.locator("td").nth(7)).to_contain_text("MB")  # the worker's own memory
        chunks = api.get(f"/v1/loads/{model_id}/chunks").json()
        placed = sum(count for count, letter in chunks["nodes"][0]["runs"] if letter == "d")
        counts = page.locator("#counts tbody tr td")
        expect(counts.nth(5)).to_have_text(str(placed))
        expect(counts.nth(1)).to_have_text("0")
        expect(page.locator("#events")).to_contain_text("it holds all its slices")
        expect(page.locator("#rate-words")).to_contain_text("GB/s")
        expect(page.locator("#nodes tbody tr")).to_have_count(1)
        page.screenshot(path=str(tmp_path / "page-of-a-load.png"), full_page=True)

        page.locator("#show-plan").click()
        expect(page.locator("#plan-words")).to_contain_text(f"{RANKS} ranks against")
        assert axe_violations(page) == []

        assert api.delete(f"/v1/models/{model_id}").status_code == 200
        expect(page.locator("#state")).to_have_text("released")
        expect(page.locator("#ranks-words")).to_have_text("Its workers are gone.")
    seen.check("401")
