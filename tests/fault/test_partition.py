"""A host is cut off from the network in mid-load and comes back. Its late messages change nothing.

Head, store and client are on this machine; two hosts have networks, /dev/shm and /tmp of their own. Nobody is told of
a cut: packets are lost, connections stay open, and what waits in them arrives when the link is back.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

import cluster
from cluster import LoadedModel
from cluster.joining.connection import disconnect
from storage.arena.arena import KEPT
from storage.arena.arena_files import ARENA_PREFIX
from tests.support.counting_proxy import Answer
from tests.support.fault_proxy import FaultProxy
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
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long]


REPOSITORY = Path(__file__).parents[2]
_TOOLS = ("ip", "mount", "nsenter", "setpriv", "unshare")
_BRIDGE = "lsb"  # and the process id of who made it
_TEST_NETWORK = ipaddress.IPv4Network("198.18.0.0/15")  # for tests of networks, by RFC 2544
_SHM = "size=512m,mode=1777"
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")


def why_not() -> str:
    """Return what keeps this process from making hosts; empty when nothing does."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"hosts of their own need {', '.join(missing)} (iproute2, util-linux)"
    tried = f"{_BRIDGE}t{os.getpid()}"
    commands = [["unshare", *_NAMESPACES, "--fork", "--mount-proc", "mount", "-t", "tmpfs", "shm", "/dev/shm"]]
    commands += [["ip", "link", "add", tried, "type", kind] for kind in ("bridge", "veth")]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"hosts of their own cannot be made here: {shlex.join(command)}: {done.stderr.strip()}"
        if command[0] == "ip":
            _ip("link", "delete", tried)
    return ""


class Host:
    """A host on this machine: Linux namespaces with a network, /dev/shm, /tmp, name and processes of their own.

    `Network.add_host` makes it. `cut` loses packets both ways and notifies nobody; `heal` ends that. The first process
    only reaps the others. All of them end with this process, however it dies.
    """

    def __init__(self, name: str, address: str, prefix_length: int, bridge: str, shown: Sequence[Path]) -> None:
        self.name, self.address = name, address
        self._port = f"{bridge}p{address.rsplit('.', 1)[1]}"  # of the switch, where this host's cable ends
        self._started: list[subprocess.Popen[bytes]] = []
        # The death signal follows the main thread, which outlives every test.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._keeper = subprocess.Popen(
            [*command, "sh", "-c", _first_process(name, shown)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        try:
            said = self._keeper.stdout.readline() if self._keeper.stdout else b""
            if said != b"ready\n":
                raise RuntimeError(f"the host {name} did not come up: {said!r}")
            (self._init,) = psutil.Process(self._keeper.pid).children()
            self._ours = {self._init.pid, *(child.pid for child in self._init.children())}
            _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self._init.pid))
            _ip("link", "set", self._port, "master", bridge, "up")
            self.run(["ip", "address", "add", f"{address}/{prefix_length}", "dev", "eth0"])
            self.run(["ip", "link", "set", "eth0", "up"])
        except BaseException:
            self.close()
            raise

    # -- its link ----------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Drop all packets. Connections stay open, and their ends do not notice."""
        _ip("link", "set", self._port, "down")

    def heal(self) -> None:
        """Packets pass again. What TCP holds back comes when its next try is due."""
        _ip("link", "set", self._port, "up")

    # -- what runs and lies there ------------------------------------------------------------------------------

    def run(self, command: Sequence[str]) -> str:
        """Run a command on the host to its end and return its output. Raises CalledProcessError."""
        return subprocess.run([*self._enter(), *command], check=True, capture_output=True, text=True).stdout

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Leave a command running there, with its output in a file of this machine. Ended with the host, if not before.

        The handle is of the program that entered the host, and ends when the command does.
        """
        with log.open("ab") as said:
            process = subprocess.Popen(
                [*self._enter(), *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def processes(self) -> list[psutil.Process]:
        """All that runs there, but for what makes it a host."""
        space = os.readlink(f"/proc/{self._init.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid not in self._ours and os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
        return found

    def shared_memory(self) -> list[str]:
        """Names of the files in its /dev/shm."""
        return sorted(os.listdir(f"/proc/{self._init.pid}/root/dev/shm"))

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Everything of it is gone: with their first process all others die."""
        with contextlib.suppress(RuntimeError):
            _ip("link", "delete", self._port)  # the kernel takes its time with what a namespace had
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._keeper.pid).children():
                child.kill()
        for process in (self._keeper, *self._started):
            process.kill()
            process.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._init.pid}", *_NAMESPACES, f"--wd={REPOSITORY}", "--"]


class Network:
    """A switch of hosts, and this machine on it."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        _remove_stale_bridges()
        taken = {ipaddress.IPv4Interface(word).network for word in _addresses()}
        subnets = _TEST_NETWORK.subnets(new_prefix=24)
        self._subnet = next(subnet for subnet in subnets if not any(subnet.overlaps(other) for other in taken))
        self._bridge = f"{_BRIDGE}{os.getpid()}"
        self.address = str(self._subnet[1])
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("address", "add", f"{self.address}/{self._subnet.prefixlen}", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except BaseException:
            self.close()
            raise

    def add_host(self, name: str, shown: Sequence[Path] = ()) -> Host:
        """One more host on the switch, which sees these folders of this machine's /tmp too."""
        host = Host(name, str(self._subnet[len(self.hosts) + 2]), self._subnet.prefixlen, self._bridge, shown)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        _ip("link", "delete", self._bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _first_process(name: str, shown: Sequence[Path]) -> str:
    """Its shell script: what this host has for itself, and what it sees of this machine's /tmp."""
    lines = ["set -e", f"hostname {shlex.quote(name)}", "ip link set lo up", f"mount -t tmpfs -o {_SHM} shm /dev/shm"]
    lines += ["mkdir -p /dev/shm/tmp", "mount -t tmpfs -o mode=1777 tmp /dev/shm/tmp"]
    for path in _seen_of_tmp(shown):
        there = shlex.quote(f"/dev/shm{path}")
        lines += [f"mkdir -p {there}", f"mount --rbind {shlex.quote(path)} {there}"]
    lines += ["mount --move /dev/shm/tmp /tmp", "rmdir /dev/shm/tmp"]
    lines += ["sleep infinity >/dev/null &", "echo ready", "exec >/dev/null", "wait"]
    return "\n".join(lines)


def _seen_of_tmp(shown: Sequence[Path]) -> list[str]:
    """Folders under /tmp that are seen there: those without which no program of ours runs, and what was asked for."""
    wanted = {*map(str, shown), str(REPOSITORY), sys.prefix, sys.base_prefix}
    wanted |= {os.path.abspath(path) for path in sys.path if path}
    found: list[str] = []
    for path in sorted(path for path in wanted if path.startswith("/tmp/") and os.path.isdir(path)):
        if not any(path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {shlex.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _addresses() -> Iterator[str]:
    """IPv4 addresses of this machine, with the lengths of their prefixes."""
    for line in _ip("-4", "-oneline", "address", "show").splitlines():
        yield line.split()[3]


def _remove_stale_bridges() -> None:
    """Remove the bridges of test runs that were killed."""
    for line in _ip("-oneline", "link", "show", "type", "bridge").splitlines():
        name = line.split()[1].rstrip(":")
        number = name.removeprefix(_BRIDGE)
        if name.startswith(_BRIDGE) and number.isdecimal() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(RuntimeError):
                _ip("link", "delete", name)


HOST_RESOURCE = "host"  # of which this machine has none
HOSTS = ("left", "right")
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
    """`Longshore` on a head and two hosts."""

    def __init__(self, ray_cluster: Any, network: Network, folder: Path, shown: Path) -> None:
        super().__init__(ray_cluster)
        self.network = network
        self._folder = folder
        self._raylets: dict[str, psutil.Process] = {}  # node id -> of nodes on hosts
        self._starts: dict[str, subprocess.Popen[bytes]] = {}  # host name -> `ray start` there
        for name in HOSTS:
            self.start_node(network.add_host(name, [shown]), wait=False)
        for host in network.hosts:
            self._wait_node(host)

    # -- nodes -------------------------------------------------------------------------------------------------

    def start_node(self, host: Host, *, wait: bool = True) -> None:
        """Ray's processes, on a host where none are or where only those of a dead node are left."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={self.address}"]
        command += [f"--node-ip-address={host.address}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command += ["--block", "--num-cpus=2", "--num-gpus=0", f'--resources={{"{HOST_RESOURCE}": 2}}']
        environ = {**os.environ, **ENVIRONMENT, **variables(TEST_SETTINGS)}
        self._starts[host.name] = host.start(command, environ, self._log(host))
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


@pytest.fixture(scope="module")
def net_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    """This process is connected to it for the tests of one file, as a driver on the head."""
    if reason := why_not():
        pytest.skip(reason)
    import ray

    temporary = tempfile.TemporaryDirectory(prefix="lh-", dir="/tmp", ignore_cleanup_errors=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(ENVIRONMENT))
        folder, net = stack.enter_context(temporary), stack.enter_context(Network())
        head = {**NODE, "temp_dir": folder, "node_ip_address": net.address, "_system_config": SLOW_DEATH}
        ray_cluster = stack.enter_context(new_ray_cluster(**head))
        try:
            ray.init(address=ray_cluster.address, log_to_driver=False, configure_logging=False)
            there = NetCluster(ray_cluster, net, Path(folder), tmp_path_factory.getbasetemp())
            yield there
            there.end_longshore()
        finally:
            disconnect()
            ray.shutdown()


FOUND_DEAD_S = 90.0  # Ray needs some ten
LEASE_S = 3.0
BLINK_S = 4.5  # longer than a lease, much shorter than Ray's patience
CUT_AT = 4  # the answer that a host is cut off at, of the fifteen that it needs


class CuttingProxy(FaultProxy):
    """Cuts a host off when it is in the middle of its reading."""

    host: Host | None = None

    def __init__(self, upstream_url: str, address: str) -> None:
        self.cut = threading.Event()
        self._answers = itertools.count(1)
        super().__init__(upstream_url, address=address)

    def pass_answer(self, answer: Answer, client: socket.socket, count: Callable[[int], None]) -> None:
        if self.host is not None and client.getpeername()[0] == self.host.address and next(self._answers) == CUT_AT:
            self.host.cut()
            self.cut.set()
        super().pass_answer(answer, client, count)


class CutLoad:
    """A load that loses a host on its way."""

    def __init__(self, net: NetCluster, stored: StoredModel, pool: ThreadPoolExecutor, proxy: CuttingProxy) -> None:
        self.net, self.stored, self.proxy, self._pool = net, stored, proxy, pool

    def begin(self, host: Host, **options: Any) -> Future[LoadedModel]:
        """Returns when the host is cut off, which has fetched something and not all."""
        self.proxy.host = host
        options = {**self.stored.options, "endpoint_url": self.proxy.endpoint_url, **options}
        future = self._pool.submit(cluster.load, self.stored.uri, device="cpu", **options)
        eventually(lambda: future.done() or self.proxy.cut.is_set(), "the host does not read", 90)
        if future.done():
            raise AssertionError(f"it ended before: {future.result().report}")
        return future

    def is_exact(self, model: LoadedModel) -> bool:
        ranks = len(model.ranks)
        return model.call(shard_differs, str(self.stored.folder), 1, ranks, KV_HEADS) == [[]] * ranks


@pytest.fixture
def cut_load(net_cluster: NetCluster, llama: StoredModel) -> Iterator[CutLoad]:
    net = net_cluster
    settings = {"cpu_ranks_per_node": 1, "node_wait_s": 900, "lease_deadline_s": LEASE_S, "fetch_threads": 2}
    net.configure(empty=True, orphan_after_s=600, **settings)  # nobody ends for want of a coordinator
    with (
        ThreadPoolExecutor(1) as pool,
        CuttingProxy(llama.server.endpoint_url, net.network.address) as proxy,
    ):
        yield CutLoad(net, llama, pool, proxy)
        for host in net.network.hosts:
            host.heal()
        net.clean()


@contextlib.contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """It does nothing meanwhile: a raylet that learns that it is taken for dead would end all of its node at once."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def heal_with_old_processes(cut_load: CutLoad, host: Host, old: str) -> None:
    """The agent of the abandoned node reports, receives its end, and stops in order. It leaves no arena."""
    net = cut_load.net
    assert len(net.ours_on(host)) == 2, "agent and worker of the old node live on"
    host.heal()
    eventually(lambda: not net.ours_on(host, "NodeAgent"), "the old agent does not end", 90)
    assert not net.arenas_on(host)
    assert old not in {node.node for node in net.status().nodes}


def test_a_load_survives_a_link_down_for_longer_than_a_lease(cut_load: CutLoad) -> None:
    """Ray notices nothing. Leases on the host run out, and its rank goes on where it was."""
    net, host = cut_load.net, cut_load.net.network.hosts[0]
    node = net.node_on(host)
    loading = cut_load.begin(host, fsdp_size=3)
    time.sleep(BLINK_S)
    host.heal()
    with loading.result(300) as model:
        assert cut_load.is_exact(model)
        assert net.node_on(host) == node
        assert model.report.attempts == 1
        (there,) = (part for part in model.report.nodes if part.node == node)
        assert there.retries["lease_expired"]
        assert [rank.incarnation for rank in model.report.ranks] == [0] * 3


def test_ranks_wait_for_a_host_that_comes_back_as_a_new_node(cut_load: CutLoad) -> None:
    """On the host are old worker and new worker, old agent and new agent: only the new ones count."""
    net, host = cut_load.net, cut_load.net.network.hosts[0]
    old = str(net.node_on(host))
    loading = cut_load.begin(host, fsdp_size=3)
    eventually(lambda: "1 ranks wait for a place" in net.models()[0].progress.message, "it does not wait", FOUND_DEAD_S)
    with frozen(net.raylet(old)):
        heal_with_old_processes(cut_load, host, old)
        net.start_node(host)
        model = loading.result(300)
        assert net.ours_on(host, "GpuWorker")
        assert cut_load.is_exact(model)
        lost = [rank.node == net.node_on(host) for rank in model.report.ranks]
        assert [rank.incarnation > 0 for rank in model.report.ranks] == lost
        assert (sum(lost), model.report.attempts) == (1, 2)
    net.raylet(old).wait(240)
    assert cut_load.is_exact(model)
    model.release()


def test_a_model_is_ready_elsewhere_before_the_host_is_back(cut_load: CutLoad) -> None:
    """Ray moves the bundle of the lost rank to the other host."""
    from ray.util import placement_group, remove_placement_group

    net, host = cut_load.net, cut_load.net.network.hosts[1]
    old = str(net.node_on(host))
    group = placement_group([{HOST_RESOURCE: 1}] * 2, strategy="SPREAD")
    assert group.wait(120)
    try:
        model = cut_load.begin(host, fsdp_size=2, placement_group=group).result(300)
        assert cut_load.is_exact(model)
        incarnations = [rank.incarnation for rank in model.report.ranks]
        with frozen(net.raylet(old)):
            heal_with_old_processes(cut_load, host, old)
            assert cut_load.is_exact(model)
        net.raylet(old).wait(240)
        eventually(lambda: not host.processes(), lambda: f"left on the host: {host.processes()}")
        assert net.models()[0].progress.state == "ready"
        assert [rank.incarnation for rank in model.report.ranks] == incarnations
        assert cut_load.is_exact(model)
        model.release()
    finally:
        remove_placement_group(group)
