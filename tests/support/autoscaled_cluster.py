"""A Ray cluster whose nodes Ray's own autoscaler starts and stops: its fake provider, all on this machine.

    with autoscaled_cluster({"gpus": {"GPU": 2}}) as there:     # node types, each 0 to 4 nodes
        there.configure()
        ...
        there.node_types()                                      # of the living nodes beside the head

The head has no CPU and no GPU. `ray.cluster_utils.AutoscalingCluster` is not used: it ends every Ray of the machine.
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

from cluster.joining.connection import disconnect
from storage.arena.arena_files import sweep
from tests.support.free_ports import free_ports
from tests.support.head_cluster import end_node, start_node
from tests.support.ray_clusters import (
    ENVIRONMENT,
    OBJECT_STORE_BYTES,
    REPOSITORY,
    TEST_SETTINGS,
    Longshore,
    environment,
    variables,
)

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # of the fake provider
HEAD_TYPE = "ray.head.default"
MOST_NODES = 4
VARIABLE = "RAY_TMPDIR"  # all processes of the cluster have it


class AutoscaledNodes(Longshore):
    """`Longshore` on such a cluster; this process is connected to it."""

    def node_types(self) -> list[str]:
        """Of the living nodes beside the head, by the resource that names each node's type."""
        import ray

        living = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return sorted(name for node in living for name in node["Resources"] if name.startswith("type-"))


@contextlib.contextmanager
def autoscaled_cluster(
    types: Mapping[str, Mapping[str, float]], *, idle_s: float = 5.0, version: int = 2
) -> Iterator[AutoscaledNodes]:
    """`types`: name -> resources of a node. A node that Ray takes for idle goes after `idle_s`."""
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
    """What `ray up` would make of a cluster's YAML file."""
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
