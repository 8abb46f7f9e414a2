"""A node of a simulated cluster: an arena, an agent whose decisions are the real ledger's, workers that can be killed.

    SimHost (tests.support.node_simulation, on a clock) -- agent --> SimAgent: what `actors.node_agent` does
                                                        -- rank ---> SimWorker: what `actors.gpu_worker` does

What must always hold is asserted where it could break: see `SimHost.write` and `SimHost._hand_in`.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from actors.node.chunk_flow import JobTables
from actors.node.node_ledger import NodeLedger
from cluster import messages
from cluster.errors import AgentEnded, ClusterLost, LoadCancelled, UpdateFailed, VersionMismatch
from cluster.messages import (
    AgentBeat,
    Assignment,
    Members,
    NodeFacts,
    NodeJob,
    RankHello,
    RankJob,
    RankUpdate,
    SlotHolder,
    UpdateJob,
    Version,
    pack_message,
    unpack_message,
)
from cluster.planning.chunk_keys import HeldChunks, key_blocks
from cluster.planning.packed_plan import unpack_shared
from cluster.request import StoreAccess
from cluster.telemetry.report import NodeReport
from cluster.telemetry.stats import RankReport, StageTimes
from longshore.installation import VERSION
from storage.arena.slots import SlotState
from storage.errors import AccessDenied, ArenaBusy, LongshoreError, StoreUnavailable
from storage.host.memory import MemoryPool
from storage.host.processes import ProcessId
from storage.peers import Peer
from tests.support.node_simulation import CHUNK_BYTES, SimLoad, SimModel, SimRank, SimTables
from tests.support.peer_simulation import ServingNode
from tests.support.simulated_ray import Host, Later, SimActor

if TYPE_CHECKING:
    from tests.support.cluster_simulation import ClusterSimulation

AGENT_GONE_S = 60.0  # see actors.rank.loader
STAGES_S = 3.0  # a rank stages an update within that time
PACES_S = (0.05, 0.2, 0.2, 1.0)  # a rank does something so often
SERVES_S = 0.1  # an agent looks so often at what other nodes ask for
TROUBLES = ("twice", "unanswered", "late", "lost")


class SimHost(ServingNode):
    """A node whose ranks, agent and messages live by the cluster's clock."""

    def __init__(self, cluster: ClusterSimulation, host: Host, slot_count: int) -> None:
        super().__init__(
            slot_count,
            hedge_after_s=cluster.config.hedge_after_s if cluster.config.hedge_factor else 0.0,
            kept_slots=slot_count if len(cluster.hosts) % 2 else 0,  # on every second node
        )
        self.cluster, self.host, self.node_id = cluster, host, host.node_id
        self.start_serving()
        self.journal.epoch = host.node_id  # the same in every life of the same seed
        self.agent: SimAgent | None = None
        self.workers: dict[ProcessId, SimWorker] = {}
        self.spare_fetches = 0  # what was in flight at faults may be fetched once more
        self.needed: set[object] = set()
        self.version = VERSION  # of the agents that start there from now on

    @property
    def lives(self) -> bool:
        """False for other nodes too while its agent is down: nothing listens there."""
        return self.host.lives and self.agent is not None and self.agent.up

    @property
    def hangs(self) -> bool:
        return False

    def is_cut_from(self, other: ServingNode) -> bool:
        return isinstance(other, SimHost) and (self.host.cut_off or other.host.cut_off)

    def server(self, peer: Peer) -> ServingNode:
        return next(node for node in self.cluster.hosts if node.node_id == peer.host)

    def sync(self) -> None:
        self.now_s = self.cluster.clock.now_s

    def in_flight_at_fault(self, rank: SimRank) -> None:
        self.spare_fetches += len(rank.leases) + rank.commits

    def mapping(self) -> list[SimRank]:
        """Those that have left too: a worker keeps its mapping for the next load. A program of a user's does not."""
        return [
            rank
            for rank in self.ranks
            if rank.alive and (rank.load.host is None or (rank.has_joined and not rank.left))
        ]

    def check_in(self) -> None:
        """Workers without a rank at work say so to their agent, now and then."""
        for rank in self.ranks:
            if rank.alive and rank.left and not rank.asleep:
                self.ledger.settle(rank.process)

    def kill(self, rank: SimRank) -> None:
        """SIGKILL."""
        if rank.alive:
            self.in_flight_at_fault(rank)
            super().kill(rank)
            if rank.process in self.workers:
                self.cluster.ray.died(self.workers[rank.process].actor)

    def write(self, who: SimRank, slot: int, content: object) -> None:
        """Write a slot as its holder. Never write it after another rank got it, not even late."""
        super().write(who, slot, content)
        record = self.journal.records()[slot]
        assert record.state in (SlotState.LEASED, SlotState.QUARANTINED), f"a write into a slot that is {record.state}"
        assert record.holder == who.process, "a write into the slot of somebody else"

    def deliver(self, message: RankHello | RankUpdate, fate: str) -> object:
        if fate != "arrives":
            rank = next(rank for rank in self.ranks if rank.process == message.process)
            self.spare_fetches += len(rank.leases)
            if isinstance(message, RankUpdate):
                self.spare_fetches += len(message.committed)
        if fate == "late":
            clock = self.cluster.clock
            clock.after(clock.chance.uniform(0.5, 20.0), self.late_message_arrives)
        return super().deliver(message, fate)

    def late_message_arrives(self, index: int = 0) -> None:
        super().late_message_arrives(self.cluster.clock.chance.randrange(8))

    def begin(self, load: SimLoad) -> None:
        """Begin the load in the process that hosts its rank."""
        if self.agent is not None and self.agent.up:
            self.sync()
            if self.agent.version != VERSION:
                raise VersionMismatch("the node's agent runs another version")
            super().begin(load)
            if load.begun:
                self.needed |= {load.model.content(chunk) for chunk in load.needs[0]}

    def end_load(self, load: SimLoad) -> None:
        load.ended = True
        if self.agent is not None:
            self.agent.end(load.load_id)

    def _hand_in(self, message: RankHello | RankUpdate) -> object:
        """A message of an old incarnation changes nothing, except that it frees slots."""
        if self.agent is None:
            return None
        self.sync()
        if not self._is_old(message):
            return super()._hand_in(message)
        before = self._facts()
        answer = super()._hand_in(message)
        assert self._facts() == before, f"a message of an old incarnation had an effect: {message}"
        return answer

    def _is_old(self, message: RankHello | RankUpdate) -> bool:
        load = self.ledger._find(message.load_id, message.attempt)
        place = None if load is None else load.ranks.get(message.rank)
        return place is not None and message.incarnation < place.incarnation

    def _facts(self) -> object:
        beat = self.ledger.beat("node", "host", "0", self.now_s, ())
        ranks = [(r.load_id, r.attempt, r.rank, r.incarnation, r.pid, r.placed_bytes) for r in beat.ranks]
        loads = [(load.load_id, load.attempt, load.store_bytes, str(load.error), load.complete) for load in beat.loads]
        return ranks, loads, self.cache.stats().used_bytes

    def check(self) -> None:
        """Check after every event that each slot to be read holds the reported chunk."""
        for rank in self.ranks:
            if rank.alive:
                for chunk, slot in rank.readable:
                    assert self.memory[slot] == rank.load.model.content(chunk), "a rank would read other bytes"
        if self.agent is not None:
            self.check_leases()

    def check_fetched(self) -> None:
        """Check that only chunks in flight at a fault were fetched twice."""
        most = len(self.needed) + self.spare_fetches
        fetched = sum(self.fetched.values())
        assert fetched <= most, f"{fetched} chunks were fetched, {len(self.needed)} are needed, {most} are explained"


class SimAgent:
    """The process of an agent."""

    stopped = False

    def __init__(self, node: SimHost, actor: SimActor) -> None:
        self.node, self.actor = node, actor
        self.cluster = node.cluster
        self.version = node.version
        self.incarnation = self.cluster.unique()
        self.asked_for: tuple[str, ...] = ()
        self.beats = 0
        self.shut = False
        node.sync()
        node.restart_agent()
        node.agent = self
        self.cluster.clock.after(self.cluster.config.heartbeat_s, self._beat)
        self.cluster.clock.after(self.cluster.config.heartbeat_s / 2, self._tick)
        if self.cluster.peers:
            self.cluster.clock.after(SERVES_S, self._serve)

    @property
    def ledger(self) -> NodeLedger:
        assert self.version == VERSION, "it would misread a message of another version"
        if self.shut:
            raise AgentEnded("the agent of this node was shut down")
        self.node.sync()
        return self.node.ledger

    @property
    def up(self) -> bool:
        return self.node.agent is self and not self.shut

    # -- what the coordinator calls ----------------------------------------------------------------------------

    def packed(self, call: str, arguments: bytes) -> bytes:
        with patch.object(messages, "VERSION", self.version):
            asked = unpack_message(arguments, "the process that asks", "the agent")
            return pack_message(getattr(self, call)(*asked))

    def shutdown(self, *, only_idle: bool = False) -> bool:
        """Stop the agent. Its arena stays, unlike a real one, so that fetches are counted by content."""
        if self.shut:
            return True
        self.node.sync()
        if only_idle and self.node.ledger.is_busy:
            return False
        assert not self.node.ledger.is_busy, "it has a load"
        self.shut = True
        return True

    def slot_holders(self) -> tuple[SlotHolder, ...]:
        return self.ledger.slot_holders()

    def facts(self) -> NodeFacts:
        assert self.version == VERSION, "its answer would be misread"
        if self.shut:
            raise AgentEnded("the agent of this node was shut down")
        slots = self.node.slot_count * self.cluster.config.slot_bytes
        pools = (MemoryPool("host", 1 << 40, 1 << 40),)
        peer = self.node.peer if self.cluster.peers else None
        return NodeFacts(self.node.host.node_id, self._host, slots, pools, (), "", window_bytes=slots, peer=peer)

    def begin(self, job: NodeJob, members: bytes, shared: bytes) -> bool:
        tables = unpack_shared(shared)
        model = self.cluster.planned[shared]
        job = replace(job, shared=shared)
        known = JobTables.of(job, tables, Members.unpack(members), self.node.host.node_id)
        begun = self.ledger.begin(job, self.node.now_s, known)
        if begun:
            chunks = {int(chunk) for rank in job.ranks for chunk in tables.chunk_ids(rank)}
            self.node.needed |= {model.content(chunk) for chunk in chunks}
        return begun

    def update_members(self, load_id: str, members: bytes) -> None:
        self.ledger.update_members(load_id, Members.unpack(members))

    def holds(self, keys: bytes) -> HeldChunks:
        return HeldChunks.of([held for block in key_blocks(keys) for held in self.ledger.held(block)])

    def rank_lost(self, load_id: str, rank: int, incarnation: int) -> None:
        for placement in self.node.ranks:
            if placement.alive and (placement.load.load_id, placement.rank) == (load_id, rank):
                self.node.in_flight_at_fault(placement)
        self.ledger.rank_lost(load_id, rank, incarnation, self.node.now_s)

    def keep_record(self, load_id: str, record: bytes) -> None:
        self.node.ledger.keep_record(load_id, record)

    def report(self, load_id: str, attempt: int = 0) -> NodeReport:
        return self.ledger.report(load_id, self.node.host.node_id, self._host, attempt)

    def tables(self, load_id: str) -> bytes:
        return pickle.dumps(self.ledger.tables(load_id))

    def end(self, load_id: str, attempt: int = 0) -> None:
        if self.shut:
            return
        for placement in self.node.ranks:
            load = placement.load
            if placement.alive and load.load_id == load_id and attempt in (0, load.attempt):
                self.node.in_flight_at_fault(placement)
        self.node.sync()
        self.node.ledger.end(load_id, self.node.now_s, attempt)

    def coordinator_age_s(self) -> float:
        return 0.0

    # -- its threads -------------------------------------------------------------------------------------------

    def killed(self) -> None:
        """SIGKILL: what it knew is gone, what it wrote down is not."""
        for rank in self.node.ranks:
            if rank.alive:
                self.node.in_flight_at_fault(rank)
        self.node.agent = None
        self.node.late.clear()
        self.node.break_requests()

    def _tick(self) -> None:
        if self.up:
            before = self.node.cache.stats().quarantined_slots
            self.node.sync()
            self.node.tick()
            self.node.check_in()
            self.node.spare_fetches += max(0, self.node.cache.stats().quarantined_slots - before)
            self.cluster.clock.after(self.cluster.config.heartbeat_s / 2, self._tick)

    def _serve(self) -> None:
        if self.up:
            self.node.sync()
            self.node.serve_all()
            self.cluster.clock.after(self.cluster.clock.chance.uniform(0.0, 2 * SERVES_S), self._serve)

    def _beat(self) -> None:
        if not self.up:
            return
        self.cluster.clock.after(self.cluster.config.heartbeat_s, self._beat)
        self.beats += 1
        self.node.sync()
        beat = self.node.ledger.beat(
            self.node.host.node_id, self._host, self.incarnation, self.node.now_s, self.asked_for
        )
        beat = replace(beat, number=self.beats, peer=self.node.peer if self.cluster.peers else None)
        fate = self.cluster.fate()
        times = {"lost": 0, "twice": 2}.get(fate, 1)
        for _ in range(times):
            delay_s = self.cluster.clock.chance.uniform(0.5, 5.0) if fate == "late" else 0.0
            self.cluster.clock.after(delay_s, lambda: self.cluster.heartbeat(self, beat, answered=fate != "unanswered"))

    def answered(self, beat: AgentBeat, coordinator: str) -> None:
        if not self.shut:
            self.ledger.answered(beat, coordinator)

    @property
    def _host(self) -> str:
        return f"host-{self.node.host.node_id}"


class SimHosting:
    """A program that hosts one rank (`actors.hosting`): it asks its node's agent for slots, loads, ends the load."""

    def __init__(self, node: SimHost, model: SimModel) -> None:
        self.node, self.cluster = node, node.cluster
        self.rank = node.host_rank(model, range(len(model.contents)))
        self._pace_s = self.cluster.clock.chance.choice(PACES_S)
        self._asked_s = self._heard_s = self.cluster.clock.now_s
        if self._pace_s == max(PACES_S):
            self.cluster.faults.add("slow")
        self.cluster.client_loop.create_task(self._begin())

    @property
    def is_over(self) -> bool:
        return not self.rank.alive or self.rank.load.ended

    async def _begin(self) -> None:
        """`_HostedLink.begin`, then the rank loads."""
        while not (self.rank.load.begun or self.is_over):
            try:
                await self.cluster.ask("agent_of", self.node.host.node_id)
                self._begin_once()
            except (VersionMismatch, ArenaBusy) as error:
                self._fail(error)
            except (LongshoreError, ValueError):  # (the node is lost)
                if self.cluster.clock.now_s - self._asked_s > AGENT_GONE_S:
                    self._fail(ClusterLost("the node's agent does not answer"))
            await asyncio.sleep(0.2)
        self._act()

    def _begin_once(self) -> None:
        load = self.rank.load
        self.node.begin(load)
        if load.begun:
            self._asked_s = self.cluster.clock.now_s
        elif self.cluster.clock.now_s - self._asked_s > self.cluster.config.slots_wait_s:
            raise ArenaBusy("other loads hold the arena's slots")

    def _act(self) -> None:
        rank, chance = self.rank, self.cluster.clock.chance
        if self.is_over:
            return
        self.cluster.clock.after(chance.uniform(0.02, 2 * self._pace_s), self._act)
        if rank.asleep:
            return
        if rank.left:
            if chance.random() < 0.3:  # it may be killed before
                self._end()
            return
        if self.node.agent is not None and self.node.agent.up:
            self._heard_s = self.cluster.clock.now_s
        elif self.cluster.clock.now_s - self._heard_s > AGENT_GONE_S:
            rank._end(ClusterLost("the node's agent does not answer"))
            return
        try:
            if not rank.state.joined:
                self._begin_once()
            else:
                self._asked_s = self.cluster.clock.now_s
            if self.node.agent is not None and self.node.agent.version != VERSION:
                raise VersionMismatch("the node's agent runs another version")
        except (VersionMismatch, ArenaBusy) as error:
            rank._end(error)
            return
        act_once(rank, self.cluster)

    def _fail(self, error: LongshoreError) -> None:
        self.rank.error = error
        self._end()

    def _end(self) -> None:
        self.node.end_load(self.rank.load)


def act_once(rank: SimRank, cluster: ClusterSimulation) -> None:
    """One to three things that a rank does."""
    chance = cluster.clock.chance

    def speak() -> None:
        if not rank.left:
            rank.exchange(cluster.fate(), chance.randrange(1, 5))

    choices: list[Callable[[], None]] = [speak]
    if rank.state.may_fetch:
        choices.append(rank.begin_write)
    if rank.state.begun:
        choices.append(
            lambda: rank.end_write(cluster.store_fault(), chance.randrange(8), at_once=chance.random() < 0.5)
        )
    if rank.copying:
        choices.append(rank.end_place)
    elif rank.readable:
        choices.append(lambda: rank.begin_place(chance.randrange(8)))
    for _ in range(1 + chance.randrange(3)):
        chance.choice(choices)()


class SimWorker:
    """The process of a rank."""

    def __init__(self, node: SimHost, actor: SimActor) -> None:
        self.node, self.actor = node, actor
        self.cluster = node.cluster
        self.rank: SimRank | None = None
        self.store: StoreAccess | None = None
        self.revision = ""
        self.stopped = False  # SIGSTOP
        self.leaderless = False  # its first thread has ended: Ray takes it for dead, the others go on
        self.dead = False
        self._outcome, self._lifetime = Later(), Later()
        self._update: UpdateJob | None = None  # that it stages, or has staged
        self._staged, self._updated = Later(), ""
        self._heard_s = 0.0
        self._pace_s = self.cluster.clock.chance.choice(PACES_S)
        if self._pace_s == max(PACES_S):
            self.cluster.faults.add("slow")  # leases may run out

    @property
    def at_work(self) -> bool:
        return self.rank is not None and not self.dead and not self.rank.left

    def stop_process(self) -> None:
        """SIGSTOP. (Of a process that Ray takes for dead, only a SIGKILL of the test's own would be the end.)"""
        if self.leaderless:
            return
        self.stopped = True
        if self.rank is not None:
            self.rank.asleep = True
            self.node.in_flight_at_fault(self.rank)

    def continue_process(self) -> None:
        """SIGCONT."""
        self.stopped = False
        if self.rank is not None:
            self.rank.asleep = False

    def leader_exits(self) -> None:
        """Its first thread ends, and Ray sees a dead process. The rank's threads go on until they are stopped."""
        if self.rank is not None and self.at_work and not self.stopped:
            self.leaderless = True
            self.actor.process = None
            self.cluster.ray.died(self.actor)

    def killed(self) -> None:
        """SIGKILL."""
        self.dead = True
        if self.rank is not None and self.rank.alive:
            self.node.kill(self.rank)
        else:
            self.cluster.ray.died(self.actor)

    # -- what the coordinator calls ----------------------------------------------------------------------------

    def hello(self) -> Version:
        return VERSION

    def start(self, job: RankJob, shared: bytes) -> None:
        if self.rank is not None:
            return
        model: SimModel = self.cluster.planned[shared]
        tables = unpack_shared(shared)
        assert isinstance(tables, SimTables)
        needs = {job.rank: tables.wanted[job.rank].tolist()}
        load = SimLoad(job.load_id, model, needs, attempt=job.attempt)
        self.rank = load.placements[job.rank] = self.node.new_rank(load, job.rank, job.incarnation)
        self.store, self.revision = job.store, job.revision
        self.node.ranks.append(self.rank)
        self.node.workers[self.rank.process] = self
        self._heard_s = self.cluster.clock.now_s
        try:
            self.cluster.check_access(job.store)
        except AccessDenied as error:
            self.rank._end(error)
            self._end(self.rank)
            return
        except StoreUnavailable:
            pass  # it tries again for longer than the store is away
        self._later()

    def assignment(self) -> Assignment | None:
        if self.rank is None or self.store is None:
            return None
        pending = () if self._update is None else (self._update.update_id, self._update.job.store)
        return Assignment(self.rank.load.load_id, self.store, self.revision, *pending)

    def stage_update(self, job: UpdateJob, shared: bytes) -> None:
        self._check(job.model_id)
        if job.update_id in (self._updated, self._update and self._update.update_id):
            return
        if self.rank is None or not self.rank.finished or job.base not in ("", self.revision):
            raise UpdateFailed("the rank has not what the update begins with", found=self.revision)
        self._update, self._staged = job, Later()
        self._stage(job, self._staged)

    def _stage(self, job: UpdateJob, staged: Later) -> None:
        def end() -> None:
            if self.stopped:
                self._stage(job, staged)
            elif not self.dead and self._update is job:
                if job.streaming:
                    self._take_over(job)
                staged.known(None)

        self.cluster.clock.after(self.cluster.clock.chance.uniform(0.1, STAGES_S), end)

    def _take_over(self, job: UpdateJob) -> None:
        self.store, self.revision, self._updated, self._update = job.job.store, job.job.revision, job.update_id, None

    def update_outcome(self, load_id: str, update_id: str) -> Later:
        self._check(load_id)
        return self._staged

    def exchange_update(self, load_id: str, update_id: str, revision: str) -> Later | None:
        self._check(load_id)
        job = self._update
        if job is not None and job.update_id == update_id:
            if job.streaming:
                return self._staged
            self._take_over(job)
        elif update_id != self._updated and revision != self.revision:
            raise UpdateFailed("the rank has not staged the update", update=update_id)
        return None

    def drop_update(self, load_id: str, update_id: str) -> None:
        self._update = None

    def stop(self) -> None:
        if self.rank is not None and not self.rank.left:
            self.node.in_flight_at_fault(self.rank)
            self.rank._end(LoadCancelled("stopped"))

    def withdraw(self, call_id: str) -> None:
        pass

    def call(self, load_id: str, call: object, call_id: str) -> None:
        """No call runs here."""

    def outcome(self, load_id: str) -> Later:
        self._check(load_id)
        return self._outcome

    def lifetime(self, load_id: str) -> Later:
        return self._lifetime

    # -- its threads -------------------------------------------------------------------------------------------

    def _check(self, load_id: str) -> None:
        if self.rank is None or self.rank.load.load_id != load_id:
            raise LoadCancelled("this worker does not work on the load (any more)", model=load_id)

    def _later(self) -> None:
        clock = self.cluster.clock
        clock.after(clock.chance.uniform(0.02, 2 * self._pace_s), self._act)

    def _act(self) -> None:
        """Do the next thing that a rank does."""
        rank = self.rank
        if rank is None or not self.at_work or not rank.alive:
            return
        self._later()
        if rank.asleep:
            return
        agent = self.node.agent
        if agent is not None and agent.version != VERSION:
            rank._end(VersionMismatch("the node's agent runs another version"))
        elif agent is not None and (rank.state.joined or not self.leaderless):
            # (A real one also gives up an agent that does not know its load. Here an agent that is not told its loads
            # must be found, so only a process that nobody would stop does that.)
            self._heard_s = self.cluster.clock.now_s
        elif self.cluster.clock.now_s - self._heard_s > AGENT_GONE_S:
            rank._end(ClusterLost("the node's agent does not answer, or does not know the load"))
        if not rank.left:
            act_once(rank, self.cluster)
        if rank.left:
            self._end(rank)
            if self.leaderless:
                self.killed()  # by the end of its last thread

    def _end(self, rank: SimRank) -> None:
        if rank.error is not None:
            self._outcome.known(rank.error)
            return
        assert rank.finished, "a rank says that it has everything, and has not"
        size_bytes = CHUNK_BYTES * len(rank.needed)
        self._outcome.known(
            RankReport(
                rank=rank.rank,
                node=self.node.host.node_id,
                host=f"host-{self.node.host.node_id}",
                pid=rank.process.pid,
                device="cpu",
                incarnation=rank.incarnation,
                size_bytes=size_bytes,
                device_bytes=size_bytes,
                stages=StageTimes(),
                peak_host_bytes=0,
                start_s=0.0,
                load_s=0.0,
            )
        )
