"""A proxy counts what leaves the store: each needed chunk once per node, then nothing."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import cluster
from cluster import client
from tests.support.counting_proxy import CountingProxy
from tests.support.ray_clusters import Longshore, eventually, scrape
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = pytest.mark.slow


def weight_ranges(proxy: CountingProxy) -> Counter[tuple[str, tuple[int, int] | None]]:
    """Count how often each range of each shard was sent."""
    return Counter((r.path, r.range) for r in proxy.requests() if r.path.endswith(".safetensors") and r.range)


def sent_bytes(proxy: CountingProxy) -> int:
    return sum(size for path, size in proxy.bytes_by_path().items() if path.endswith(".safetensors"))


@pytest.mark.cluster_settings(empty=True)
def test_each_chunk_leaves_once_and_none_the_second_time(longshore: Longshore, llama: StoredModel) -> None:
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        with cluster.load(llama.uri, tensor_parallel_size=2, **options) as model:
            (node,) = model.report.nodes
            assert set(weight_ranges(proxy).values()) == {1}
            assert len(weight_ranges(proxy)) == node.needed_chunks == node.store_chunks == model.report.verified_chunks
            assert node.needed_bytes == node.store_bytes <= sent_bytes(proxy) <= node.needed_bytes * 1.02
            assert model.report.overfetch_bytes >= 0
            assert model.report.stages.fetch_bytes == node.store_bytes
            assert node.cached_chunks == 0
        proxy.clear()
        for layout in ({"tensor_parallel_size": 2}, {"fsdp_size": 2}):
            with cluster.load(llama.uri, **layout, **options) as model:
                (node,) = model.report.nodes
                assert sent_bytes(proxy) == 0
                assert (node.store_chunks, node.cached_chunks) == (0, node.needed_chunks)
                tp, fsdp = layout.get("tensor_parallel_size", 1), layout.get("fsdp_size", 1)
                assert model.call(shard_differs, str(llama.folder), tp, fsdp, KV_HEADS) == [[], []]


@pytest.mark.cluster_settings(arena_bytes=9 << 20)
def test_a_model_larger_than_the_arena(longshore: Longshore, llama: StoredModel) -> None:
    """Twenty chunks through nine slots: every chunk once, and host memory for nine."""
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        with cluster.load(llama.uri, tensor_parallel_size=2, **options) as model:
            (node,) = model.report.nodes
            assert node.needed_chunks > 9
            assert set(weight_ranges(proxy).values()) == {1}
            assert node.arena_limit_bytes == 9 << 20
            assert model.call(shard_differs, str(llama.folder), 2, 1, KV_HEADS) == [[], []]


@pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=2, peer_port=-1)
def test_two_nodes_each_fetch_a_chunk_once(longshore: Longshore, llama: StoredModel) -> None:
    """TP 2 x DP 2, two ranks a node. Nodes do not feed each other: what both need leaves twice."""
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        layout = {"tensor_parallel_size": 2, "data_parallel_size": 2}
        with cluster.load(llama.uri, **layout, **options) as model:
            assert len(model.report.nodes) == 2
            assert {rank.node for rank in model.report.ranks} == {node.node for node in model.report.nodes}
            assert set(weight_ranges(proxy).values()) == {2}
            needed = sum(node.needed_bytes for node in model.report.nodes)
            assert needed == model.report.store_bytes <= sent_bytes(proxy) <= needed * 1.02
            assert model.call(shard_differs, str(llama.folder), 2, 1, KV_HEADS) == [[]] * 4
            assert [node.used_bytes for node in longshore.status().nodes] == [needed // 2] * 2


def check_shown(longshore: Longshore, model: cluster.LoadedModel) -> None:
    """Check that events, the chunk map and the metrics say of each node what the report says."""
    nodes = {node.node: node for node in model.report.nodes}
    found = client.chunk_map(model.model_id, address=longshore.address).nodes
    assert {each.node for each in found} == nodes.keys()
    for each in found:
        known = {source: size for source, size in nodes[each.node].bytes_by_source.items() if source != "unknown"}
        assert each.traffic.bytes_by_source == known
        assert each.traffic.sent_bytes == nodes[each.node].sent_bytes
        assert each.traffic.peer_bytes_from == {each.host: nodes[each.node].peer_bytes}  # both nodes are on this host
    events = client.events(model.model_id, address=longshore.address)
    total, *of_nodes = [event for event in events if event.kind == "sources"]
    assert total.details["bytes_by_source"] == model.report.bytes_by_source
    assert [event.details["sent_bytes"] for event in of_nodes] == [node.sent_bytes for node in nodes.values()]
    url, name = longshore.status().metrics_url, "longshore_sent_bytes_total"
    sent = {node.sent_bytes for node in nodes.values()}
    eventually(lambda: {size for key, size in scrape(url).items() if key[0] == name} == sent, "not what was sent")


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel_size": 2, "data_parallel_size": 2}, {"tensor_parallel_size": 4}, {"fsdp_size": 4}]
)
@pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=2, peer_port=0, arena_bytes=9 << 20, metrics_port=0)
def test_two_nodes_fetch_a_chunk_once_together(
    longshore: Longshore, llama: StoredModel, layout: dict[str, int]
) -> None:
    """Twenty chunks through nine slots of each node, and every chunk leaves the store once."""
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        with cluster.load(llama.uri, **layout, **options) as model:
            report = model.report
            assert len(report.nodes) == 2
            assert set(weight_ranges(proxy).values()) == {1}
            assert report.peer_bytes == report.bytes_by_source["peer"] > 0
            assert report.store_bytes + report.peer_bytes == sum(node.needed_bytes for node in report.nodes)
            check_shown(longshore, model)
            sizes = layout.get("tensor_parallel_size", 1), layout.get("fsdp_size", 1)
            assert model.call(shard_differs, str(llama.folder), *sizes, KV_HEADS) == [[]] * 4


@pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=2, peer_port=0)
def test_a_later_load_on_another_node_asks_the_one_that_has_the_model(longshore: Longshore, llama: StoredModel) -> None:
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
        with cluster.load(llama.uri, tensor_parallel_size=2, **options) as first:
            (node,) = first.report.nodes
            read_bytes = sent_bytes(proxy)
            with cluster.load(llama.uri, fsdp_size=2, **options) as second:
                (other,) = second.report.nodes
                assert other.node != node.node
                assert (second.report.store_bytes, second.report.peer_bytes) == (0, other.needed_bytes)
                assert sum(other.peer_bytes_from.values()) == other.needed_bytes
                assert sent_bytes(proxy) == read_bytes
                assert second.call(shard_differs, str(llama.folder), 1, 2, KV_HEADS) == [[], []]


@pytest.mark.cluster_settings(empty=True, cpu_ranks_per_node=2, peer_port=-1)
def test_a_load_is_placed_where_its_chunks_are(longshore: Longshore, llama: StoredModel) -> None:
    options = {**llama.options, "device": "cpu"}
    with cluster.load(llama.uri, tensor_parallel_size=2, **options) as first:
        (node,) = first.report.nodes
    plan = cluster.plan(llama.uri, fsdp_size=2, **llama.options)
    assert any("placed on nodes that already have chunks" in note for note in plan.notes)
    with cluster.load(llama.uri, fsdp_size=2, **options) as second:
        assert [each.node for each in second.report.nodes] == [node.node]
        assert "placed on nodes that already have chunks" in second.report.placement_reason
        assert second.report.store_bytes == 0


def read_model(uri: str, options: dict[str, Any], meeting: Path) -> dict[str, bytes]:
    """Open the model, wait until another process has it open too, and return all tensors. Runs as a task of Ray."""
    with cluster.safe_open(uri, **options) as model:
        names = list(model.keys())
        model.get_tensor(names[0])
        (meeting / uuid.uuid4().hex).touch()
        eventually(lambda: len(list(meeting.iterdir())) == 2, "the other process does not come")
        return {name: model.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in names}


@pytest.mark.cluster_settings(empty=True, peer_port=0)
def test_readers_on_two_nodes_fetch_a_chunk_once_together(
    longshore: Longshore, llama: StoredModel, tmp_path: Path
) -> None:
    """Tasks of Ray start the agents of their nodes, and share the model out."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    assert len(nodes) == 2
    with CountingProxy(llama.server.endpoint_url) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url}
        task = ray.remote(read_model)
        pinned = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        tasks = [task.options(scheduling_strategy=each).remote(llama.uri, options, tmp_path) for each in pinned]
        first, second = ray.get(tasks)
        assert first == second
        assert len(longshore.actor_names("agent-")) == 2
        assert set(weight_ranges(proxy).values()) == {1}
