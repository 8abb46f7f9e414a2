"""A whole cluster in one thread, on a clock of its own: the real coordinator and the real ledger of every node.

    SimClient -- load, wait, renew, release --> Coordinator (real: actors.coordinator and all that it drives)
                                                  |  Ray as far as it is used: tests.support.simulated_ray
    SimAgent (round the real NodeLedger) <--------+------> SimWorker (one step of a rank at a time)

Everything is an event of one clock, and chance comes from one seed. Messages take a while, overtake each other, are
lost, come late or twice; processes are killed, stopped and woken; nodes die, are cut off, join. `check` states what
must hold at any moment, `settle` and `end` what must be true when nothing goes wrong any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray.exceptions import RayActorError

from actors import coordinator
from actors.coordination import (
    agent_watch,
    fit,
    load_run,
    model_record,
    nodes,
    placing,
    planner,
    scale_run,
    spawn,
    update_run,
    worker_groups,
)
from actors.coordination.model_record import ModelRecord
from actors.coordinator import Coordinator
from actors.links import agent_name, worker_name
from cluster import messages
from cluster.config import Config
from cluster.errors import (
    ChunkFailed,
    ClusterLost,
    IllegalTransition,
    LoadCancelled,
    LoadForgotten,
    LoadTimeout,
    ModelNotFound,
    NodeLost,
    NotEnoughResources,
    RankLost,
    ScaleFailed,
    ScaleRefused,
    UpdateFailed,
    UpdateRefused,
    VersionMismatch,
)
from cluster.layouts.mesh import Layout
from cluster.messages import AgentBeat, pack_message, unpack_message
from cluster.planning.packed_plan import PackedPlan, RankFacts, unpack_shared
from cluster.planning.update_plan import PackedUpdate
from cluster.request import LoadRequest, StoreAccess, UpdateRequest
from cluster.scheduling import load_state
from cluster.scheduling.load_state import LoadState
from cluster.telemetry.counters import CoordinatorFacts, Durations, Key, Snapshot, samples
from cluster.telemetry.logs import ROOT
from cluster.telemetry.metrics import Kind
from cluster.telemetry.scale_report import ScaleReport
from cluster.telemetry.update_report import UpdateReport
from storage.checkpoints.checkpoint import check_wanted
from storage.errors import (
    AccessDenied,
    ArenaBusy,
    IntegrityError,
    LongshoreError,
    RevisionMismatch,
    ShortRead,
    StoreUnavailable,
    Throttled,
)
from storage.host.memory import PeakMemory
from storage.store_ref import Credentials, StoreRef
from tests.support.node_simulation import CHUNK_BYTES, SimModel, check_sources
from tests.support.simulated_ray import NODE_DETECTED_S, Handle, Host, SimActor, SimRay
from tests.support.simulated_workers import TROUBLES, SimAgent, SimHost, SimHosting, SimWorker
from tests.support.virtual_time import Clock, VirtualLoop

ON_THE_CLOCK = (
    fit, agent_watch, coordinator, worker_groups, load_run, model_record, nodes, placing, planner, scale_run,
    spawn, update_run,
)  # fmt: skip
ASKS_RAY = (nodes, planner, spawn)
COORDINATOR_GONE_S = 60.0  # see cluster.joining.connection
REBUILD_GRACE_S = 20.0  # see cluster.client
EARLY = ("", "planning", "waiting", "starting")
STORE_FAULTS = (StoreUnavailable, Throttled, ShortRead, IntegrityError)
ENDS_WITHIN_S = 400.0  # of a load, when nothing goes wrong any more
GONE_WITHIN_S = 200.0
OTHER_VERSION = (6, "9.9.9")

# An error that a load may end with -> the faults that justify it; without any of them it has to be READY.
JUSTIFIED: dict[type[LongshoreError], set[str]] = {
    ChunkFailed: {"slow", "store", "worker", "message", "agent", "node"},
    IntegrityError: {"store"},
    RankLost: {"worker", "agent", "message", "node"},
    NodeLost: {"node"},
    ClusterLost: {"agent", "coordinator", "node"},
    LoadForgotten: {"coordinator"},
    LoadCancelled: {"client"},
    LoadTimeout: {"client"},
    AccessDenied: {"access"},
    RevisionMismatch: {"revision"},
    StoreUnavailable: {"away"},
    NotEnoughResources: {"places"},
    ScaleRefused: {"places"},
    ScaleFailed: {"worker", "agent", "coordinator", "node", "message", "slow", "store", "away", "access", "version"},
    UpdateRefused: {"places"},
    UpdateFailed: {"worker", "agent", "coordinator", "node", "message", "slow", "store", "away", "access", "version"},
    ModelNotFound: {"coordinator", "client"},
    VersionMismatch: {"version"},
    ArenaBusy: {"worker", "agent", "coordinator", "node", "message", "slow"},
}


def _arrows() -> set[tuple[str, str]]:
    """Return the transitions that docs/load_states.md allows."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "load_states.md").read_text()
    found = re.findall(r"^ +([A-Z]+) --> ([A-Z]+):", text, re.MULTILINE)
    return {(before.lower(), after.lower()) for before, after in found}


ARROWS = _arrows()
_advance = load_state.advance


class SimPlanner:
    """Plans at once, after a while."""

    def __init__(self, cluster: ClusterSimulation) -> None:
        self._cluster = cluster

    async def prepare(self, request: LoadRequest) -> PackedPlan:
        await asyncio.sleep(self._cluster.clock.chance.uniform(0.01, 1.0))
        self._cluster.check_access(request.store)
        revision = self._cluster.revisions.get(request.uri, self._cluster.revision)
        check_wanted(request.revision, revision, request.uri)
        model = self._cluster.models[request.uri]
        needs = needs_of(model, request.layout)
        shared = model.shared(needs)
        self._cluster.planned[shared] = model
        ranks = tuple(RankFacts(*[CHUNK_BYTES * len(chunks)] * 3) for chunks in needs.values())
        return PackedPlan(revision, "blake3", CHUNK_BYTES * len(model.contents), ranks, shared)

    async def scaled(self, shared: bytes, layout: Layout) -> tuple[tuple[RankFacts, ...], bytes]:
        await asyncio.sleep(self._cluster.clock.chance.uniform(0.01, 0.5))
        contents = tuple(unpack_shared(shared).chunks.digests[:, 0].tolist())
        model = next(model for model in self._cluster.models.values() if model.contents == contents)
        needs = needs_of(model, layout)
        scaled = model.shared(needs)
        self._cluster.planned[scaled] = model
        return tuple(RankFacts(*[CHUNK_BYTES * len(chunks)] * 3) for chunks in needs.values()), scaled

    async def update(self, target: LoadRequest, tables: bytes, *, all_changed: bool) -> PackedUpdate:
        """All revisions of a model have the same contents here: ranks stage nothing but the revision."""
        plan = await self.prepare(target)
        return PackedUpdate(plan, b"", tuple(RankFacts(0, 0, 0) for _ in plan.ranks), 1, 0, 0)

    async def is_current(self, request: LoadRequest, known: str, limit_s: float = 0.0) -> bool:
        await asyncio.sleep(self._cluster.clock.chance.uniform(0.01, 0.5))
        self._cluster.check_access(request.store)
        return known == self._cluster.revisions.get(request.uri, self._cluster.revision)

    async def close(self) -> None:
        return None


def needs_of(model: SimModel, layout: Layout) -> dict[int, list[int]]:
    """Tensor parallel ranks share chunk 0 and have the rest in turns; replicas need the same."""
    tp = layout.tensor_parallel_size
    count = len(model.contents)
    return {rank: sorted({0, *range(rank % tp, count, tp)}) for rank in range(layout.ranks)}


class SimClient:
    """A program that loads one model and holds it until it is ordered to release it."""

    def __init__(self, cluster: ClusterSimulation, request: LoadRequest, timeout_s: float | None) -> None:
        self.cluster, self.request, self.timeout_s = cluster, request, timeout_s
        self.model_id = ""
        self.state = ""
        self.ready = False
        self.error: LongshoreError | None = None
        self.given_up = False
        self.released = False
        self.dead = False
        self._held = ""
        self._task = cluster.client_loop.create_task(self._live())
        self._renewing = cluster.client_loop.create_task(self._renew())

    @property
    def waits(self) -> bool:
        return not (self.dead or self.ready or self.error is not None)

    @property
    def holds(self) -> bool:
        return bool(self._held) and not self.dead and not self.released

    def kill(self) -> None:
        self.dead = True
        self._task.cancel()
        self._renewing.cancel()

    def release(self) -> None:
        """Release the model by the client's own choice; it waits no more and holds nothing."""
        if not self.released and not self.dead:
            self.released = True
            self.given_up = True
            if self.ready and self._held:
                self.cluster.client_loop.create_task(self._let_go())

    def scale(self, replicas: int) -> None:
        """Ask for another number of replicas, once the model is ready."""
        self._change("scale", self.cluster.unique(), replicas)

    def update(self, *, streaming: bool) -> None:
        """Ask for a new revision, stored at a place of its own, once the model is ready."""
        asked, uri = self.request, f"{self.request.uri}/{self.cluster.unique()}"
        self.cluster.models[uri], self.cluster.revisions[uri] = self.cluster.models[asked.uri], uri
        access = StoreAccess(StoreRef("s3", "models", uri), asked.store.credentials)
        self._change("update", UpdateRequest(uri, asked.client_id, uri, access, streaming=streaming))

    def _change(self, method: str, *asked: Any) -> None:
        if self.ready and self.holds:
            changing = self._changed(method, self._held, *asked)
            self.cluster.changes.append(self.cluster.client_loop.create_task(changing))

    async def _changed(self, method: str, *asked: Any) -> ScaleReport | UpdateReport | LongshoreError:
        try:
            while True:
                _, report, error = await self.cluster.ask(method, *asked, 1.0)
                if report is not None or error is not None:
                    return report or error
        except LongshoreError as error:
            return error

    async def _live(self) -> None:
        try:
            for tries_left in range(4, -1, -1):
                self.model_id, _ = await self.cluster.ask("load", self.request)
                self._held = self.model_id
                try:
                    await self._until_ready()
                    self.ready = True
                    if self.released:
                        await self._let_go()
                    return
                except LoadForgotten:
                    self._held = ""
                    if not tries_left:
                        raise
        except LongshoreError as error:
            self.error = error
            await self._let_go()

    async def _let_go(self) -> None:
        held, self._held = self._held, ""
        if held:
            with contextlib.suppress(LongshoreError):
                await self.cluster.ask("release", held, self.request.client_id)

    async def _until_ready(self) -> None:
        """`cluster.client.wait_until_ready`, on the loop."""
        clock = self.cluster.clock
        began_s, seen, unknown_since_s = clock.now_s, -1, None
        self.state = ""
        while True:
            try:
                seen, now, report, error = await self.cluster.ask("wait", self.model_id, seen, 1.0)
                unknown_since_s = None
            except ModelNotFound as missing:
                if self.state in EARLY:
                    raise LoadForgotten("forgotten", model=self.model_id) from missing
                unknown_since_s = unknown_since_s or clock.now_s
                if clock.now_s - unknown_since_s > REBUILD_GRACE_S:
                    raise ClusterLost("the cluster has forgotten the load", model=self.model_id) from missing
                await asyncio.sleep(0.2)
                continue
            self.state = now.state
            if error is not None:
                raise error
            if report is not None and now.state == "ready":
                for node in report.nodes:
                    check_sources(node)
                assert now.store_bytes == report.store_bytes
                return
            if self.given_up:
                raise LoadCancelled("the caller gave the load up")
            if self.timeout_s is not None and clock.now_s - began_s > self.timeout_s:
                raise LoadTimeout("the load did not end in time")

    async def _renew(self) -> None:
        while not self.dead:
            await asyncio.sleep(self.cluster.config.holder_ttl_s / 4)
            if self._held:
                with contextlib.suppress(LongshoreError):
                    for model_id in await self.cluster.ask("renew", self.request.client_id, [self._held]):
                        await self.cluster.ask("supply", model_id, self.request.client_id, self.request.store)


def counters_of(shown: Snapshot) -> dict[Key, float]:
    """Every counter of the page."""
    page = samples(shown, 0.0, CoordinatorFacts("head", "1", 1))
    return {
        (family, one.labels): one.value
        for family, found in page.items()
        for one in found
        if family.kind is Kind.COUNTER and not isinstance(one.value, Durations)
    }


class ClusterSimulation:
    """A simulated cluster. `slots`: of every arena. `roomy`: nothing is evicted, so fetches can be counted.

    With every second seed nodes feed each other.
    """

    def __init__(self, seed: int, *, hosts: int, slots: int, roomy: bool, node_wait_s: float = 0.0) -> None:
        self.clock = Clock(seed)
        self.peers = seed // 2 % 2 == 1
        self.roomy, self.slots = roomy, slots
        self.config = Config.from_env(
            {},
            heartbeat_s=1.0,
            metrics_port=-1,
            log_level="ERROR",
            lease_deadline_s=10.0,
            stuck_after_s=12.0,
            slots_wait_s=120.0,
            orphan_after_s=30.0,
            holder_ttl_s=8.0,
            node_wait_s=node_wait_s,
            cpu_ranks_per_node=2,
            host_reserve_bytes=0,
            idle_agent_s=3.0 * (seed % 2),
            hedge_factor=0.0 if roomy else 4.0,  # a second fetch of a chunk is not counted then
        )
        self.ray = SimRay(self.clock)
        self.models: dict[str, SimModel] = {}
        self.planned: dict[bytes, SimModel] = {}
        self.hosts: list[SimHost] = []
        self.clients: list[SimClient] = []
        self.hostings: list[SimHosting] = []
        self.changes: list[asyncio.Task[ScaleReport | UpdateReport | LongshoreError]] = []
        self.faults: set[str] = set()  # kinds that there have been
        self.revision = "v1"  # of every stored model that `revisions` does not have
        self.revisions: dict[str, str] = {}  # by URI
        self.refused: set[str] = set()  # access keys that the store does not accept
        self.store_is_away = False
        self.trouble = 0.0  # how often a message does not simply arrive
        self.store_trouble = 0.0
        self.problems: list[str] = []
        self.coordinators = 0
        self._counted: tuple[Coordinator | None, Snapshot | None, dict[Key, float]] = None, None, {}
        self._ids = itertools.count(1)
        self._coordinator: Coordinator | None = None
        self._loop: VirtualLoop | None = None
        self._asked: dict[asyncio.Future[Any], int] = {}
        self._patches = contextlib.ExitStack()
        self._patch()
        self.client_loop = VirtualLoop(self.clock, self._unforeseen)
        for _ in range(hosts):
            self.add_host()
        self.start_coordinator()

    def close(self) -> None:
        self.ray.silent = True
        if self._loop is not None:
            self._loop.kill()
        self.client_loop.kill()
        self._patches.close()

    def unique(self) -> str:
        return f"{next(self._ids):08x}" * 4

    # -- events ------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self.clock.run(seconds)
        self.check()

    def add_host(self) -> None:
        host = Host(f"n{len(self.hosts)}")
        self.ray.hosts[host.node_id] = host
        self.hosts.append(SimHost(self, host, self.slots))

    def load(self, uri: str, tensor_parallel_size: int, replicas: int, **options: Any) -> SimClient:
        """A new client that wants the model."""
        timeout_s = options.pop("timeout_s", None)
        key = options.pop("key", None)
        credentials = None if key is None else Credentials(key, "secret")
        request = LoadRequest(
            uri=uri,
            store=StoreAccess(StoreRef("s3", "models", uri), credentials),
            only_key=None,
            layout=Layout(tensor_parallel_size, 1, replicas),
            device="cpu",
            layout_rules=None,
            keep=options.pop("keep", False),
            client_id=self.unique(),
            wait_for_resources_s=options.pop("wait_for_resources_s", 0.0),
            revision=options.pop("revision", ""),
            placement="via_arena",
        )
        if timeout_s is not None:
            self.faults.add("client")
        client = SimClient(self, request, timeout_s)
        self.clients.append(client)
        return client

    def workers(self) -> list[SimWorker]:
        """Return living rank processes, also those that no coordinator knows any more."""
        found = [actor.process for actor in self.ray.actors.values() if isinstance(actor.process, SimWorker)]
        known = {id(worker) for worker in found}
        old = [worker for node in self.hosts for worker in node.workers.values() if id(worker) not in known]
        return found + [worker for worker in old if worker.rank is not None and worker.rank.alive]

    def host_rank(self, uri: str, node: SimHost) -> SimHosting:
        """A program on that node that hosts a rank of the model."""
        hosting = SimHosting(node, self.models[uri])
        self.hostings.append(hosting)
        return hosting

    def kill_hosting(self, hosting: SimHosting) -> None:
        self.faults.add("worker")
        hosting.node.kill(hosting.rank)

    def leader_exits(self, worker: SimWorker) -> None:
        self.faults.add("worker")
        worker.leader_exits()

    def kill_worker(self, worker: SimWorker) -> None:
        self.faults.add("worker")
        worker.actor.process = None
        worker.killed()

    def stop_worker(self, worker: SimWorker) -> None:
        self.faults.add("worker")
        worker.stop_process()

    def kill_agent(self, node: SimHost) -> None:
        """Ray starts it again."""
        if node.agent is not None:
            self.faults.add("agent")
            agent = node.agent
            agent.killed()
            self.ray.died(agent.actor)
            if not agent.actor.dead:
                delay_s = self.clock.chance.uniform(0.2, 3.0)
                self.clock.after(delay_s, lambda: self.ray.start(agent.actor, lambda: SimAgent(node, agent.actor)))

    def install_other_version(self, node: SimHost) -> None:
        """Agents that start on the node from now on run another Longshore; the one that runs goes on."""
        self.faults.add("version")
        node.version = OTHER_VERSION

    def kill_node(self, node: SimHost) -> None:
        if node.host.lives:
            self.faults.add("node")
            node.host.lives = False
            self._end_processes(node)
            self.clock.after(self.clock.chance.uniform(0.5, NODE_DETECTED_S), lambda: self.ray.lose_host(node.host))

    def cut_off(self, node: SimHost, seconds: float) -> None:
        """A partition, which heals. A node that Ray declared dead meanwhile learns that, and ends itself."""
        if not node.host.lives or node.host.cut_off:
            return
        self.faults.add("node")
        node.host.cut_off = True
        detected_s = self.clock.chance.uniform(3.0, 3.0 + NODE_DETECTED_S)
        if seconds > detected_s:
            self.clock.after(detected_s, lambda: self.ray.lose_host(node.host))
        self.clock.after(seconds, lambda: self._heal(node))

    def kill_coordinator(self) -> None:
        """Ray starts it again, with nothing."""
        if self._loop is None:
            return
        self.faults.add("coordinator")
        loop, self._loop, self._coordinator = self._loop, None, None
        self.ray.silent = True
        loop.kill()
        self.ray.silent = False
        for answer in list(self._asked):
            self._reply(answer, RayActorError(), 0.3)
        self.clock.after(self.clock.chance.uniform(0.3, 3.0), self.start_coordinator)

    def start_coordinator(self) -> None:
        if self._loop is None:
            self.coordinators += 1
            self._coordinator = Coordinator(self.config)
            self._loop = VirtualLoop(self.clock, self._unforeseen)

    # -- who asks whom -----------------------------------------------------------------------------------------

    async def ask(self, method: str, *args: Any) -> Any:
        """A client's call: `cluster.joining.connection.Connection.call`, on the loop."""
        give_up_s = self.clock.now_s + COORDINATOR_GONE_S
        while True:
            answer = asyncio.get_running_loop().create_future()
            self._asked[answer] = 0
            self.clock.soon(lambda answer=answer: self._call(method, args, answer))  # type: ignore[misc]
            try:
                return await asyncio.wait_for(answer, COORDINATOR_GONE_S)
            except TimeoutError as error:
                raise ClusterLost("the coordinator does not answer", method=method) from error
            except RayActorError as error:
                if self.clock.now_s > give_up_s:
                    raise ClusterLost("the coordinator is gone") from error
            finally:
                self._asked.pop(answer, None)
            await asyncio.sleep(0.5)

    def heartbeat(self, agent: SimAgent, beat: AgentBeat, *, answered: bool) -> None:
        """An agent's."""
        coordinator, loop = self._coordinator, self._loop
        with patch.object(messages, "VERSION", agent.version):
            node_id, packed = beat.node_id, pack_message(beat)
        if coordinator is None or loop is None or agent.node.host.cut_off:
            return

        def reply(task: asyncio.Task[Any]) -> None:
            if not answered or task.cancelled() or task.exception() is not None:
                return
            said = unpack_message(task.result(), "the coordinator", "the agent")
            self.clock.soon(lambda: take(said))

        def take(said: Any) -> None:
            if agent.up and not agent.node.host.cut_off:
                agent.answered(beat, said.coordinator)
                agent.asked_for = said.unknown_loads
                for load_id in said.ended_loads:
                    agent.end(load_id)

        self.clock.soon(lambda: self._begin(loop, coordinator.heartbeat_packed(node_id, packed), reply))

    def check_access(self, access: StoreAccess) -> None:
        """Raise what the store says to a request with that access."""
        if self.store_is_away:
            raise StoreUnavailable("the store is away")
        if access.credentials is not None and access.credentials.access_key_id in self.refused:
            raise AccessDenied("refused", key=access.credentials.access_key_id)

    def fate(self) -> str:
        """Choose what happens to a message."""
        if self.trouble and self.clock.chance.random() < self.trouble:
            self.faults.add("message")
            return self.clock.chance.choice(TROUBLES)
        return "arrives"

    def store_fault(self) -> LongshoreError | None:
        """Choose the error of a chunk after a rank's last try; None for none."""
        if self.store_trouble and self.clock.chance.random() < self.store_trouble:
            self.faults.add("store")
            return self.clock.chance.choice(STORE_FAULTS)("a fault of the test", shard="model.safetensors", chunk=0)
        return None

    # -- what must hold ----------------------------------------------------------------------------------------

    def records(self) -> list[ModelRecord]:
        return [] if self._coordinator is None else list(self._coordinator._models.values())

    def check(self) -> None:
        """Check the laws that hold at any moment."""
        assert not self.problems, self.problems[0]
        for node in self.hosts:
            node.check()
            if self.roomy:
                node.check_fetched()
        for record in self.records():
            if record.life.state is LoadState.READY:
                for placement in [record.placements[rank] for rank in range(record.request.world_size)]:
                    self._check_holds_all(record, placement.rank, placement.worker)
        for client in self.clients:
            if client.error is not None:
                self.check_error(client.error)
                self.check_own_error(client)
        for hosting in self.hostings:
            if hosting.rank.error is not None:
                self.check_error(hosting.rank.error)
        for change in self.changes:
            if change.done() and isinstance(outcome := change.result(), LongshoreError):
                assert type(outcome) in JUSTIFIED, f"nobody foresaw {outcome!r} {outcome.details}"
                failed = isinstance(outcome, ScaleFailed | UpdateFailed)
                assert not failed or self.faults - {"access", "places"}, f"why {outcome!r}?"
        self._check_counters()

    def _check_counters(self) -> None:
        """No counter falls while one coordinator shows it."""
        if self._coordinator is None:
            return
        whose, shown, before = self._counted
        now = self._coordinator._agents.metrics.snapshot()
        if shown is not None and (now.agents, now.totals) == (shown.agents, shown.totals):
            return
        counters = counters_of(now)
        for key, value in before.items() if whose is self._coordinator else ():
            assert counters.get(key, value) >= value, f"a counter fell: {key}"
        self._counted = self._coordinator, now, counters

    def check_error(self, error: LongshoreError) -> None:
        """A load fails with a typed error only, and only when there was a fault that justifies that very one."""
        causes = JUSTIFIED.get(type(error))
        assert causes is not None, f"nobody foresaw {error!r} {error.details}"
        assert causes & self.faults, f"nothing that went wrong ({self.faults}) justifies {error!r}"

    def check_own_error(self, client: SimClient) -> None:
        """Check that no load ended because of what other clients did or may not do."""
        if isinstance(client.error, LoadCancelled):
            unheard = self.faults & {"coordinator", "message", "node"}  # its hold may have lapsed
            assert client.given_up or unheard, f"a load ended because another client released: {client.error!r}"
        if isinstance(client.error, AccessDenied):
            credentials = client.request.store.credentials
            assert credentials is not None, "the credentials of another client ended a load"
            assert credentials.access_key_id in self.refused, "the credentials of another client ended a load"
        if isinstance(client.error, RevisionMismatch):
            assert client.error.details["expected"] == client.request.revision, "another client asked for that revision"

    def _check_holds_all(self, record: ModelRecord, rank: int, worker: Handle) -> None:
        process = worker.actor.process if worker is not None else None
        if isinstance(process, SimWorker) and process.rank is not None and process.rank.alive:
            held = process.rank
            assert held.load.load_id == record.model_id
            assert held.rank == rank
            needed = set(needs_of(self.models[record.request.uri], record.request.layout)[rank])
            assert held.state.placed == needed, f"rank {rank} is READY, and has {held.state.placed} of {needed}"
            if not record.changes.is_running:
                assert process.revision == record.revision, f"rank {rank} is READY with the revision {process.revision}"

    def settle(self) -> None:
        """Run without further faults until every held load is READY or has a justified error."""
        self.trouble = self.store_trouble = 0.0
        for node in self.hosts:
            if node.host.cut_off:
                self._heal(node)
        for worker in self.workers():
            if self.clock.chance.random() < 0.5:  # others never wake, and are found to be stuck
                worker.continue_process()
        for hosting in self.hostings:
            hosting.rank.asleep = False
        self._run_until(ENDS_WITHIN_S, self._is_settled, "a load does not end, though nothing goes wrong any more")

    def _is_settled(self) -> bool:
        states = {record.life.state for record in self.records() if not record.life.is_over}
        return (
            not any(client.waits for client in self.clients)
            and all(hosting.is_over for hosting in self.hostings)
            and all(change.done() for change in self.changes)
            and self._loop is not None
            and states <= {LoadState.READY}
            and not any(record.changes.is_running for record in self.records())
        )

    def end(self) -> None:
        """Release every model and check that nothing is left."""
        self.faults.add("client")
        for client in self.clients:
            client.release()
        self._run_until(GONE_WITHIN_S, self._unkept_and_empty, "something is left of what nobody wants")
        for node in self.hosts:
            if node.agent is not None:
                node.sync()
                node.check_nothing_is_left()

    def _unkept_and_empty(self) -> bool:
        for record in self.records():
            if (
                record.holders.keep
                and not record.life.is_over
                and self._coordinator is not None
                and self._loop is not None
            ):
                self._begin(self._loop, self._coordinator.unkeep(record.model_id, ""), lambda task: task.exception())
        return self._is_empty()

    def _is_empty(self) -> bool:
        if self._coordinator is None or not all(record.life.is_over for record in self.records()):
            return False
        for node in self.hosts:
            if node.agent is not None:
                stats = node.cache.stats()
                if node.ledger._loads or stats.leased_slots or stats.quarantined_slots or stats.in_use_slots:
                    return False
                if node.ledger.is_busy or node.cache.shares.waiting:
                    return False
        return not self.workers()

    def left(self) -> list[str]:
        """Return the leftovers, for the message of a failed test."""
        found = [f"{record.model_id} {record.life} {record.message}" for record in self.records()]
        found += [f"{client.model_id} {client.state} waits={client.waits}" for client in self.clients]
        found += [f"{worker.actor.name} stopped={worker.stopped} {worker.at_work}" for worker in self.workers()]
        for hosting in self.hostings:
            rank = hosting.rank
            if not hosting.is_over:
                found.append(f"{rank.load.load_id} begun={rank.load.begun} joined={rank.state.joined} {rank.error!r}")
        for node in self.hosts:
            if node.agent is not None:
                found.append(f"{node.host} {list(node.ledger._loads)} {node.cache.stats()}")
            else:
                found.append(f"{node.host} has no agent")
        return found

    # -- inside ------------------------------------------------------------------------------------------------

    def _run_until(self, most_s: float, done: Callable[[], bool], problem: str) -> None:
        end_s = self.clock.now_s + most_s
        while not done():
            assert self.clock.now_s < end_s, "\n".join([problem, *self.left()])
            self.run(1.0)

    def _call(self, method: str, args: tuple[Any, ...], answer: asyncio.Future[Any]) -> None:
        if answer.done():
            return
        if self._coordinator is None or self._loop is None:
            self._reply(answer, RayActorError(), 0.3)
            return

        def reply(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                error = task.exception()
                self._reply(answer, error if error is not None else task.result(), 0.1)

        self._begin(self._loop, getattr(self._coordinator, method)(*args), reply)

    def _reply(self, answer: asyncio.Future[Any], result: Any, most_s: float) -> None:
        def give() -> None:
            if not answer.done() and not answer.get_loop().is_closed():
                if isinstance(result, BaseException):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

        self.clock.soon(give, most_s)

    def _begin(
        self, loop: VirtualLoop, work: Coroutine[Any, Any, Any], done: Callable[[asyncio.Task[Any]], object]
    ) -> None:
        if loop.is_closed():
            work.close()
        else:
            loop.create_task(work).add_done_callback(done)

    def _heal(self, node: SimHost) -> None:
        node.host.cut_off = False
        if not node.host.listed:
            self.clock.after(self.clock.chance.uniform(0.5, 3.0), lambda: self._node_ends(node))

    def _node_ends(self, node: SimHost) -> None:
        if node.host.lives:
            node.host.lives = False
            self._end_processes(node)

    def _end_processes(self, node: SimHost) -> None:
        for worker in self.workers():
            if worker.node is node:
                worker.actor.process = None
                worker.killed()
        for hosting in self.hostings:
            if hosting.node is node:
                node.kill(hosting.rank)
        if node.agent is not None:
            agent = node.agent
            agent.killed()
            agent.actor.process = None

    def _unforeseen(self, error: BaseException) -> None:
        """Record an error of a task that nothing waits for."""
        if not isinstance(error, LongshoreError | RayActorError | TimeoutError) or isinstance(error, IllegalTransition):
            self.problems.append(f"in a task of its own: {error!r}")

    def _logged(self, message: str, *args: Any, **_: Any) -> None:
        """Record an error after which the coordinator's repeated work went on."""
        error = sys.exc_info()[1]
        if error is not None:
            self._unforeseen(error)

    def _start_agent(self, node_id: str, host: str, config: Config) -> Handle:
        with contextlib.suppress(ValueError):
            return self.ray.get_actor(agent_name(node_id), "")
        node = next(node for node in self.hosts if node.host.node_id == node_id)
        made: list[SimActor] = []
        handle = self.ray.create(agent_name(node_id), node_id, lambda: SimAgent(node, made[0]), restarts=True)
        made.append(handle.actor)
        return handle

    def _start_worker(self, worker_group_id: str, rank: int, incarnation: int, *, node_id: str, **_: Any) -> Handle:
        node = next(node for node in self.hosts if node.host.node_id == node_id)
        made: list[SimActor] = []
        name = worker_name(worker_group_id, rank, incarnation)
        handle = self.ray.create(name, node_id, lambda: SimWorker(node, made[0]), restarts=False)
        made.append(handle.actor)
        return handle

    def _advance(self, life: load_state.Life, event: Any) -> load_state.Life:
        try:
            after = _advance(life, event)
        except IllegalTransition as error:
            self.problems.append(f"{error} {error.details}")
            raise
        if after.state is not life.state and (life.state.value, after.state.value) not in ARROWS:
            self.problems.append(f"{life.state} --> {after.state} is not in docs/load_states.md")
        return after

    def _patch(self) -> None:
        """Ray, the clock and planning are other ones; nothing that decides is."""
        enter = self._patches.enter_context
        logger = logging.getLogger(ROOT)  # the coordinator sets its level and handlers
        self._patches.callback(logger.setLevel, logger.level)
        enter(patch.object(logger, "handlers", [*logger.handlers]))
        now = self.clock.monotonic
        virtual = SimpleNamespace(monotonic=now, time=now, time_ns=lambda: int(now() * 1e9))
        for module in ON_THE_CLOCK:
            enter(patch.object(module, "time", virtual))
        for module in ASKS_RAY:
            enter(patch.object(module, "ray", self.ray))
        enter(patch.object(nodes, "available_resources_per_node", dict))
        enter(patch.object(spawn, "_groups", dict))
        enter(patch.object(spawn, "start_agent", self._start_agent))
        enter(patch.object(spawn, "start_worker", self._start_worker))
        enter(patch.object(coordinator, "Planner", lambda *args: SimPlanner(self)))
        enter(patch.object(coordinator, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=self.unique()))))
        enter(patch.object(coordinator, "check_packages", lambda: None))
        enter(patch.object(PeakMemory, "sample", lambda memory: None))
        enter(patch.object(load_state, "advance", self._advance))
        enter(patch.object(coordinator._LOG, "exception", self._logged))
