"""One real Ray cluster of two nodes for all tests of a session, and what a test does with it.

    @pytest.mark.cluster_settings(holder_ttl_s=2)  # over TEST_SETTINGS; empty=True: with new, empty arenas
    def test_something(longshore: Longshore) -> None:
        model = cluster.load(uri, **options, address=longshore.address)

Each node claims two GPUs that do not exist: enough to be counted, never used. After each test every model is gone,
and the test fails when an actor, a placement group, a lease or an arena is left that should not be.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.links import COORDINATOR, NAMESPACE, agent_name
from cluster import client
from cluster.config import ENV_PREFIX, Config
from cluster.joining.connection import Connection, connect, disconnect
from cluster.joining.patience import Patience
from cluster.telemetry.report import ClusterStatus, ModelStatus
from storage.arena.arena_files import ARENA_PREFIX, SHM_DIRECTORY, arena_names, arena_path, sweep
from storage.errors import LongshoreError

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
OBJECT_STORE_BYTES = 80_000_000  # about the least that Ray takes
GPUS_PER_NODE = 2
NODE_START_S = 240.0  # on however slow a machine
TEST_SETTINGS: dict[str, Any] = {
    "arena_bytes": 96 * MIB,
    "window_bytes": 48 * MIB,
    "slot_bytes": MIB,
    "chunk_bytes": MIB,
    "heartbeat_s": 0.2,
    "hedge_factor": 0.0,  # a slow machine is no reason to ask twice, where requests are counted
    "host_reserve_bytes": 64 * MIB,
}
# Where the actors of these clusters look for credentials that nobody passed them; not there unless a test writes it.
CREDENTIALS_FILE = Path(tempfile.gettempdir()) / f"longshore-test-credentials-{os.getpid()}"
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",  # processes that nothing here would use
    "RAY_enable_worker_prestart": "0",
    "AWS_SHARED_CREDENTIALS_FILE": str(CREDENTIALS_FILE),
}


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment of nodes that have these settings."""
    return {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in settings.items()}


class Longshore:
    """A cluster with two nodes, as a test sees it."""

    def __init__(self, ray_cluster: Any) -> None:
        self.ray_cluster = ray_cluster
        self.address: str = ray_cluster.address
        self._running: Config | None = None  # settings of the coordinator that runs
        self._new = False  # it was started by the last call of `configure`

    # -- the coordinator ---------------------------------------------------------------------------------------

    def configure(self, *, empty: bool = False, **settings: Any) -> Connection:
        """A connection to a coordinator with TEST_SETTINGS and these; the running one is kept when it has them.

        `empty`: not kept, so that the arenas are new and empty.
        """
        wanted = Config(**{**TEST_SETTINGS, **settings})
        is_empty = self._new and not self.actor_names("agent-")
        if self._running is not None and (self._running != wanted or (empty and not is_empty)):
            self.end_longshore()
        disconnect()
        connection = connect(self.address, wanted, start=False)  # a line to one that runs
        self._new = connection is None
        if connection is None:
            self.start(**settings)
            connection = connect(self.address, wanted, start=False)
        if connection is None:
            raise RuntimeError("no coordinator was started")
        self._running = wanted
        return connection

    def start(self, **settings: Any) -> None:
        """Start a coordinator with TEST_SETTINGS and these where none runs; this process has joined the cluster.

        As the program that started the nodes does. A load starts one with the settings in the nodes' environment.
        """
        from actors.launch import ensure_coordinator

        ensure_coordinator(Config(**{**TEST_SETTINGS, **settings}), Patience(time.monotonic() + NODE_START_S))

    def end_longshore(self) -> None:
        """No coordinator, no agents, no arenas; the Ray cluster stays."""
        try:
            client.shutdown(self.address)
        except LongshoreError:
            self.kill_everything()
        disconnect()
        self._running = None
        eventually(lambda: not self.actor_names(), "actors of Longshore are left")
        eventually(self.swept, "arenas are left")

    def kill_everything(self) -> None:
        """Coordinator, agents and workers die at once; what they had in shared memory stays until it is `swept`."""
        import ray

        for name in self.actor_names():
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)

    def swept(self) -> bool:
        """Remove the arenas of dead agents and return whether none is left. Dying processes may still hold some."""
        sweep()
        return not self.arenas()

    def status(self) -> ClusterStatus:
        return client.status(self.address)

    def models(self) -> list[ModelStatus]:
        """Those that are not over."""
        return list(self.status().models)

    def start_other_agent(self, node_id: str) -> None:
        """Start an agent on the node whose process runs another version of Longshore. It ends with Longshore."""
        from actors.node_agent import NodeAgent

        class OtherAgent(NodeAgent):  # local, so that it travels by value
            def __init__(self, *arguments: Any) -> None:
                from cluster import messages

                messages.VERSION = (6, "9.9.9")
                super().__init__(*arguments)

        self._start_agent(node_id, OtherAgent)

    def start_damaging_agent(self, node_id: str) -> None:
        """Start an agent on the node that flips a bit of each chunk which it sends to another node."""
        from actors.node_agent import NodeAgent

        class DamagingAgent(NodeAgent):  # local, as above
            def __init__(self, *arguments: Any) -> None:
                import ray

                from actors import node_agent
                from storage.peers import Asker, NoChunk
                from storage.peers.chunk_server import ServedChunk

                class DamagingShelf(node_agent.PeerShelf):
                    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk | NoChunk:
                        found = super().take(load_id, chunk, asker, wait_s)
                        if isinstance(found, NoChunk):
                            return found
                        data = bytearray(os.pread(found.descriptor, found.size_bytes, found.offset))
                        data[len(data) // 2] ^= 1
                        descriptor = os.memfd_create("damaged")
                        os.write(descriptor, data)

                        def release(received: bool) -> None:
                            os.close(descriptor)
                            found.release(received)

                        return ServedChunk(descriptor, 0, found.size_bytes, found.digest, release)

                node_agent.PeerShelf = DamagingShelf  # type: ignore[misc]
                super().__init__(*arguments)
                self.serve_peers(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

        self._start_agent(node_id, DamagingAgent)

    def _start_agent(self, node_id: str, agent_class: type) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from actors.links import RayCoordinatorLink

        config = Config(**TEST_SETTINGS) if self._running is None else self._running
        only_there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        agent = (
            ray.remote(agent_class)
            .options(
                name=agent_name(node_id),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=16,
                scheduling_strategy=only_there,
            )
            .remote(config, self.address, node_id, "", RayCoordinatorLink())
        )
        ray.get(agent.coordinator_age_s.remote())

    # -- what is there -----------------------------------------------------------------------------------------

    def actor_names(self, prefix: str = "") -> list[str]:
        """Living actors of Longshore whose names begin so."""
        import ray

        found = ray.util.list_named_actors(all_namespaces=True)
        return sorted(
            actor["name"] for actor in found if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)
        )

    def pid(self, name: str) -> int:
        """Process id of a living actor."""
        from cluster.joining.ray_private import actor_table

        for actor in actor_table().values():
            if actor["Name"] == name and actor["State"] == "ALIVE":
                return int(actor["Address"].get("Pid") or actor["Pid"])
        raise LookupError(f"no living actor {name}")

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to an actor's process; its pid."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def placement_groups(self) -> list[str]:
        """Name, bundles and state of the placement groups that are not removed."""
        from ray.util import placement_group_table

        return [
            f"{table['name']} {table['bundles']} {table['state']}"
            for table in placement_group_table().values()
            if table["state"] != "REMOVED"
        ]

    def arenas(self) -> list[str]:
        """This cluster's files in shared memory; others may have theirs beside them."""
        return arenas_of(self.address)

    def assert_nothing_left(self) -> None:
        """Wait until no worker, placement group or lease is left, and no arena without its agent."""
        eventually(lambda: not self.actor_names("worker-"), lambda: f"workers left: {self.actor_names('worker-')}")
        eventually(lambda: not self.placement_groups(), lambda: f"placement groups left: {self.placement_groups()}")
        if COORDINATOR in self.actor_names():
            eventually(self._no_slot_in_use, lambda: f"slots in use: {self.status().nodes}")
        agents = self.actor_names("agent-")
        eventually(lambda: len(self.arenas()) <= len(agents), lambda: f"{len(agents)} agents, arenas: {self.arenas()}")

    def _no_slot_in_use(self) -> bool:
        return all(not node.leased_slots and not node.quarantined_slots for node in self.status().nodes)

    def clean(self) -> None:
        """Release every model after a test. Raises AssertionError when something is left behind."""
        try:
            if COORDINATOR not in self.actor_names():
                self._running = None
                disconnect()
                self.assert_nothing_left()
                return
            for model in self.models():
                client.release(model.progress.model_id, force=True, address=self.address)
            self.assert_nothing_left()
        except BaseException:
            self.end_longshore()
            raise
        finally:
            disconnect()

    def worker_pids(self) -> dict[str, int]:
        """Process id of every worker, by actor name. LookupError when one is not up yet."""
        return {name: self.pid(name) for name in self.actor_names("worker-")}

    def living_pids(self, prefix: str) -> dict[str, int]:
        """Process id of every actor whose name begins so and whose process is up, by name."""
        from cluster.joining.ray_private import actor_table

        return {
            actor["Name"]: int(actor["Address"].get("Pid") or actor["Pid"])
            for actor in actor_table().values()
            if actor["Name"].startswith(prefix) and actor["State"] == "ALIVE"
        }

    def living_workers(self) -> dict[str, int]:
        """Return `worker_pids` of the processes that are alive."""
        return self.living_pids("worker-")

    def wait_restarted(self, name: str, old_pid: int) -> int:
        """The process id of the actor that took the killed one's place."""

        def new_pid() -> int | None:
            with contextlib.suppress(LookupError):
                pid = self.pid(name)
                return pid if pid != old_pid else None
            return None

        pid: int = eventually(new_pid, f"{name} was not restarted")
        return pid

    # -- other clients -----------------------------------------------------------------------------------------

    def run_client(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        """A Python process that uses this cluster; talked to by lines. The caller ends it."""
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, "RAY_ADDRESS": self.address},
        )


def arenas_of(address: str) -> list[str]:
    """Return the files in shared memory of the cluster at that address."""
    prefix = os.path.basename(arena_path(address, "")).rpartition("-")[0]
    return [name for name in arena_names() if name.startswith(prefix)]


def arenas_mapped_by(processes: Sequence[psutil.Process]) -> set[str]:
    """Return the paths of the arenas that these processes use; other clusters of the machine have theirs."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError), open(f"/proc/{process.pid}/maps") as maps:
            found |= {line.split()[-1] for line in maps if f"{SHM_DIRECTORY}/{ARENA_PREFIX}" in line}
    return found


def eventually(
    condition: Callable[[], Any], problem: str | Callable[[], str], timeout_s: float = 120.0, every_s: float = 0.05
) -> Any:
    """The condition's first true value. AssertionError when it has none in time."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > give_up_s:
            raise AssertionError(problem if isinstance(problem, str) else problem())
        time.sleep(every_s)


def scrape(url: str) -> dict[tuple[str, ...], float]:
    """Return the metrics at `url`: (name, label values by label) -> value. Empty while the server does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextlib.contextmanager
def environment(ours: Mapping[str, str], without: Sequence[str] = ()) -> Iterator[None]:
    """The process's environment has these inside, and none of `without`; what it was before after it."""
    before = {name: os.environ.get(name) for name in (*ours, *without)}
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def new_ray_cluster(**head: Any) -> Iterator[Any]:
    """Start a `ray.cluster_utils.Cluster` with that head, without connecting to it. It ends with the block."""
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster

    os.makedirs(get_default_ray_temp_dir(), exist_ok=True)  # Ray notes the cluster there, wherever `temp_dir` is
    ray_cluster = Cluster()
    try:
        # It would wait for 30 s at most. Another cluster of this machine may have the default port of the dashboard.
        ray_cluster.add_node(wait=False, include_dashboard=False, dashboard_port=None, **head)
        ray_cluster.wait_for_nodes(NODE_START_S)
        yield ray_cluster
    finally:
        ray_cluster.shutdown()
        sweep()


@contextlib.contextmanager
def ray_cluster_of_two() -> Iterator[Any]:
    """Start a `ray.cluster_utils.Cluster` without connecting to it."""
    node = {"num_cpus": 4, "num_gpus": GPUS_PER_NODE, "object_store_memory": OBJECT_STORE_BYTES}
    node["include_log_monitor"] = False  # a process that reads all logs, again and again
    node["env_vars"] = variables(TEST_SETTINGS)
    temporary = tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp", ignore_cleanup_errors=True)
    with (
        environment(ENVIRONMENT),
        temporary as folder,
        environment({"XDG_RUNTIME_DIR": folder}),  # where agents open their doors: one folder per cluster
        new_ray_cluster(**node, temp_dir=folder) as ray_cluster,
    ):
        ray_cluster.add_node(wait=False, **node)
        ray_cluster.wait_for_nodes(NODE_START_S)
        yield ray_cluster


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` for all tests of a session."""
    with ray_cluster_of_two() as there:
        yield there


@pytest.fixture(scope="module")
def connected(two_nodes: Any) -> Iterator[Longshore]:
    """This process joins the cluster for the tests of one file, and leaves it after them."""
    import ray

    ray.init(address=two_nodes.address, log_to_driver=False, configure_logging=False)
    there = Longshore(two_nodes)
    try:
        there.end_longshore()
        yield there
        there.end_longshore()
    finally:
        disconnect()
        ray.shutdown()


def marked_settings(test: pytest.Item) -> dict[str, Any]:
    """Return the settings of the test's mark `cluster_settings`."""
    marked = test.get_closest_marker("cluster_settings")
    return dict(marked.kwargs) if marked else {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of a file that want the same settings follow each other: for others the coordinator starts again."""
    first: dict[object, int] = {}

    def place(item: pytest.Item) -> list[int]:
        settings = {name: value for name, value in marked_settings(item).items() if name != "empty"}
        return [first.setdefault(key, len(first)) for key in (item.path, (item.path, repr(settings)))]

    items.sort(key=place)


@pytest.fixture
def longshore(connected: Longshore, request: pytest.FixtureRequest) -> Iterator[Longshore]:
    """The cluster without a model, with a coordinator of the test's settings; the same after the test, or it fails."""
    connected.configure(**marked_settings(request.node))
    yield connected
    connected.clean()
