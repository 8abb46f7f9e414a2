"""The page in headless Chromium, over a cluster that is a script: from one rank to 64, in both themes, by keyboard."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("fastapi", reason="the HTTP service's packages are not installed (longshore[serving])")

from cluster import client
from cluster.options import LoadOptions
from cluster.request import make_request
from serving.settings import ServingSettings, digest_of
from tests.support.browser import Watched, axe_violations, chromium, expect, watched
from tests.support.http_servers import http_server
from tests.support.planned_models import write_linear_llama
from tests.support.scripted_service import Script, ScriptedService

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.long]

TOKEN = "a-token-of-sufficient-length"
SIZES = {1: (200, 3), 4: (20_000, 30), 64: (100_000, 200)}  # ranks -> (chunks, shards)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def at(page: Page, script: Script, part: float) -> None:
    """The script goes on to `part`, and the page has seen it."""
    script.part = part
    percent = (
        100 if part >= 1 else int(100 * script.model().progress.placed_bytes / script.model().progress.total_bytes)
    )
    expect(page.locator("#placed")).to_have_attribute("aria-valuenow", str(percent))


COLOURS_OF_A_MAP = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3]) found.add([...data.slice(at, at + 3)].join(","));
  return [...found];
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ranks", SIZES)
def test_a_load_is_shown(browser: Browser, ranks: int, theme: Any, tmp_path: Path) -> None:
    chunks, shards = SIZES[ranks]
    script = Script(ranks, chunks, shards, disk=ranks > 1)
    script.note("state", "planning -> starting", state="starting")
    script.note("state", "starting -> loading", state="loading")
    with http_server(ScriptedService(script)) as url, watched(browser, url, color_scheme=theme) as seen:
        page = seen.page
        for part in (0.15, 0.3, 0.45, 0.6):
            at(page, script, part)
        nodes = len(script.hosts)
        expect(page.locator("#load-title")).to_have_text(script.model_id)
        expect(page.locator("#ranks tbody tr")).to_have_count(ranks)
        expect(page.locator("#nodes tbody tr")).to_have_count(nodes)
        expect(page.locator("#counts tbody tr")).to_have_count(nodes)
        expect(page.locator("#chunks-note")).to_contain_text(f"{chunks:,} chunks in {shards} shards")
        expect(page.locator("#rate-store")).to_have_text(re.compile(r"^[\d.]+ GB/s$"))
        assert page.locator("#rate polyline.store").get_attribute("points").count(",") >= 3  # type: ignore[union-attr]
        expect(page.locator("#tiers-words")).to_contain_text("on disk" if script.disk else "no disk tier")
        expect(page.locator("#events li")).to_have_count(2)
        maps = page.locator("#maps canvas")
        expect(maps).to_have_count(nodes)
        maps.first.scroll_into_view_if_needed()
        page.wait_for_function(f"canvas => ({COLOURS_OF_A_MAP})(canvas).length > 3", arg=maps.first.element_handle())
        drawn = set(maps.first.evaluate(COLOURS_OF_A_MAP))
        legend = page.locator("#legend .swatch").evaluate_all(
            "all => all.map(one => getComputedStyle(one).backgroundColor.match(/\\d+/g).join(','))"
        )
        assert drawn <= set(legend)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=str(tmp_path / f"page-{ranks}-{theme}-top.png"))
        page.screenshot(path=str(tmp_path / f"page-{ranks}-{theme}.png"), full_page=True)
        assert axe_violations(page) == []
        at(page, script, 1.0)
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#news")).to_contain_text("is ready")
        expect(page.locator("#counts tbody tr").first.locator("td").nth(5)).to_have_text(f"{chunks - shards:,}")
        seen.check("willReadFrequently")  # (it is this test that reads pixels back)


def test_numbers_of_a_shard_are_those_of_the_map(browser: Browser) -> None:
    script = Script(4, 1000, 10, part=0.5)
    with http_server(ScriptedService(script)) as url, watched(browser, url) as seen:
        page = seen.page
        expect(page.locator("#counts tbody tr")).to_have_count(1)
        page.locator("#shard").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#shard-name")).to_contain_text("model-00001.safetensors")
        assert page.locator("#shard").get_attribute("aria-valuetext") == page.locator("#shard-name").text_content()
        expect(page.locator("#counts caption")).to_contain_text("model-00001.safetensors")
        node = script.chunk_map().nodes[0]
        letters = "".join(letter * count for count, letter in node.runs)[:100]
        wanted = [node.host, *(str(letters.count(letter)) for letter in "pwlcd-")]
        assert page.locator("#counts tbody tr td").all_text_contents() == wanted
        page.keyboard.press("End")
        expect(page.locator("#shard-name")).to_contain_text("model-00010.safetensors")
        page.keyboard.press("Home")
        expect(page.locator("#shard-name")).to_have_text("all")
        box = page.locator("#maps canvas").bounding_box()
        assert box is not None
        page.locator("#maps canvas").click(position={"x": 20, "y": box["height"] * 0.25})
        expect(page.locator("#shard-name")).to_contain_text("model-00003.safetensors")
        seen.check()


def size_of(text: str) -> float:
    """Return the bytes that a size on the page says."""
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def test_bytes_are_shown_by_source_and_sender(browser: Browser) -> None:
    """They grow while the load runs. Of many senders the page names those that sent most."""
    script = Script(64, 4000, 10, part=0.25)
    with http_server(ScriptedService(script)) as url, watched(browser, url) as seen:
        page = seen.page
        rows = page.locator("#sources tbody tr")
        expect(rows).to_have_count(len(script.hosts))
        cells = rows.nth(1).locator("td")
        before = cells.all_text_contents()
        script.part = 0.5
        expect(cells.nth(4)).not_to_have_text(before[4])
        host, store, disk, arena, peers, senders, sent = cells.all_text_contents()
        traffic = script.traffic(1)
        each = traffic.bytes_by_source["store_via_arena"]
        assert (host, disk, arena) == ("gpu-01", "0 B", "0 B")
        assert size_of(store) == pytest.approx(each, rel=0.05)
        assert size_of(peers) == size_of(sent) == pytest.approx(traffic.sent_bytes, rel=0.05)
        assert senders.startswith(f"gpu-00 {store}, gpu-02 {store}")
        assert senders.endswith("and 3 others")
        expect(page.locator("#sources-words")).to_contain_text("from other nodes.")
        seen.check()


FOCUSED = """() => {
  const one = document.activeElement;
  if (getComputedStyle(one).outlineStyle === "none") return "nothing shows the focus on " + one.outerHTML;
  const itself = one.id || one.getAttribute("aria-labelledby") || one.className;
  return itself || one.closest("[id]").id;
}"""


def test_the_keyboard_reaches_every_control_in_page_order(browser: Browser) -> None:
    script = Script(4, 1000, 10, part=0.5)
    with http_server(ScriptedService(script)) as url, watched(browser, url) as seen:
        page = seen.page
        expect(page.locator("#counts tbody tr")).to_have_count(1)
        reached: list[str] = []
        for _ in range(11):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUSED))
        assert reached == [
            "skip",
            "theme",
            "models",
            "shard",
            "counts-frame",
            "sources-frame",
            "ranks-title",
            "only-failures",
            "log",
            "show-plan",
            "nodes-title",
        ]
        page.locator("#show-plan").focus()
        assert page.evaluate("document.activeElement.id") == "show-plan"
        time.sleep(2.5)  # two looks of the page take the focus from nobody
        assert page.evaluate("document.activeElement.id") == "show-plan"
        seen.check()


def test_the_page_asks_for_a_token_once_and_polls_in_one_loop(browser: Browser) -> None:
    service = ScriptedService(Script(part=0.5), ServingSettings(token_sha256=digest_of(TOKEN)))
    with http_server(service) as url, watched(browser, url) as seen:
        page = seen.page
        expect(page.locator("#door")).to_be_visible()
        assert page.evaluate("document.activeElement.id") == "token"
        assert axe_violations(page) == []
        page.locator("#token").fill("not the token of this one")
        page.keyboard.press("Enter")
        expect(page.locator("#door-error")).to_contain_text("not the service's")
        expect(page.locator("#view")).to_be_hidden()
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.locator("#view")).to_be_visible()
        expect(page.locator("#door")).to_be_hidden()
        assert page.evaluate("document.activeElement.id") == "main"
        from_s, before = time.monotonic(), count_of(seen, "/cluster")
        with page.expect_request("**/v1/cluster"):
            page.wait_for_function("new Promise(done => setTimeout(() => done(true), 4500))")
        # Once a second, however long the way there and back takes; a second loop would have asked twice as often.
        assert 1 <= count_of(seen, "/cluster") - before <= time.monotonic() - from_s + 2
        assert TOKEN not in page.content()
        assert all(TOKEN not in url for url in seen.requests)
        page.reload()
        expect(page.locator("#view")).to_be_visible()
        seen.check("401")


def test_themes_and_motion_are_the_readers_choice(browser: Browser) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    moves = "() => getComputedStyle(document.querySelector('#placed > div')).transitionDuration"
    with (
        http_server(ScriptedService(Script(part=0.5))) as url,
        watched(browser, url, color_scheme="dark", reduced_motion="no-preference") as seen,
    ):
        page = seen.page
        dark = page.evaluate(ground)
        assert page.evaluate(moves) != "0s"
        page.locator("#theme").select_option("light")
        light = page.evaluate(ground)
        assert light == "rgb(255, 255, 255)" != dark
        page.reload()
        assert page.evaluate(ground) == light
        page.locator("#theme").select_option("")
        assert page.evaluate(ground) == dark
        page.emulate_media(reduced_motion="reduce")
        assert page.evaluate(moves) == "0s"
        seen.check()


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator says that the model is one on this disk."""
    write_linear_llama(tmp_path)
    request = make_request(LoadOptions(str(tmp_path), tensor_parallel_size=4))
    monkeypatch.setattr(client, "request_of", lambda model_id, address=None: request)


def test_the_plan_is_drawn_when_asked(browser: Browser, planned: None, tmp_path: Path) -> None:
    with http_server(ScriptedService(Script(part=0.5))) as url, watched(browser, url) as seen:
        page = seen.page
        page.locator("#show-plan").click()
        expect(page.locator("#plan-words")).to_contain_text("4 ranks against")
        page.wait_for_function("document.getElementById('plan').naturalWidth > 0")
        assert "4 ranks against" in (page.locator("#plan").get_attribute("alt") or "")
        expect(page.locator("#save-plan")).to_have_attribute("download", "plan.svg")
        page.screenshot(path=str(tmp_path / "page-plan.png"), full_page=True)
        assert axe_violations(page) == []
        seen.check()


def test_an_impossible_plan_shows_its_error(browser: Browser, planned: None, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").unlink()
    with http_server(ScriptedService(Script(part=0.5))) as url, watched(browser, url) as seen:
        seen.page.locator("#show-plan").click()
        expect(seen.page.locator("#plan-words")).not_to_have_text(re.compile("^(drawing…)?$"))
        expect(seen.page.locator("#plan-frame")).to_be_hidden()
        seen.check("422")


def test_an_idle_tab_polls_only_what_changes(browser: Browser) -> None:
    """A model at which nothing happens: its chunks are asked for now and then."""
    with http_server(ScriptedService(Script(part=1.0))) as url, watched(browser, url) as seen:
        expect(seen.page.locator("#counts tbody tr")).to_have_count(1)
        seen.page.wait_for_function("new Promise(done => setTimeout(() => done(true), 4000))")
        assert count_of(seen, "/chunks") * 2 <= count_of(seen, "/cluster")
        assert count_of(seen, "/events") == 1
        seen.check()


def count_of(seen: Watched, end: str) -> int:
    return sum(path.endswith(end) for path in seen.paths())
