"""A scrape gets its answer over HTTP from a coordinator whose loop may be busy."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors import metrics_server
from actors.metrics_server import MetricsServer
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.messages import AgentBeat, LoadBeat, RankBeat
from cluster.scheduling.load_state import LoadState
from cluster.telemetry import metrics
from cluster.telemetry.counters import ClusterMetrics, LoadView
from cluster.telemetry.metrics import FAMILIES, render_page
from cluster.telemetry.stats import ArenaUse, LoadCounters, NodeStats
from storage.arena.chunk_cache import CacheStats
from tests.support.promtool import needs_promtool, promtool

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def cluster_metrics() -> ClusterMetrics:
    found = ClusterMetrics()
    found.load(LoadView("x", "llama", LoadState.LOADING, (), (), 100), 0.0)
    found.load(LoadView("x", "llama", LoadState.READY, (), (), 100), 3.0)
    sizes = {"disk": 7, "arena": 5, "peer": 11}
    counters = LoadCounters(sizes, {"disk": 1, "arena": 1}, 1, 0, {"reset": 2}, 3, sent_bytes=13)
    load = LoadBeat("x", 1, 0, None, True, 'llama"\\')
    rank = RankBeat("x", 1, 0, 0, 1, 12, 0.0, own_bytes=9)
    stats = NodeStats(CacheStats(*[1] * 15))
    found.received(
        AgentBeat(
            "n",
            "host",
            "i",
            (load,),
            (rank,),
            ArenaUse(8, 4, 0, 0),
            number=1,
            counters={load.model: counters},
            stats=stats,
        ),
        4.0,
    )
    return found


def serving(config: Config, work: Callable[[MetricsServer], Any], of: ClusterMetrics | None = None) -> Any:
    """Return what `work` returns for a server, in a thread beside the loop that makes the snapshots."""

    async def run() -> Any:
        server = MetricsServer(config, of or cluster_metrics())
        server.start()
        server.start()
        try:
            return await asyncio.to_thread(work, server)
        finally:
            await asyncio.to_thread(server.close)
            server.close()

    return asyncio.run(run())


def scraped(server: MetricsServer) -> str:
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def test_a_scrape_has_counters_gauges_and_histograms() -> None:
    text = serving(Config(metrics_port=0), scraped)
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["longshore_chunk_bytes_total", "disk", "host", "i", 'llama"\\'] == 7
    assert found["longshore_chunk_bytes_total", "host", "i", 'llama"\\', "peer"] == 11
    assert found["longshore_sent_bytes_total", "host", "i", 'llama"\\'] == 13
    assert found["longshore_process_memory_bytes", "host", "i", 'llama"\\', "rank 0"] == 9
    assert found["longshore_load_duration_seconds_bucket", "2.5", "llama", "ready"] == 0
    assert found["longshore_load_duration_seconds_bucket", "5.0", "llama", "ready"] == 1
    assert found["longshore_load_duration_seconds_bucket", "+Inf", "llama", "ready"] == 1
    assert found["longshore_load_duration_seconds_sum", "llama", "ready"] == 3.0
    told = {family.name for family in text_string_to_metric_families(text)}
    assert told == {family.name.removesuffix("_total") for family in FAMILIES}


def test_a_scrape_may_ask_for_some_metrics_only() -> None:
    def some(server: MetricsServer) -> str:
        query = "?name[]=longshore_chunk_bytes_total&name[]=longshore_load_duration_seconds_count&name[]=other"
        with urllib.request.urlopen(server.url + query, timeout=10) as answer:
            return str(answer.read().decode())

    names = {
        sample.name
        for family in text_string_to_metric_families(serving(Config(metrics_port=0), some))
        for sample in family.samples
    }
    assert names == {"longshore_chunk_bytes_total", "longshore_load_duration_seconds_count"}


@needs_promtool
def test_promtool_accepts_the_metric_names() -> None:
    promtool("check", "metrics", stdin=serving(Config(metrics_port=0), scraped))


def test_the_page_has_every_metric() -> None:
    assert PAGE.read_text() == render_page(PAGE.read_text())
    for family in FAMILIES:
        assert f"`{family.name}`" in PAGE.read_text()


def test_a_port_that_is_taken_costs_the_port_only() -> None:
    def beside(first: MetricsServer) -> tuple[str, str, str]:
        port = int(first.url.split(":")[2].split("/")[0])
        url, text = serving(Config(metrics_port=port), lambda second: (second.url, scraped(second)))
        return first.url, url, text

    first, second, text = serving(Config(metrics_port=0), beside)
    assert first != second
    assert "longshore_build_info" in text


def test_a_coordinator_that_was_restarted_takes_the_port_again() -> None:
    url = serving(Config(metrics_port=0), lambda server: (scraped(server), server.url)[1])
    port = int(url.split(":")[2].split("/")[0])
    assert serving(Config(metrics_port=port), lambda server: (scraped(server), server.url)[1]) == url
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


def test_no_port_is_opened_when_metrics_are_off_or_unavailable() -> None:
    assert serving(Config(metrics_port=-1), lambda server: server.url) == ""
    assert serving(Config(metrics_port=0, metrics_host="192.0.2.1"), lambda server: server.url) == ""


def test_it_listens_on_this_host_only_by_default() -> None:
    assert Config().metrics_host == "127.0.0.1"
    assert serving(Config(metrics_port=0), lambda server: server.url).startswith("http://127.0.0.1:")
    url = serving(Config(metrics_port=0, metrics_host="0.0.0.0"), lambda server: server.url)
    assert "0.0.0.0" not in url
    with pytest.raises(ConfigError, match="not an IP address"):
        Config.from_env({"LONGSHORE_METRICS_HOST": "metrics.example"})


@pytest.mark.parametrize("path", ["/", "/metrics/../etc/passwd", "/metricsx", "//x"])
def test_other_paths_are_not_found(path: str) -> None:
    def ask(server: MetricsServer) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[2].split("/")[0]), timeout=10)
        connection.request("GET", path)
        status = connection.getresponse().status
        connection.close()
        return status

    assert serving(Config(metrics_port=0), ask) == 404


def test_a_stuck_loop_is_reported_to_the_scraper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SNAPSHOT_S", 0.1)
    asked, go_on = threading.Event(), threading.Event()

    class Slow(ClusterMetrics):
        def snapshot(self) -> Any:
            asked.set()
            go_on.wait(10)
            return super().snapshot()

    def ask(server: MetricsServer) -> int:
        try:
            urllib.request.urlopen(server.url, timeout=10)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        finally:
            go_on.set()
        return 200

    assert serving(Config(metrics_port=0), ask, Slow()) == 503
    assert asked.is_set()


def test_a_silent_scraper_blocks_no_other() -> None:
    def ask(server: MetricsServer) -> str:
        port = int(server.url.split(":")[2].split("/")[0])
        silent = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(20)]
        for connection in silent:
            connection.connect()
        try:
            return scraped(server)
        finally:
            for connection in silent:
                connection.close()

    assert metrics.BUILD_INFO.name in serving(Config(metrics_port=0), ask)


def test_a_scrape_does_not_block_the_loop() -> None:
    async def run() -> int:
        server = MetricsServer(Config(metrics_port=0), cluster_metrics())
        server.start()
        turns, scrapes = 0, asyncio.ensure_future(asyncio.to_thread(lambda: [scraped(server) for _ in range(20)]))
        while not scrapes.done():
            await asyncio.sleep(0)
            turns += 1
        await asyncio.to_thread(server.close)
        return turns

    begun_s = time.monotonic()
    assert asyncio.run(run()) > 20
    assert time.monotonic() > begun_s
