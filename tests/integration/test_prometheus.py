"""A real Prometheus scrapes the coordinator while a real model loads, by our rules."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import cluster
from tests.support.free_ports import free_ports
from tests.support.promtool import needs_prometheus
from tests.support.ray_clusters import Longshore, eventually
from tests.support.stored_models import StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long, needs_prometheus]

RULES = Path(__file__).parents[2] / "k8s" / "monitoring" / "rules.yaml"


class Prometheus:
    """One that is asked over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str) -> list[dict[str, object]]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:
            data = json.load(answer)["data"]
        found: list[dict[str, object]] = data.get("result") or data.get("activeTargets") or data.get("groups") or []
        return found

    def values(self, expression: str, label: str) -> dict[str, float]:
        """Value by that label."""
        found = self.ask("query", query=expression)
        return {str(one["metric"].get(label, "")): float(one["value"][1]) for one in found}  # type: ignore[attr-defined, index]


@pytest.fixture
def prometheus(longshore: Longshore, tmp_path: Path) -> Iterator[Prometheus]:
    """It scrapes a coordinator that has just begun, every two seconds."""
    longshore.configure(empty=True, metrics_port=0)
    target = urllib.parse.urlsplit(longshore.status().metrics_url)
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "longshore", "static_configs": [{"targets": [target.netloc]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # YAML too
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command += [f"--web.listen-address={address}", "--log.level=error"]
    process = subprocess.Popen(command, cwd=tmp_path)
    there = Prometheus(f"http://{address}")

    def scraped() -> bool:
        try:
            return [target["health"] for target in there.ask("targets")] == ["up"]
        except OSError:
            return False

    try:
        eventually(scraped, "the coordinator was not scraped", 60)
        yield there
    finally:
        process.terminate()
        process.wait(30)


def test_prometheus_counters_agree_with_the_report(
    longshore: Longshore, llama: StoredModel, prometheus: Prometheus
) -> None:
    model = cluster.load(llama.uri, device="cpu", tensor_parallel_size=2, **llama.options)
    told = {source: size for source, size in model.report.bytes_by_source.items() if source != "unknown"}
    assert sum(told.values()) > 0

    held = {str(rank.rank): float(rank.size_bytes) for rank in model.report.ranks}

    def compare() -> None:
        """Counters and gauges come with heartbeats, and those of ranks and of the coordinator one after the other."""
        found = prometheus.values("sum by (source) (longshore_chunk_bytes_total)", "source")
        assert {source: int(size) for source, size in found.items()} == told
        assert prometheus.values("sum by (rank) (longshore_rank_placed_bytes)", "rank") == held
        assert prometheus.values("longshore_loads_finished_total", "outcome").get("ready") == 1
        assert set(prometheus.values("longshore_ranks", "state")) == {"ready"}
        verified = prometheus.values("sum by (model) (longshore_chunks_verified_total)", "model")
        assert verified == {llama.uri.rpartition("/")[2]: model.report.verified_chunks}
        seconds = prometheus.values("sum by (outcome) (longshore_load_duration_seconds_sum)", "outcome")
        assert 0 < seconds.get("ready", 0) <= model.report.total_s + 1
        spent = prometheus.values("sum by (stage) (longshore_stage_seconds_total)", "stage")
        assert spent.get("fetch") == pytest.approx(model.report.stages.fetch_s, abs=0.05)
        processes = prometheus.values("longshore_process_memory_bytes", "process")
        assert set(processes) == {"coordinator", "agent", "rank 0", "rank 1"}
        assert min(processes.values()) > 10 << 20
        assert min(prometheus.values("longshore_shm_total_bytes", "node").values(), default=0) > 0

    def differs() -> str:
        """Return what does not agree; "" when all does. Series are missing for a while after a slow scrape."""
        try:
            compare()
        except AssertionError as error:
            return str(error)
        return ""

    eventually(lambda: not differs(), differs, 60)
    model.release()


def test_rules_are_evaluated_and_no_alert_fires_for_a_good_load(
    longshore: Longshore, llama: StoredModel, prometheus: Prometheus
) -> None:
    with cluster.load(llama.uri, device="cpu", **llama.options):

        def evaluated() -> bool:
            rules = [rule for group in prometheus.ask("rules") for rule in group["rules"]]  # type: ignore[attr-defined]
            return bool(rules) and all(rule["health"] == "ok" for rule in rules)

        eventually(evaluated, "not all rules were evaluated", 60)
        eventually(lambda: prometheus.values("longshore:loading_ranks:sum", "node"), "no rule recorded anything", 60)
        firing = prometheus.values('ALERTS{alertstate="firing"}', "alertname")
        # (a machine whose shared memory is in use by others may say so)
        assert set(firing) <= {"LongshoreShmNearlyFull", "LongshoreHostMemoryLow"}
