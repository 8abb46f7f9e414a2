"""A node dies under a load or a model: its ranks go on elsewhere, others keep what they have; or one clear error."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cluster
from cluster.joining.ray_private import actor_table
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.open_store import open_store
from tests.support.gated_proxy import GatedProxy
from tests.support.half_load import HalfLoad
from tests.support.losable_nodes import LosableNodes, losable_nodes
from tests.support.ray_clusters import eventually
from tests.support.s3_servers import make_bucket, server_ref
from tests.support.stored_models import StoredModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def losable_cluster() -> Iterator[LosableNodes]:
    """This process is connected to it for the tests of one file."""
    with losable_nodes() as there:
        yield there


@pytest.fixture
def losable(losable_cluster: LosableNodes) -> Iterator[LosableNodes]:
    """The cluster without a model; the same after the test, or it fails."""
    yield losable_cluster
    losable_cluster.clean()


@pytest.fixture
def half(losable: LosableNodes, llama: StoredModel) -> Iterator[HalfLoad]:
    with ThreadPoolExecutor(2) as pool, GatedProxy(llama.server.endpoint_url, ranges=10) as proxy:
        yield HalfLoad(losable, llama, proxy, pool)


def lose_one(losable: LosableNodes) -> tuple[int, ...]:
    """Kill a node that has ranks, all of it; these ranks."""
    nodes = {int(name.rsplit("-", 2)[1]): losable.node_of(name) for name in losable.actor_names("worker-")}
    lost = next(node for _, node in sorted(nodes.items()) if not losable.is_head(node))
    losable.kill_node(lost)
    return tuple(rank for rank in sorted(nodes) if nodes[rank] == lost)


def test_ranks_of_a_node_lost_in_mid_load_go_on_elsewhere(losable: LosableNodes, half: HalfLoad) -> None:
    losable.want(2)
    losable.configure(empty=True, cpu_ranks_per_node=1)
    loading = half.begin(reading=2, fsdp_size=2)
    kept = losable.worker_pids()
    (lost,) = lose_one(losable)
    eventually(lambda: len(losable.actor_names("worker-")) == 2, "no replacement came")
    half.proxy.open()
    with loading.result(300) as model:
        assert half.is_exact(model, 1)
        assert model.report.attempts == 2
        assert [rank.incarnation > 0 for rank in model.report.ranks] == [rank == lost for rank in range(2)]
        assert len(losable.worker_pids().items() & kept.items()) == 1
        # The rank that stayed fetched nothing twice: the store gave the model once, and the lost rank's half again.
        (stayed,) = (node for node in model.report.nodes if node.node == model.report.ranks[1 - lost].node)
        assert (stayed.refetched_chunks, stayed.store_chunks + stayed.peer_chunks) == (0, stayed.needed_chunks)


def test_bundles_of_a_lost_node_are_followed(losable: LosableNodes, half: HalfLoad) -> None:
    """Ray moves them, here to the node that has the other rank: two parts of one load beside each other."""
    from ray.util import placement_group, remove_placement_group

    losable.want(1)
    losable.configure(empty=True)
    group = placement_group([{"CPU": 1}] * 2, strategy="SPREAD")
    assert group.wait(120)
    try:
        loading = half.begin(reading=2, fsdp_size=2, placement_group=group)
        (lost,) = lose_one(losable)
        half.proxy.open()
        with loading.result(300) as model:
            assert half.is_exact(model, 1)
            assert model.report.attempts == 2
            assert model.report.ranks[lost].incarnation > 0
            assert len({rank.node for rank in model.report.ranks}) == 1
    finally:
        remove_placement_group(group)


def test_a_lost_node_without_room_elsewhere_ends_the_load(losable: LosableNodes, half: HalfLoad) -> None:
    losable.want(1)
    losable.configure(empty=True, cpu_ranks_per_node=1)
    loading = half.begin(reading=2, fsdp_size=2)
    (lost,) = lose_one(losable)
    with pytest.raises(cluster.NodeLost, match=rf"was lost, and its ranks \({lost}\) found no other place") as raised:
        loading.result(300)
    assert "LONGSHORE_NODE_WAIT_S" in raised.value.hint
    half.proxy.open()


def test_a_model_degrades_and_is_ready_again(losable: LosableNodes, half: HalfLoad) -> None:
    losable.want(1)
    losable.configure(empty=True, cpu_ranks_per_node=1, node_wait_s=120)
    half.proxy.open()
    with cluster.load(half.stored.uri, fsdp_size=2, device="cpu", **half.stored.options) as model:
        lose_one(losable)
        eventually(lambda: "1 ranks wait for a place" in losable.models()[0].progress.message, "it does not wait")
        assert losable.models()[0].progress.state == "degraded"
        with pytest.raises(cluster.RankLost):
            model.call(len)
        losable.add_node()
        eventually(lambda: [m.progress.state for m in losable.models()] == ["ready"], "it is not ready again")
        assert half.is_exact(model, 1)


CONVERT = """
import sys, cluster
from storage.store_ref import Credentials
source, dest, url, key, secret = sys.argv[1:]
keys = Credentials(access_key_id=key, secret_access_key=secret)
server = {"endpoint_url": url, "region": "us-east-1", "credentials": keys}
cluster.convert(source, dest, on_cluster=True, chunk_bytes=1 << 20, **server)
"""


def converting_nodes() -> list[str]:
    """The node of each living worker of a conversion."""
    actors = [one for one in actor_table().values() if one["ActorClassName"].endswith("ConvertWorker")]
    return [str(one["Address"]["NodeID"]) for one in actors if one["State"] == "ALIVE"]


@pytest.mark.long
def test_a_conversion_goes_on_without_a_lost_node(losable: LosableNodes, rclone: EmbeddedS3, tmp_path: Path) -> None:
    """First its driver is killed, which ends the workers; the next one continues, and loses a node."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    losable.want(2)
    weights = {name: np.random.default_rng(2).random((2_000_000,), np.float32) for name in "abcdefghij"}
    save_file(weights, tmp_path / "model.safetensors")
    bucket = f"convert-{uuid.uuid4().hex}"
    make_bucket(rclone, bucket)
    store = open_store(server_ref(rclone, bucket), rclone.credentials())
    with closing(store), store.upload("in/model.safetensors") as upload:
        upload.write(memoryview((tmp_path / "model.safetensors").read_bytes()))
        upload.complete()
    uri, out = f"s3://{bucket}/in", tmp_path / "out"
    with GatedProxy(rclone.endpoint_url, ranges=5) as proxy:
        given = [uri, str(out), proxy.endpoint_url, rclone.access_key_id, rclone.secret_access_key]
        with losable.run_client(CONVERT, *given) as driver:
            proxy.wait_until_held(6)
            assert len(set(converting_nodes())) == 3
            driver.kill()
        eventually(lambda: not converting_nodes(), "workers outlive their driver")
    options: dict[str, Any] = {"credentials": rclone.credentials(), "region": "us-east-1", "chunk_bytes": 1 << 20}
    with GatedProxy(rclone.endpoint_url, ranges=2) as proxy, ThreadPoolExecutor(1) as pool:
        options |= {"endpoint_url": proxy.endpoint_url, "progress": False}
        converting = pool.submit(cluster.convert, uri, out, on_cluster=True, address=losable.address, **options)
        proxy.wait_until_held(6)
        losable.kill_node(losable.node_ids[0])
        proxy.open()
        report = converting.result(120)
    assert (report.workers, report.verified) == (3, True)
    assert report.written_bytes + report.reused_bytes > report.size_bytes
    found = pytest.importorskip("safetensors.numpy").load_file(next(out.glob("*.safetensors")))
    assert all(np.array_equal(found[name], one) for name, one in weights.items())
    eventually(lambda: not converting_nodes(), "workers are left")
