"""The page in headless Chromium when something is odd: failures, silence, small windows, names that others made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")

from cluster.telemetry.chunk_map import ChunkMap
from cluster.telemetry.report import ModelStatus, UpdateProgress
from cluster.telemetry.saves import SaveProgress, SaveStatus
from tests.support.browser import axe_violations, chromium, expect, watched
from tests.support.http_servers import http_server
from tests.support.scripted_service import Script, ScriptedService

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.long]

MARKUP = "<img src=x onerror=alert(1)><script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def test_a_single_rank_has_no_memory_gauge(browser: Browser) -> None:
    """A gauge that is full would say that it has run out."""
    for ranks, gauges in ((1, 0), (2, 2)):
        script = Script(ranks, 200, 3, part=0.5)
        with http_server(ScriptedService(script)) as url, watched(browser, url) as seen:
            cells = seen.page.locator("#ranks tbody td:last-child")
            expect(cells.first).to_contain_text("700 MB")
            expect(cells.locator(".bar:visible")).to_have_count(gauges)
            seen.check()


def test_failures_are_shown_announced_and_can_be_filtered(browser: Browser, tmp_path: Path) -> None:
    script = Script(8, 2000, 10, part=0.5)
    hostile = "<img src=x onerror=alert(1)> is not in the bucket"
    with http_server(ScriptedService(script)) as url, watched(browser, url) as seen:
        page = seen.page
        expect(page.locator("#state")).to_have_text("loading")
        script.lost = (3,)
        script.note("rank_lost", "its worker is gone", rank=3)
        script.note("note", "waiting for slots")
        expect(page.locator("#events li.failure")).to_have_count(1)
        expect(page.locator("#news")).to_contain_text("rank 3 on gpu-00: its worker is gone")
        expect(page.locator("#ranks tbody tr").nth(3).locator("td").nth(3)).to_have_text("lost")
        page.locator("#only-failures").check()
        assert page.locator("#events li:visible").count() == 1
        script.error = hostile
        script.note("state", f"loading -> failed: {hostile}", state="failed")
        expect(page.locator("#error")).to_have_text(hostile)
        expect(page.locator("#chunks-note")).to_have_text("Chunks as last seen: the load has failed.")
        assert set(page.locator("#ranks tbody td:last-child").all_text_contents()) == {"-"}  # workers that are gone
        expect(page.locator("#events li:visible")).to_have_count(2)
        assert page.locator("img[src=x]").count() == 0
        page.screenshot(path=str(tmp_path / "page-failed.png"), full_page=True)
        assert axe_violations(page) == []
        page.reload()  # a page that had not watched it
        expect(page.locator("#chunks-note")).to_have_text("Where chunks were is not kept: the load has failed.")
        expect(page.locator("#counts")).to_be_hidden()
        assert_updates_and_saves_are_shown(page, script, tmp_path)
        script.gone = True
        expect(page.locator("#load")).to_be_hidden()
        expect(page.locator("#no-models")).to_be_visible()
        box = page.locator("#models-title").locator("..").bounding_box()
        assert box is not None
        assert box["width"] > 1000  # there is nothing to leave room for beside it
        seen.check()


def assert_updates_and_saves_are_shown(page: Page, script: Script, folder: Path) -> None:
    """Check an update and a save in progress, the end of both, and a save that fails."""
    expect(page.locator("#saved")).to_be_hidden()
    expect(page.locator("#update")).to_be_hidden()
    script.updating = UpdateProgress("staging", 1, 8, 30_000_000, 100_000_000)
    runs = SaveProgress(
        "save-step-9-1a2b", 7, "s3://models/step-9", "writing", 4, "trainer", 2_000_000_000, 600_000_000, 400_000_000
    )
    fails = replace(runs, save_id="save-other-3c4d", state="failed", message=f"rank 2 ended it: {MARKUP}")
    script.saves = (SaveStatus(runs, 0.4), SaveStatus(fails, ended_age_s=3.0))
    expect(page.locator("#update-words")).to_have_text("Update, staging: 1 of 8 ranks, 30.0 MB of 100 MB read")
    expect(page.locator("#update-read")).to_have_attribute("aria-valuenow", "30")
    cells = page.locator("#saves tbody tr").nth(0).locator("td")
    for number, text in {1: "writing", 2: "4", 3: "1.00 GB", 4: "2.00 GB", 5: "600 MB", 6: "400 MB", 7: "0 B"}.items():
        expect(cells.nth(number)).to_have_text(text)
    assert cells.nth(3).locator(".bar > div").get_attribute("style") == "width: 50%;"
    failed = page.locator("#saves tbody tr").nth(1).locator("td")
    expect(failed.nth(1)).to_have_class("save-failed")
    expect(failed.nth(10)).to_have_text(f"rank 2 ended it: {MARKUP}")
    page.screenshot(path=str(folder / "page-of-a-save.png"), full_page=True)
    assert axe_violations(page) == []
    script.updating = None
    script.saves = (SaveStatus(replace(runs, state="published", reused_bytes=10**9, revision="ab" * 32)),)
    expect(cells.nth(10)).to_have_text("revision abababababababab")
    expect(page.locator("#saves tbody tr")).to_have_count(1)
    expect(page.locator("#update")).to_be_hidden()
    expect(page.locator("#news")).to_contain_text("save-step-9-1a2b is published")


def test_the_page_reports_a_silent_service_and_its_return(browser: Browser) -> None:
    with http_server(ScriptedService(Script(part=0.5))) as url, watched(browser, url) as seen:
        page = seen.page
        expect(page.locator("#state")).to_have_text("loading")
        page.route("**/v1/cluster", lambda route: route.abort())
        expect(page.locator("#trouble")).to_contain_text("cannot be asked: the service does not answer. What")
        expect(page.locator("#load")).to_be_visible()
        page.unroute("**/v1/cluster")
        expect(page.locator("#trouble")).to_be_hidden()
        seen.check("ERR_FAILED")


def test_a_narrow_window_needs_no_sideways_scrolling(browser: Browser, tmp_path: Path) -> None:
    size = {"width": 360, "height": 740}
    with http_server(ScriptedService(Script(part=0.5))) as url, watched(browser, url, viewport=size) as seen:
        page = seen.page
        expect(page.locator("#counts tbody tr")).to_have_count(1)
        page.screenshot(path=str(tmp_path / "page-narrow.png"), full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        rates = page.locator("#rate-now > span")
        assert all(
            box["height"] < 30
            for box in rates.evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
        )
        seen.check()


class Hostile(Script):
    """Names as a scheduler makes them up, and as somebody who may write to the bucket does."""

    @property
    def hosts(self) -> list[str]:
        hosts = super().hosts
        return [f"raycluster-of-somebody-gpu-worker-group-worker-{host}" for host in hosts]

    def model(self) -> ModelStatus:
        found = super().model()
        uri, message = f"s3://models/{'folder' * 200}{MARKUP}", f"waiting for {MARKUP}"
        return replace(found, progress=replace(found.progress, uri=uri, message=message), taken=MARKUP)

    def chunk_map(self) -> ChunkMap:
        found = super().chunk_map()
        shards = tuple(replace(shard, key=f"{'k' * 200}{MARKUP}{shard.key}") for shard in found.shards)
        return replace(found, shards=shards, silent_nodes=(MARKUP,))


@pytest.mark.parametrize("width", [375, 1280])
def test_foreign_names_are_plain_text_and_keep_the_layout(browser: Browser, width: int) -> None:
    script = Hostile(24, 2000, 10, part=0.5, model_id="m" * 100)
    script.note("rank_lost", f"{MARKUP} {'y' * 400}", rank=3)
    size = {"width": width, "height": 800}
    with http_server(ScriptedService(script)) as url, watched(browser, url, viewport=size) as seen:
        page = seen.page
        expect(page.locator("#counts tbody tr")).to_have_count(3)
        expect(page.locator("#events li.failure")).to_contain_text(MARKUP)
        page.locator("#shard").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#shard-name")).to_contain_text(MARKUP)
        assert page.locator("img[src=x], body script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        heights = page.locator("#ranks tbody tr").evaluate_all("all => all.map(one => one.clientHeight)")
        assert max(heights) < 130
        seen.check()
