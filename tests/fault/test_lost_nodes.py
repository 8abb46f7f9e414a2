"""A node dies under a load or a model: its ranks go on elsewhere, others keep what they have; or one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import cluster
from tests.support.gated_proxy import GatedProxy
from tests.support.half_load import HalfLoad
from tests.support.losable_nodes import LosableNodes, losable_nodes
from tests.support.ray_clusters import eventually
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
