"""Metrics over the lives of processes: agents and coordinators come and go, counters do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cluster
from actors.links import COORDINATOR
from cluster import client
from tests.support.free_ports import free_ports
from tests.support.ray_clusters import Longshore, eventually, scrape
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


def total(found: dict[tuple[str, ...], float], name: str) -> float:
    return sum(value for key, value in found.items() if key[0] == name)


def of_agents(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Select the counters of chunks, by series."""
    return {key: value for key, value in found.items() if key[0].startswith("longshore_chunk") and value}


def test_a_restarted_coordinator_goes_on_with_the_same_series(longshore: Longshore, llama: StoredModel) -> None:
    (port,) = free_ports(1)
    longshore.configure(empty=True, metrics_port=port)
    model = cluster.load(llama.uri, device="cpu", keep=True, **llama.options)
    url = longshore.status().metrics_url
    moved = sum(model.report.bytes_by_source.values())
    eventually(lambda: total(scrape(url), "longshore_chunk_bytes_total") == moved, "the load was not counted")
    before = of_agents(scrape(url))
    pid = longshore.pid(COORDINATOR)
    agents = {key for key in scrape(url) if key[0] == "longshore_heartbeat_age_seconds"}
    longshore.kill(COORDINATOR)
    longshore.wait_restarted(COORDINATOR, pid)

    def received() -> bool:
        found = scrape(url)
        return agents <= found.keys() and ("longshore_loads", "llama", "ready") in found and bool(of_agents(found))

    eventually(received, "the new coordinator does not show what there is", 60)
    assert longshore.status().metrics_url == url
    found = scrape(url)
    assert of_agents(found) == before  # no more and no less: Prometheus sees neither growth nor a reset
    assert total(found, "longshore_loads_finished_total") == 0  # the one before has counted that
    assert total(found, "longshore_rank_placed_bytes") == model.report.placed_bytes
    client.release(model.model_id, force=True, address=longshore.address)
    again = cluster.load(llama.uri, device="cpu", **llama.options)
    loaded = {source: size for source, size in again.report.bytes_by_source.items() if size}

    def grown() -> dict[str, float]:
        """Return the growth of counters by source, a label of every series."""
        name, found = "longshore_chunk_bytes_total", scrape(url)
        sizes = {key[-1]: size - before.get(key, 0) for key, size in found.items() if key[0] == name}
        return {source: size for source, size in sizes.items() if size}

    eventually(lambda: grown() == loaded, lambda: f"{loaded}: {grown()}")  # the report is what the counters grew by
    again.release()


@pytest.mark.cluster_settings(empty=True, metrics_port=0)
def test_a_restarted_agent_is_another_series_and_the_first_stays(longshore: Longshore, llama: StoredModel) -> None:
    model = cluster.load(llama.uri, device="cpu", keep=True, **llama.options)
    url = longshore.status().metrics_url
    moved = sum(model.report.bytes_by_source.values())
    eventually(lambda: total(scrape(url), "longshore_chunk_bytes_total") == moved, "the load was not counted")
    before = of_agents(scrape(url))
    (agent,) = longshore.actor_names("agent-")
    pid = longshore.pid(agent)
    longshore.kill(agent)
    longshore.wait_restarted(agent, pid)
    eventually(lambda: total(scrape(url), "longshore_agent_restarts_total") == 1, "no restart was counted", 60)
    found = scrape(url)
    assert {key: found.get(key) for key in before} == before
    assert total(found, "longshore_chunk_bytes_total") == moved  # the new one has fetched nothing
    assert len({key[1] for key in found if key[0] == "longshore_heartbeat_age_seconds"}) == 1
    client.release(model.model_id, force=True, address=longshore.address)


@pytest.mark.cluster_settings(empty=True, metrics_port=0)
def test_failed_loads_and_lost_ranks_are_counted(
    longshore: Longshore, llama: StoredModel, copy_of: Callable[[StoredModel], StoredModel]
) -> None:
    url = longshore.status().metrics_url
    damaged = copy_of(llama)
    shard = next(path for path in Path(damaged.in_bucket).iterdir() if path.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    damaged.server.refresh()
    with pytest.raises(cluster.LongshoreError):
        cluster.load(damaged.uri, device="cpu", **damaged.options)
    eventually(lambda: total(scrape(url), "longshore_chunks_corrupt_total") > 0, "no corrupt chunk was counted")
    found = scrape(url)
    assert sum(value for key, value in found.items() if key[0] == "longshore_load_failures_total") == 1
    assert [
        value for key, value in found.items() if key[0] == "longshore_loads_finished_total" and "failed" in key
    ] == [1]

    model = cluster.load(llama.uri, device="cpu", **llama.options)
    (name,) = longshore.actor_names("worker-")
    longshore.kill(name)
    eventually(lambda: total(scrape(url), "longshore_ranks_lost_total") == 1, "no lost rank was counted")
    eventually(lambda: ("longshore_loads", "llama", "ready") in scrape(url), "it was not filled again", 60)
    model.release()
