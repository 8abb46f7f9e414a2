"""Ray's autoscaler and a load: nodes come for one that waits, and go when nobody needs them.

The provider is Ray's fake one, which starts nodes on this machine; the autoscaler is Ray's own, version 2 as in `k8s/`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

import cluster
from tests.support.autoscaled_cluster import AutoscaledNodes, autoscaled_cluster
from tests.support.ray_clusters import eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

WAIT_S = 300.0  # for nodes, on however slow a machine
TP = 2


@pytest.fixture(scope="module")
def scaled() -> Iterator[AutoscaledNodes]:
    """No node but the head, at first."""
    with autoscaled_cluster({"gpus": {"GPU": 2}, "cpus": {"CPU": 1}}, idle_s=3) as there:
        there.configure(idle_agent_s=2.0)
        yield there


class SeenEnough(Exception):
    """The test has seen what it wanted of the load."""


def test_what_never_comes_is_given_up(scaled: AutoscaledNodes, llama: StoredModel) -> None:
    wanted = {**llama.options, "device": "cuda", "data_parallel_size": 16}  # the autoscaler may start 4 nodes of 2
    with pytest.raises(cluster.NotEnoughResources, match="16 free GPUs; 0 of 0 are free") as caught:
        cluster.load(llama.uri, wait_for_resources_s=2, **wanted)
    assert caught.value.details["waited_s"] == 2
    assert not scaled.placement_groups()
    with pytest.raises(cluster.LoadTimeout):
        cluster.load(llama.uri, wait_for_resources_s=WAIT_S, timeout_s=2, **wanted)
    eventually(lambda: not scaled.placement_groups(), "the autoscaler is still asked for nodes")


def test_gpus_that_are_missing_are_asked_of_the_autoscaler(scaled: AutoscaledNodes, llama: StoredModel) -> None:
    """This machine has no GPU, so the load is given up when its ranks have places on the node that came."""
    said: list[str] = []

    def look(progress: cluster.LoadProgress) -> None:
        if progress.state == "waiting":
            said.append(progress.message)
            assert scaled.placement_groups(), "nothing is asked of Ray"
        elif said:
            raise SeenEnough

    options = {**llama.options, "device": "cuda", "tensor_parallel_size": TP}
    with pytest.raises(SeenEnough):
        cluster.load(llama.uri, wait_for_resources_s=WAIT_S, progress=look, **options)
    assert "2 ranks need 2 free GPUs; 0 of 0 are free" in said[0]
    assert "asked_of_ray=1 bundle of 2 GPUs" in said[0]
    assert scaled.node_types() == ["type-gpus"]
    eventually(lambda: not scaled.placement_groups(), "the GPUs are still held")


def test_nodes_come_for_a_load_and_go_after_it(scaled: AutoscaledNodes, llama: StoredModel) -> None:
    """Loaded to the byte, in a placement group of the user's, which needs no GPU."""
    said: list[str] = []
    group = placement_group([{"CPU": 1}] * TP)
    try:
        model = cluster.load(
            llama.uri,
            device="cpu",
            tensor_parallel_size=TP,
            placement_group=group,
            wait_for_resources_s=WAIT_S,
            progress=lambda progress: said.append(progress.message),
            **llama.options,
        )
        assert any("it asks for 2 x {CPU: 1}" in message for message in said)
        assert model.call(shard_differs, str(llama.folder), TP, 1, KV_HEADS) == [[], []]
        assert scaled.node_types().count("type-cpus") == TP
        model.release()
    finally:
        remove_placement_group(group)
    eventually(lambda: not scaled.node_types(), lambda: f"nodes stay: {scaled.node_types()}", WAIT_S)
    assert not scaled.status().nodes
