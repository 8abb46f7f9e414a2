"""Ray's autoscaler and a load: nodes come for one that waits, and go when nobody needs them.

The provider is Ray's fake one, which starts nodes on this machine; the autoscaler is Ray's own, version 2 as in `k8s/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

import cluster
from cluster.joining.connection import disconnect
from storage.arena.arena_files import sweep
from tests.support.counting_proxy import CountingProxy
from tests.support.free_ports import free_ports
from tests.support.head_cluster import end_node, start_node
from tests.support.ray_clusters import (
    ENVIRONMENT,
    OBJECT_STORE_BYTES,
    REPOSITORY,
    TEST_SETTINGS,
    Longshore,
    environment,
    eventually,
    variables,
)
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]


HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # of the fake provider
HEAD_TYPE = "ray.head.default"
MOST_NODES = 4
VARIABLE = "RAY_TMPDIR"  # all processes of the cluster have it


class AutoscaledNodes(Longshore):
    """`Longshore` on such a cluster; this process is connected to it."""

    def node_types(self) -> list[str]:
        """List the living nodes beside the head by the resource that names each node's type."""
        import ray

        living = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return sorted(name for node in living for name in node["Resources"] if name.startswith("type-"))


@contextlib.contextmanager
def autoscaled_cluster(
    types: Mapping[str, Mapping[str, float]], *, idle_s: float = 5.0, version: int = 2
) -> Iterator[AutoscaledNodes]:
    """Start a Ray cluster whose nodes Ray's own autoscaler starts and stops through its fake provider.

    `types` maps a name to the resources of a node; each may have 0 to MOST_NODES nodes. Ray removes an idle node after
    `idle_s`. The head has no CPU and no GPU. `ray.cluster_utils.AutoscalingCluster` would end every Ray of the machine.
    """
    import ray

    folder = Path(tempfile.mkdtemp(prefix="la-", dir="/tmp"))
    gcs, dashboard_agent, agent_grpc = free_ports(3)
    address = f"127.0.0.1:{gcs}"
    (folder / "autoscaling.json").write_text(json.dumps(_config(types, address, idle_s, version)))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {**ENVIRONMENT, **variables(TEST_SETTINGS), "PYTHONPATH": str(REPOSITORY)}
    environ |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    if version == 2:
        environ |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID}
        environ |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={gcs}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder}/r"]
    command += ["--num-cpus=0", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"]
    command += [f"--dashboard-agent-listen-port={dashboard_agent}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    command += [f"--autoscaling-config={folder}/autoscaling.json"]
    mark = {VARIABLE: str(folder)}
    try:
        with contextlib.ExitStack() as stack:
            head = start_node(command, folder / "start.log", environ, mark)
            stack.callback(end_node, head, mark)
            stack.enter_context(environment(ENVIRONMENT))
            ray.init(address=address, log_to_driver=False, configure_logging=False)
            there = AutoscaledNodes(SimpleNamespace(address=address))
            try:
                yield there
                there.end_longshore()
            finally:
                disconnect()
                ray.shutdown()
    finally:
        sweep()
        shutil.rmtree(folder, ignore_errors=True)


def _config(types: Mapping[str, Mapping[str, float]], address: str, idle_s: float, version: int) -> dict[str, Any]:
    """Return the configuration that `ray up` would make of a cluster's YAML file."""
    provider = {
        "type": "external",  # the wheel lacks the file of defaults that `fake_multinode` is looked up with
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "gcs_address": address,
    }
    if version == 2:
        provider |= {"launch_multiple": True, "head_node_id": HEAD_ID}
    ours = {
        name: {
            "resources": {
                "CPU": 0,
                "GPU": 0,
                "object_store_memory": OBJECT_STORE_BYTES,
                **resources,
                f"type-{name}": 1,
            },
            "node_config": {},
            "min_workers": 0,
            "max_workers": MOST_NODES,
        }
        for name, resources in types.items()
    }
    head = {"resources": {}, "node_config": {}, "max_workers": 0}
    empty = ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands")
    empty = (*empty, "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude")
    return {
        "cluster_name": "fake",
        "max_workers": 2 * MOST_NODES,
        "provider": provider,
        "available_node_types": {**ours, HEAD_TYPE: head},
        "head_node_type": HEAD_TYPE,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": idle_s / 60,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in (*empty, "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }


WAIT_S = 300.0  # for nodes, on however slow a machine
TP = 2


@pytest.fixture(scope="module")
def scaled() -> Iterator[AutoscaledNodes]:
    """No node but the head, at first."""
    with autoscaled_cluster({"gpus": {"GPU": 2}, "cpus": {"CPU": 1}}, idle_s=3) as there:
        there.configure(idle_agent_s=2.0, peer_port=0)
        yield there


class SeenEnough(Exception):
    """The test has seen what it wanted of the load."""


def test_a_load_ends_when_its_nodes_never_come(scaled: AutoscaledNodes, llama: StoredModel) -> None:
    wanted = {**llama.options, "device": "cuda", "data_parallel_size": 16}  # the autoscaler may start 4 nodes of 2
    with pytest.raises(cluster.NotEnoughResources, match="16 free GPUs; 0 of 0 are free") as caught:
        cluster.load(llama.uri, wait_for_resources_s=2, **wanted)
    assert caught.value.details["waited_s"] == 2
    assert not scaled.placement_groups()
    with pytest.raises(cluster.LoadTimeout):
        cluster.load(llama.uri, wait_for_resources_s=WAIT_S, timeout_s=2, **wanted)
    eventually(lambda: not scaled.placement_groups(), "the autoscaler is still asked for nodes")


def test_gpus_that_are_missing_are_asked_of_the_autoscaler(scaled: AutoscaledNodes, llama: StoredModel) -> None:
    """This machine has no GPU, so the load is abandoned once its ranks are placed on the new node."""
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
    """Loaded to the byte, in a placement group of the user's, which needs no GPU.

    A replica on a node that comes later is filled by the nodes that serve the model: the store is asked for nothing.
    """
    said: list[str] = []
    group, later = placement_group([{"CPU": 1}] * TP), None
    try:
        with CountingProxy(llama.server.endpoint_url) as proxy:
            options = {**llama.options, "endpoint_url": proxy.endpoint_url, "device": "cpu"}
            options["wait_for_resources_s"] = WAIT_S
            model = cluster.load(
                llama.uri,
                tensor_parallel_size=TP,
                placement_group=group,
                progress=lambda progress: said.append(progress.message),
                **options,
            )
            assert any("it asks for 2 x {CPU: 1}" in message for message in said)
            assert model.call(shard_differs, str(llama.folder), TP, 1, KV_HEADS) == [[], []]
            assert scaled.node_types().count("type-cpus") == TP
            asked = [request for request in proxy.requests() if request.is_weights]
            assert asked
            later = placement_group([{"CPU": 1}])
            with cluster.load(llama.uri, placement_group=later, **options) as replica:
                (node,) = replica.report.nodes
                assert node.node not in {each.node for each in model.report.nodes}
                assert (node.store_bytes, node.peer_bytes) == (0, node.needed_bytes)
                assert [request for request in proxy.requests() if request.is_weights] == asked
                assert replica.call(shard_differs, str(llama.folder), 1, 1, KV_HEADS) == [[]]
            model.release()
    finally:
        remove_placement_group(group)
        if later is not None:
            remove_placement_group(later)
    eventually(lambda: not scaled.node_types(), lambda: f"nodes stay: {scaled.node_types()}", WAIT_S)
    assert not scaled.status().nodes
