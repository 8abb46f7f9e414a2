"""A host is cut off from the network in mid-load and comes back. Its late messages change nothing.

Head, store and client are on this machine; two hosts have networks, /dev/shm and /tmp of their own. Nobody is told of
a cut: packets are lost, connections stay open, and what waits in them arrives when the link is back.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import cluster
from bench.harness.hosts import Host
from cluster import LoadedModel
from tests.support.counting_proxy import Answer
from tests.support.fault_proxy import FaultProxy
from tests.support.net_cluster import HOST_RESOURCE, NetCluster, net_cluster
from tests.support.ray_clusters import eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import KV_HEADS, StoredModel

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetCluster]:
    """This process is connected to it for the tests of one file, as a driver on the head."""
    with net_cluster(("left", "right"), tmp_path_factory.getbasetemp()) as there:
        yield there


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
def cut_load(two_hosts: NetCluster, llama: StoredModel) -> Iterator[CutLoad]:
    net = two_hosts
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
