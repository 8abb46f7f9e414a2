"""A Ray cluster whose nodes are hosts on a network of their own (`bench.harness.hosts`), and the head on this machine.

with net_cluster(("left", "right"), shown=tmp_path_factory.getbasetemp()) as net:
    host = net.network.hosts[0]
    host.cut()                      # its packets are lost, and nobody is told
    net.start_node(host)            # once more, after its processes were killed
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.harness.hosts import Host, Network, start_ray_node, why_not
from cluster.joining.connection import disconnect
from storage.arena.arena import KEPT
from storage.arena.arena_files import ARENA_PREFIX
from tests.support.losable_nodes import NODE, LosableNodes
from tests.support.ray_clusters import (
    ENVIRONMENT,
    OBJECT_STORE_BYTES,
    TEST_SETTINGS,
    environment,
    eventually,
    new_ray_cluster,
    variables,
)

HOST_RESOURCE = "host"  # of which this machine has none
SLOW_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
    "gcs_rpc_server_reconnect_timeout_s": 600,  # a raylet without news of the head for this long ends itself
}
START_S = 120.0
END_S = 60.0


class NetCluster(LosableNodes):
    """`Longshore` on a head and some hosts."""

    def __init__(self, ray_cluster: Any, network: Network, folder: Path) -> None:
        super().__init__(ray_cluster)
        self.network = network
        self._folder = folder
        self._raylets: dict[str, psutil.Process] = {}  # node id -> of nodes on hosts
        self._starts: dict[str, subprocess.Popen[bytes]] = {}  # host name -> `ray start` there
        for host in network.hosts:
            self.start_node(host, wait=False)
        for host in network.hosts:
            self._wait_node(host)

    # -- nodes -------------------------------------------------------------------------------------------------

    def start_node(self, host: Host, *, wait: bool = True) -> None:
        """Ray's processes, on a host where none are or where only those of a dead node are left."""
        environ = {**os.environ, **ENVIRONMENT, **variables(TEST_SETTINGS)}
        resources = {HOST_RESOURCE: 2.0}
        self._starts[host.name] = start_ray_node(
            host, self.address, environ, self._log(host), resources, OBJECT_STORE_BYTES
        )
        if wait:
            self._wait_node(host)

    def host_of(self, actor_name: str) -> Host | None:
        """The host where a living actor is; None: on this machine."""
        address = self._addresses().get(self.node_of(actor_name))
        return next((host for host in self.network.hosts if host.address == address), None)

    def node_on(self, host: Host) -> str | None:
        """Id of the node on this host that Ray takes for living."""
        living = self.living()
        return next((node for node, at in self._addresses().items() if at == host.address and node in living), None)

    def raylet(self, node_id: str) -> psutil.Process:
        """The process that leads a node on one of the hosts."""
        return self._raylets[node_id]

    # -- after a test ------------------------------------------------------------------------------------------

    def arenas_on(self, host: Host) -> list[str]:
        return sorted({name.partition(KEPT)[0] for name in host.shared_memory() if name.startswith(ARENA_PREFIX)})

    def assert_nothing_left(self) -> None:
        """Check the hosts too: no arena without a living agent, and no process of a node that Ray does not count."""
        super().assert_nothing_left()
        for host in self.network.hosts:
            agents = [name for name in self.actor_names("agent-") if name.endswith(self.node_on(host) or "no node")]
            self._eventually_at_most(len(agents), host, self.arenas_on)
            self._eventually_at_most(len(agents), host, self.ours_on)

    def ours_on(self, host: Host, kind: str = "") -> list[psutil.Process]:
        """Processes of Longshore's actors on a host: of agents or workers (`NodeAgent`, `GpuWorker`), or both."""
        found = []
        for process in host.processes():
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if any(name in title for name in ("NodeAgent", "GpuWorker")) and kind in title:
                found.append(process)
        return found

    # -- inside ------------------------------------------------------------------------------------------------

    def _eventually_at_most(self, count: int, host: Host, there: Callable[[Host], Sequence[object]]) -> None:
        eventually(lambda: len(there(host)) <= count, lambda: f"on {host.name}, {count} agents: {there(host)}", END_S)

    def _addresses(self) -> dict[str, str]:
        import ray

        return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]

    def _log(self, host: Host) -> Path:
        return self._folder / f"{host.name}.log"

    def _wait_node(self, host: Host) -> None:
        starting = self._starts[host.name]
        eventually(
            lambda: self.node_on(host) or starting.poll() is not None,
            lambda: f"no node came up on {host.name}: {self._log(host).read_text()[-2000:]}",
            START_S,
            0.2,
        )
        node = self.node_on(host)
        if node is None:
            raise AssertionError(f"ray start failed on {host.name}: {self._log(host).read_text()[-2000:]}")
        known = set(self._raylets.values())
        self._nodes[node] = host
        self._raylets[node] = next(p for p in host.processes() if p.name() == "raylet" and p not in known)


@contextlib.contextmanager
def net_cluster(hosts: Sequence[str], shown: Path) -> Iterator[NetCluster]:
    """Make hosts of these names, which see the folder `shown`. This process is connected as a driver on the head.

    Skips the test where hosts cannot be made.
    """
    if reason := why_not():
        pytest.skip(reason)
    import ray

    temporary = tempfile.TemporaryDirectory(prefix="lh-", dir="/tmp", ignore_cleanup_errors=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(ENVIRONMENT))
        folder, network = stack.enter_context(temporary), stack.enter_context(Network())
        head = {**NODE, "temp_dir": folder, "node_ip_address": network.address, "_system_config": SLOW_DEATH}
        ray_cluster = stack.enter_context(new_ray_cluster(**head))
        for name in hosts:
            network.add_host(name, [shown])
        try:
            ray.init(address=ray_cluster.address, log_to_driver=False, configure_logging=False)
            there = NetCluster(ray_cluster, network, Path(folder))
            yield there
            there.end_longshore()
        finally:
            disconnect()
            ray.shutdown()
