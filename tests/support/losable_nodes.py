"""A Ray cluster whose nodes can be lost: a head, and nodes that a test adds and kills.

    def test_something(losable: LosableNodes) -> None:
        losable.configure(cpu_ranks_per_node=1)
        losable.want(2)                             # so many nodes beside the head
        ...
        losable.kill_node(losable.node_of("worker-llama-1-0"))

Ray finds a dead node in about a second here, not in its usual half a minute.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

from cluster.joining.connection import disconnect
from storage.arena.arena_files import sweep
from tests.support.ray_clusters import (
    ENVIRONMENT,
    NODE_START_S,
    OBJECT_STORE_BYTES,
    TEST_SETTINGS,
    Longshore,
    environment,
    eventually,
    new_ray_cluster,
    variables,
)

FAST_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": OBJECT_STORE_BYTES, "env_vars": variables(TEST_SETTINGS)}


class LosableNodes(Longshore):
    """`Longshore` on nodes of its own."""

    def __init__(self, ray_cluster: Any) -> None:
        super().__init__(ray_cluster)
        self._nodes: dict[str, Any] = {}  # node id -> handle, of those beside the head
        self.added = 0  # ever. Each costs this process one thread of Ray's that stays: `cluster_utils` polls the head

    def want(self, count: int) -> None:
        """Add or remove nodes until there are this many beside the head."""
        for node_id in list(self._nodes)[count:]:
            self.kill_node(node_id)
        while len(self._nodes) < count:
            node = self.ray_cluster.add_node(**NODE, wait=False)
            self._nodes[node.node_id] = node
            self.added += 1
        eventually(lambda: self._nodes.keys() <= self.living(), "nodes do not come up", NODE_START_S)

    @property
    def node_ids(self) -> list[str]:
        """Nodes beside the head."""
        return list(self._nodes)

    def add_node(self) -> str:
        """One more; its id."""
        self.want(len(self._nodes) + 1)
        return list(self._nodes)[-1]

    def node_of(self, name: str) -> str:
        """Id of the node where a living actor is."""
        from cluster.joining.ray_private import actor_table

        for actor in actor_table().values():
            if actor["Name"] == name and actor["State"] == "ALIVE":
                return str(actor["Address"]["NodeID"])
        raise LookupError(f"no living actor {name}")

    def is_head(self, node_id: str) -> bool:
        """Return whether it is the node that cannot be lost."""
        return node_id not in self._nodes

    def kill_node(self, node_id: str) -> None:
        """Send SIGKILL to the whole node. Returns when Ray knows it."""
        self.ray_cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)
        eventually(lambda: node_id not in self.living(), "the node is still taken for living")

    def living(self) -> set[str]:
        """Ids of the nodes that Ray takes for living."""
        import ray

        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]

    def assert_nothing_left(self) -> None:
        sweep()  # the arenas of nodes that were killed
        super().assert_nothing_left()


@contextlib.contextmanager
def losable_nodes() -> Iterator[LosableNodes]:
    """A head without other nodes; this process is connected to it."""
    import ray

    temporary = tempfile.TemporaryDirectory(prefix="ln-", dir="/tmp", ignore_cleanup_errors=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(ENVIRONMENT))
        folder = stack.enter_context(temporary)
        ray_cluster = stack.enter_context(new_ray_cluster(**NODE, temp_dir=folder, _system_config=FAST_DEATH))
        there = LosableNodes(ray_cluster)
        try:
            ray.init(address=ray_cluster.address, log_to_driver=False, configure_logging=False)
            yield there
            there.end_longshore()
        finally:
            disconnect()
            ray.shutdown()
