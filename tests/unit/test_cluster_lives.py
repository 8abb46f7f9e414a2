"""Coordinator, agents and ranks of a whole cluster, whatever happens to them: exact, or one error that is justified.

The coordinator and the agents' ledgers are the real ones; Ray, the clock and the bytes are simulated
(`tests.support.cluster_simulation`). `--hypothesis-profile=thorough` runs ten times as many lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ray.exceptions import GetTimeoutError

from actors.coordination import load_run, spawn
from actors.coordination.agent_watch import REBUILD_S, AgentWatch
from actors.coordination.model_record import ModelRecord
from actors.coordinator import Coordinator
from actors.node.chunk_flow import RankPlace
from cluster.errors import NotEnoughResources, VersionMismatch
from cluster.fit.needs import min_slots
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.update_report import UpdateReport
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Lease, SlotTable
from storage.errors import LongshoreError
from tests.support import simulated_workers
from tests.support.cluster_simulation import ClusterSimulation, SimClient
from tests.support.node_simulation import SimModel
from tests.support.simulated_workers import STAGES_S, SimHost, SimWorker

pytestmark = pytest.mark.slow

MODELS = {"a": SimModel(tuple(range(12))), "b": SimModel((3, 4, 5, 50, 51, 52, 53)), "c": SimModel((90,))}
LAYOUTS = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 4), (2, 2))  # (tensor parallel, replicas)
KEYS = (None, None, "good", "other", "refused")  # access keys that clients pass; the store refuses the last
ROOMY_SLOTS = 200
SCALE = settings().max_examples // 40  # 1 in the usual profile


def cluster_of(seed: int, hosts: int, roomy: bool, node_wait_s: float) -> ClusterSimulation:
    slots = ROOMY_SLOTS if roomy else min_slots(2) + 2
    cluster = ClusterSimulation(seed, hosts=hosts, slots=slots, roomy=roomy, node_wait_s=node_wait_s)
    cluster.models.update(MODELS)
    cluster.refused.add("refused")
    cluster.faults |= {"access", "places"}  # loads that ask for more than there is are refused
    return cluster


class ClusterMachine(RuleBasedStateMachine):
    """Every rule is one fault or one request, followed by some time."""

    cluster: ClusterSimulation | None = None

    @initialize(
        seed=st.integers(0, 2**32),
        hosts=st.integers(2, 3),
        roomy=st.booleans(),
        node_wait_s=st.sampled_from([0.0, 20.0]),
        uri=st.sampled_from(sorted(MODELS)),
        layout=st.sampled_from(LAYOUTS),
    )
    def start(self, seed: int, hosts: int, roomy: bool, node_wait_s: float, uri: str, layout: tuple[int, int]) -> None:
        self.cluster = cluster_of(seed, hosts, roomy, node_wait_s)
        self.cluster.load(uri, *layout, wait_for_resources_s=30.0)

    @property
    def the_cluster(self) -> ClusterSimulation:
        assert self.cluster is not None
        return self.cluster

    def _worker(self, index: int) -> SimWorker | None:
        workers = self.the_cluster.workers()
        return workers[index % len(workers)] if workers else None

    def _host(self, index: int) -> SimHost | None:
        hosts = [node for node in self.the_cluster.hosts if node.host.lives]
        return hosts[index % len(hosts)] if hosts else None

    def _client(self, index: int) -> SimClient | None:
        clients = [client for client in self.the_cluster.clients if not (client.dead or client.released)]
        return clients[index % len(clients)] if clients else None

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.the_cluster.run(seconds)

    @precondition(lambda self: self.cluster is not None and len(self.cluster.clients) < 5)
    @rule(
        uri=st.sampled_from(sorted(MODELS)),
        layout=st.sampled_from(LAYOUTS),
        wait_s=st.sampled_from([0.0, 30.0]),
        timeout_s=st.sampled_from([None, None, None, 3.0, 10.0]),
        keep=st.sampled_from([False, False, False, True]),
        key=st.sampled_from(KEYS),
    )
    def load(
        self, uri: str, layout: tuple[int, int], wait_s: float, timeout_s: float | None, keep: bool, key: str | None
    ) -> None:
        self.the_cluster.load(uri, *layout, wait_for_resources_s=wait_s, timeout_s=timeout_s, keep=keep, key=key)

    @precondition(lambda self: self.cluster is not None and 0 < len(self.cluster.clients) < 5)
    @rule(index=st.integers(0, 4))
    def same_load_again(self, index: int) -> None:
        request = self.the_cluster.clients[index % len(self.the_cluster.clients)].request
        self.the_cluster.load(request.uri, request.layout.tensor_parallel_size, request.layout.data_parallel_size)

    @precondition(lambda self: self.cluster is not None and len(self.cluster.hostings) < 3)
    @rule(uri=st.sampled_from(sorted(MODELS)), index=st.integers(0, 3))
    def program_hosts_a_rank(self, uri: str, index: int) -> None:
        host = self._host(index)
        if host is not None:
            self.the_cluster.host_rank(uri, host)

    @rule(index=st.integers(0, 3), stop=st.booleans())
    def program_is_killed_or_stopped(self, index: int, stop: bool) -> None:
        hostings = [hosting for hosting in self.the_cluster.hostings if not hosting.is_over]
        if hostings and stop:
            self.the_cluster.faults.add("worker")
            hostings[index % len(hostings)].rank.asleep = True
        elif hostings:
            self.the_cluster.kill_hosting(hostings[index % len(hostings)])

    @rule(index=st.integers(0, 9))
    def first_thread_of_a_worker_ends(self, index: int) -> None:
        worker = self._worker(index)
        if worker is not None:
            self.the_cluster.leader_exits(worker)

    @rule(index=st.integers(0, 9), seconds=st.sampled_from([0.0, 0.5]))
    def worker_is_killed(self, index: int, seconds: float) -> None:
        worker = self._worker(index)
        if worker is not None:
            self.the_cluster.kill_worker(worker)
            self.the_cluster.run(seconds)

    @rule(index=st.integers(0, 9), seconds=st.sampled_from([0.0, 1.0, 11.0]))
    def worker_is_stopped(self, index: int, seconds: float) -> None:
        worker = self._worker(index)
        if worker is not None:
            self.the_cluster.stop_worker(worker)
            self.the_cluster.run(seconds)

    @rule(index=st.integers(0, 9))
    def worker_goes_on(self, index: int) -> None:
        stopped = [worker for worker in self.the_cluster.workers() if worker.stopped]
        if stopped:
            stopped[index % len(stopped)].continue_process()

    @rule(index=st.integers(0, 3), seconds=st.sampled_from([0.0, 0.5]))
    def agent_is_killed(self, index: int, seconds: float) -> None:
        host = self._host(index)
        if host is not None:
            self.the_cluster.kill_agent(host)
            self.the_cluster.run(seconds)

    @rule(index=st.integers(0, 3), seconds=st.sampled_from([0.0, 0.5]))
    def agent_is_replaced_by_one_of_another_version(self, index: int, seconds: float) -> None:
        host = self._host(index)
        if host is not None:
            self.the_cluster.install_other_version(host)
            self.the_cluster.kill_agent(host)
            self.the_cluster.run(seconds)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def coordinator_is_killed(self, seconds: float) -> None:
        self.the_cluster.kill_coordinator()
        self.the_cluster.run(seconds)

    @rule(index=st.integers(0, 3))
    def node_dies(self, index: int) -> None:
        host = self._host(index)
        if host is not None:
            self.the_cluster.kill_node(host)

    @rule(index=st.integers(0, 3), seconds=st.sampled_from([1.0, 6.0, 15.0]))
    def node_is_cut_off(self, index: int, seconds: float) -> None:
        host = self._host(index)
        if host is not None:
            self.the_cluster.cut_off(host, seconds)

    @precondition(lambda self: self.cluster is not None and len(self.cluster.hosts) < 5)
    @rule()
    def node_joins(self) -> None:
        self.the_cluster.add_host()

    @rule(trouble=st.sampled_from([0.0, 0.1, 0.4]))
    def messages_get_lost(self, trouble: float) -> None:
        self.the_cluster.trouble = trouble

    @rule(trouble=st.sampled_from([0.0, 0.1, 0.4]))
    def reads_fail(self, trouble: float) -> None:
        self.the_cluster.store_trouble = trouble

    @rule(index=st.integers(0, 4))
    def client_abandons_or_releases(self, index: int) -> None:
        client = self._client(index)
        if client is not None:
            self.the_cluster.faults.add("client")
            client.release()

    @rule(index=st.integers(0, 4), replicas=st.integers(1, 4))
    def client_changes_the_number_of_replicas(self, index: int, replicas: int) -> None:
        client = self._client(index)
        if client is not None:
            client.scale(replicas)

    @rule(index=st.integers(0, 4))
    def client_is_killed(self, index: int) -> None:
        client = self._client(index)
        if client is not None:
            self.the_cluster.faults.add("client")
            client.kill()

    def teardown(self) -> None:
        if self.cluster is not None:
            try:
                self.cluster.settle()
                self.cluster.end()
            finally:
                self.cluster.close()


TestClusterMachine = ClusterMachine.TestCase
TestClusterMachine.settings = settings(
    max_examples=80 * SCALE,
    stateful_step_count=30,
    deadline=None,
    derandomize=SCALE == 1,
    suppress_health_check=list(HealthCheck),
)


def live(seed: int) -> ClusterSimulation:
    """Run the same events in long random orders, with probabilities that let loads get far before they break."""
    chance = random.Random(seed)
    cluster = cluster_of(seed, chance.randrange(2, 4), chance.random() < 0.5, chance.choice([0.0, 20.0]))
    try:
        trouble = chance.choice([0.03, 0.1, 0.3])
        cluster.trouble = chance.choice([0.0, 0.0, 0.1, 0.3])
        for _ in range(chance.randrange(10, 60)):
            if len(cluster.clients) < 4 and (not cluster.clients or chance.random() < 0.1):
                wish(cluster, chance)
            elif chance.random() < 0.1:
                chance.choice(cluster.clients).scale(chance.randrange(1, 4))
            if chance.random() < trouble:
                disturb(cluster, chance)
            cluster.run(chance.choice([0.1, 0.5, 1.0]))
        cluster.settle()
        cluster.end()
    finally:
        cluster.close()
    return cluster


def wish(cluster: ClusterSimulation, chance: random.Random) -> None:
    cluster.load(
        chance.choice(sorted(MODELS)),
        *chance.choice(LAYOUTS),
        wait_for_resources_s=chance.choice([0.0, 30.0]),
        timeout_s=chance.choice([None, None, None, 10.0]),
        keep=chance.random() < 0.2,
        key=chance.choice(KEYS),
    )


def disturb(cluster: ClusterSimulation, chance: random.Random) -> None:
    """Inject one fault."""
    workers, living = cluster.workers(), [node for node in cluster.hosts if node.host.lives]
    action = chance.randrange(18)
    hostings = [hosting for hosting in cluster.hostings if not hosting.is_over]
    if action == 15 and living:
        cluster.host_rank(chance.choice(sorted(MODELS)), chance.choice(living))
    elif action == 16 and hostings:
        cluster.kill_hosting(chance.choice(hostings))
    elif action == 17 and workers:
        cluster.leader_exits(chance.choice(workers))
    elif action < 2 and workers:
        cluster.kill_worker(chance.choice(workers))
    elif action < 4 and workers:
        cluster.stop_worker(chance.choice(workers))
    elif action == 4:
        for worker in workers:
            worker.continue_process()
    elif action == 5 and living:
        cluster.kill_agent(chance.choice(living))
    elif action == 13 and living and chance.random() < 0.3:
        node = chance.choice(living)
        cluster.install_other_version(node)
        cluster.kill_agent(node)
    elif action < 8:
        cluster.kill_coordinator()
    elif action == 8 and living and chance.random() < 0.5:
        cluster.kill_node(chance.choice(living))
    elif action == 9 and living:
        cluster.cut_off(chance.choice(living), chance.choice([1.0, 6.0, 15.0]))
    elif action == 10 and len(cluster.hosts) < 5:
        cluster.add_host()
    elif action == 11:
        cluster.trouble = chance.choice([0.0, 0.1, 0.4])
    elif action == 12:
        cluster.store_trouble = chance.choice([0.0, 0.1, 0.3])
    elif cluster.clients:
        client = chance.choice(cluster.clients)
        cluster.faults.add("client")
        if chance.random() < 0.3:
            client.kill()
        else:
            client.release()


def close_call(seed: int) -> ClusterSimulation:
    """Workers stop while they read the arena, for a while or for good.

    An agent restarts meanwhile, and others want the slots. Nothing else fails, so nothing else ends these workers.
    """
    chance = random.Random(seed)
    cluster = cluster_of(seed, 1, False, 0.0)
    try:
        for uri in ("a", "b"):
            cluster.load(uri, *chance.choice(LAYOUTS[:2]), wait_for_resources_s=30.0)
        cluster.run(chance.uniform(1.0, 4.0))
        for _ in range(4):
            for _ in range(20):
                cluster.run(0.1)
                reading = [worker for worker in cluster.workers() if worker.rank is not None and worker.rank.readable]
                if reading:
                    break
            stopped = [worker for worker in reading or cluster.workers() if chance.random() < 0.7]
            for worker in stopped:
                cluster.stop_worker(worker)
            if chance.random() < 0.8:
                cluster.kill_agent(cluster.hosts[0])
            cluster.run(chance.uniform(0.0, 10.0))
            for worker in stopped:
                if chance.random() < 0.8:
                    worker.continue_process()
        cluster.settle()
        cluster.end()
    finally:
        cluster.close()
    return cluster


def hosted_life(seed: int) -> ClusterSimulation:
    """Programs host ranks beside a load, in a small arena, and are killed or lose their first thread."""
    chance = random.Random(seed)
    cluster = cluster_of(seed, 1, chance.random() < 0.3, 0.0)
    node = cluster.hosts[0]
    try:
        for _ in range(chance.randrange(20, 60)):
            running = [hosting for hosting in cluster.hostings if not hosting.is_over]
            if len(running) < 3 and chance.random() < 0.3:
                cluster.host_rank(chance.choice(sorted(MODELS)), node)
            elif running and chance.random() < 0.2:
                cluster.kill_hosting(chance.choice(running))
            elif chance.random() < 0.05:
                cluster.load("a", 1, 1, wait_for_resources_s=30.0)
            elif chance.random() < 0.05:
                cluster.kill_agent(node)
            elif chance.random() < 0.05 and cluster.workers():
                cluster.leader_exits(chance.choice(cluster.workers()))
            cluster.run(chance.choice([0.05, 0.3, 1.0]))
        cluster.settle()
        for hosting in cluster.hostings:
            assert not hosting.rank.alive or hosting.rank.finished or hosting.rank.error is not None
        cluster.end()
    finally:
        cluster.close()
    return cluster


@settings(max_examples=60 * SCALE, deadline=None, derandomize=SCALE == 1, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_programs_may_host_ranks(seed: int) -> None:
    hosted_life(seed)


@settings(max_examples=120 * SCALE, deadline=None, derandomize=SCALE == 1, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_long_random_lives_stay_exact(seed: int) -> None:
    live(seed)


@settings(max_examples=20 * SCALE, deadline=None, derandomize=SCALE == 1, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_workers_that_stop_while_reading_are_fenced(seed: int) -> None:
    close_call(seed)


@pytest.fixture
def no_slow_ranks() -> Iterator[None]:
    """A rank that does something once a second alone may lose its leases, which is a fault."""
    with patch.object(simulated_workers, "PACES_S", simulated_workers.PACES_S[:1]):
        yield


@pytest.mark.usefixtures("no_slow_ranks")
@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_faults_each_node_fetches_each_chunk_once(layout: tuple[int, int], peers: bool) -> None:
    """Nodes that feed each other fetch it once together."""
    cluster = cluster_of(2 if peers else 5, 2, True, 0.0)
    assert cluster.peers == peers
    try:
        clients = [cluster.load("a", *layout), cluster.load("a", *layout)]
        cluster.settle()
        assert all(client.ready for client in clients)
        assert len({client.model_id for client in clients}) == 1
        assert all(node.spare_fetches == 0 for node in cluster.hosts)
        fetched = [sum(node.fetched.values()) for node in cluster.hosts]
        assert sum(fetched) == 12 if peers else fetched == [len(node.needed) for node in cluster.hosts]
        cluster.end()
    finally:
        cluster.close()


@pytest.mark.usefixtures("no_slow_ranks")
@pytest.mark.parametrize("peers", [False, True])
def test_without_faults_replicas_come_and_go(peers: bool) -> None:
    """A further replica fetches nothing that the model's node has, on any node if nodes feed each other."""
    cluster = cluster_of(2 if peers else 5, 3, True, 0.0)
    try:
        client = cluster.load("a", 1, 1)
        cluster.settle()
        for replicas in (2, 5, 1, 3):
            client.scale(replicas)
            cluster.settle()
            cluster.run(5.0)  # until killed processes are gone
            report = cluster.changes[-1].result()
            assert isinstance(report, ScaleReport), report
            assert report.data_parallel_size == replicas
            (record,) = cluster.records()
            assert len(record.placements) == len(record.life.ranks) == len(cluster.workers()) == replicas
            assert record.life.is_ready
            if peers:
                assert report.store_bytes == 0
        client.scale(7)
        cluster.settle()
        assert isinstance(cluster.changes[-1].result(), NotEnoughResources)
        assert len(cluster.workers()) == 3
        fetched = sum(sum(node.fetched.values()) - node.spare_fetches for node in cluster.hosts)
        assert fetched <= (12 if peers else 36)
        cluster.end()
    finally:
        cluster.close()


def changed_life(seed: int) -> ClusterSimulation:
    """Replicas come and go, and ranks get new revisions, while all breaks that can."""
    chance = random.Random(seed)
    cluster = cluster_of(seed, 3, chance.random() < 0.5, chance.choice([0.0, 20.0]))
    try:
        client = cluster.load(chance.choice(["a", "b"]), chance.choice([1, 2]), 1, keep=True)
        cluster.run(chance.uniform(5.0, 15.0))
        cluster.trouble = chance.choice([0.0, 0.0, 0.1])
        for _ in range(chance.randrange(10, 30)):
            if chance.random() < 0.3 and all(change.done() for change in cluster.changes):
                if chance.random() < 0.5:
                    client.scale(chance.randrange(1, 5))
                else:
                    client.update(streaming=chance.random() < 0.5)
            if chance.random() < 0.15:
                disturb(cluster, chance)
            cluster.run(chance.choice([0.1, 0.5, 1.0, 3.0]))
        cluster.settle()
        for record in cluster.records():
            if record.is_usable:
                assert len(record.placements) == len(record.life.ranks) == record.request.world_size
        cluster.end()
    finally:
        cluster.close()
    return cluster


@settings(max_examples=12 * SCALE, deadline=None, derandomize=SCALE == 1, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_a_model_may_be_changed_whatever_happens(seed: int) -> None:
    changed_life(seed)


@pytest.mark.usefixtures("no_slow_ranks")
@settings(max_examples=20 * SCALE, deadline=None, derandomize=SCALE == 1, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), streaming=st.booleans())
def test_a_node_may_be_lost_in_an_update(seed: int, streaming: bool) -> None:
    """The model has the revision that the update's outcome says. Ranks that are moved load it."""
    chance = random.Random(seed)
    cluster = cluster_of(seed, 4, chance.random() < 0.5, 20.0)
    try:
        client = cluster.load("a", 2, 2)
        cluster.settle()
        (record,) = cluster.records()
        client.update(streaming=streaming)
        cluster.run(chance.uniform(0.0, 2 * STAGES_S))
        cluster.kill_node(next(node for node in cluster.hosts if node.node_id == record.placements[0].node_id))
        cluster.settle()
        outcome = cluster.changes[-1].result()
        assert record.revision == (outcome.revision if isinstance(outcome, UpdateReport) else "v1")
        cluster.end()
    finally:
        cluster.close()


def test_at_a_shutdown_a_stuck_model_delays_no_other() -> None:
    cluster = cluster_of(5, 2, True, 0.0)
    free = Coordinator._free
    try:
        stuck, other = cluster.load("a", 1, 1), cluster.load("b", 1, 1)
        cluster.settle()

        async def slowly(coordinator: Coordinator, record: ModelRecord, error: LongshoreError) -> None:
            if record.model_id == stuck.model_id:
                await asyncio.sleep(30.0)
            await free(coordinator, record, error)

        with patch.object(Coordinator, "_free", slowly):
            cluster.client_loop.create_task(cluster.ask("shutdown"))
            cluster.run(10.0)
            over = {record.model_id: record.life.is_over for record in cluster.records()}
            assert over == {stuck.model_id: False, other.model_id: True}
            cluster.run(40.0)
        assert all(record.life.is_over for record in cluster.records())
    finally:
        cluster.close()


@pytest.mark.parametrize("after_s", [None, 0.5, 3.0, 6.0])
def test_an_agent_of_another_version_ends_the_load_with_an_error(after_s: float | None) -> None:
    """The agent exists before the load, or replaces one that was killed during the load."""
    cluster = cluster_of(11, 2, True, 0.0)
    try:
        if after_s is None:
            cluster.install_other_version(cluster.hosts[0])
        client = cluster.load("a", 3, 1)
        if after_s is not None:
            cluster.trouble = 0.5  # the load is slow
            cluster.run(after_s)
            cluster.install_other_version(cluster.hosts[0])
            cluster.kill_agent(cluster.hosts[0])
        cluster.settle()
        assert client.ready or type(client.error) is VersionMismatch
        assert after_s is not None or (client.error is not None and "9.9.9" in str(client.error))
        other = cluster.load("b", 3, 1)
        cluster.settle()
        assert type(other.error) is VersionMismatch
        cluster.end()
    finally:
        cluster.close()


def test_an_abandoned_worker_that_is_found_again_is_replaced() -> None:
    """The coordinator was killed right after it notified the agent, before its message reached the worker."""
    cluster = cluster_of(3, 1, True, 0.0)
    try:
        client = cluster.load("a", 1, 2)
        while not (
            begun := [worker for worker in cluster.workers() if worker.rank is not None and worker.rank.state.placed]
        ):
            cluster.run(0.1)
        given_up = begun[0].rank
        agent = cluster.hosts[0].agent
        assert given_up is not None
        assert agent is not None
        agent.rank_lost(given_up.load.load_id, given_up.rank, 1)
        cluster.kill_coordinator()
        cluster.settle()
        assert client.ready
        cluster.end()
    finally:
        cluster.close()


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_releasing_during_the_worker_search_leaves_no_worker(after_s: float) -> None:
    cluster = cluster_of(3, 2, True, 0.0)
    never = asyncio.Event()

    async def still_looking(record: ModelRecord, incarnations: dict[int, int]) -> None:
        await never.wait()

    try:
        client = cluster.load("a", 2, 2)
        cluster.settle()
        assert client.ready
        with patch.object(load_run, "find_workers_again", still_looking):
            cluster.kill_coordinator()
            cluster.run(after_s)
            client.release()
            cluster.run(cluster.config.orphan_after_s / 2)  # before the search for orphans begins
            assert cluster.workers() == []
        cluster.end()
    finally:
        cluster.close()


def test_a_coordinator_searches_again_for_missing_workers() -> None:
    cluster = cluster_of(3, 2, True, 0.0)
    unanswered = iter([GetTimeoutError("busy"), GetTimeoutError("busy")])
    find_workers = spawn.find_workers

    def busy(worker_group_id: str) -> dict[int, tuple[int, Any]]:
        if (error := next(unanswered, None)) is not None:
            raise error
        return find_workers(worker_group_id)

    try:
        client = cluster.load("a", 2, 1)
        cluster.settle()
        before = sorted(worker.actor.name for worker in cluster.workers())
        with patch.object(spawn, "find_workers", busy):
            cluster.kill_coordinator()
            cluster.run(REBUILD_S)
            cluster.settle()
        assert next(unanswered, None) is None
        assert client.ready
        assert sorted(worker.actor.name for worker in cluster.workers()) == before
        cluster.end()
    finally:
        cluster.close()


# --- it can fail ------------------------------------------------------------------------------------------------


async def _wait_for_nobody(watch: AgentWatch) -> None:
    watch.rebuilt.set()


def _forget_readers(cache: ChunkCache, survivors: object, now_s: float) -> list[Lease]:
    return _restore(cache, (), now_s)


_restore = ChunkCache.restore

BROKEN: dict[str, list[tuple[type, str, Any]]] = {
    "old incarnations are heard": [
        (RankPlace, "expects", lambda place, hello: True),
        (RankPlace, "is_late", lambda place, update: False),
    ],
    "a deadline returns the slot": [(SlotTable, "to_quarantine", lambda table, slot, now_s: table.to_free(slot))],
    "a restarted agent forgets its arena": [(ChunkCache, "restore", lambda cache, survivors, now_s: [])],
    "a restarted coordinator forgets what agents report": [
        (AgentWatch, "rebuild", _wait_for_nobody),
        (AgentWatch, "_adopt", lambda watch, load_id, packed, beat: None),
    ],
    "a restarted agent is not told its loads": [(AgentWatch, "_begin_again", lambda watch, beat: None)],
}


@pytest.mark.long
@pytest.mark.parametrize("broken", BROKEN)
def test_the_simulation_finds_a_broken_rule(broken: str) -> None:
    with contextlib.ExitStack() as stack:
        for owner, name, worse in BROKEN[broken]:
            stack.enter_context(patch.object(owner, name, worse))
        with pytest.raises(AssertionError):
            _lives(live, 300)


@pytest.mark.long
def test_the_simulation_finds_forgotten_readers() -> None:
    with patch.object(ChunkCache, "restore", _forget_readers), pytest.raises(AssertionError):
        _lives(close_call, 100)


def _lives(kind: Callable[[int], ClusterSimulation], count: int) -> None:
    for seed in range(count):
        kind(seed)
