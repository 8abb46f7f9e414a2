"""A node without threads, processes and a network: loads, ranks that misbehave, a coordinator, slots with contents.

    NodeSimulation -- begin, rank_lost, end --> NodeLedger (real) on a ChunkCache (real) over a journal
    SimRank (round a real RankState) -- hello, exchange --> the same
                                     -- write, place -----> `memory`, as a process uses the arena

Every method is one event. Laws are asserted where they could break: a rank that reads finds the chunk that the agent
granted; nobody writes where somebody may read; a process that does its duty is never killed.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from actors.node.chunk_flow import NO_MEMBERS, JobTables
from actors.node.node_ledger import NodeLedger
from actors.rank.state import FetchedChunk, Next, RankIdentity, RankState
from cluster.errors import LoadCancelled
from cluster.fit.needs import min_slots
from cluster.layouts.mesh import Layout
from cluster.messages import (
    ARENA_READ,
    NO_SLOT,
    Commit,
    FetchFailure,
    JoinReply,
    LeaseOrder,
    Members,
    NodeJob,
    NodePeer,
    Orders,
    RankHello,
    RankUpdate,
)
from cluster.planning.cut_model import CutModel
from cluster.planning.packed_plan import SharedTables
from cluster.telemetry.stats import NodeReport
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import MemoryJournal
from storage.checkpoints.model_index import ChunkTable, Shard
from storage.errors import LongshoreError
from storage.host.processes import ProcessId

CHUNK_BYTES = 8
DEADLINE_S = 10.0
CHUNK_ATTEMPTS = 3
MOST_REQUESTS = 16


NOTHING = np.empty(0, np.int32)
NO_TENSORS = CutModel(Layout(), (), (), (), NOTHING, NOTHING, NOTHING, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class SimTables(SharedTables):
    """Tables of a model without tensors: the chunks of each rank are given, not computed."""

    wanted: dict[int, NDArray[np.int64]]

    def chunk_ids(self, rank: int) -> NDArray[np.int64]:
        return self.wanted[rank]

    def parts(self, ranks: Iterable[int]) -> Hashable:
        return frozenset(ranks)

    def wanted_bytes(self, ranks: Iterable[int]) -> int:
        return sum(CHUNK_BYTES for _ in set().union(*(self.wanted[rank].tolist() for rank in ranks)))


@dataclass(frozen=True, eq=False)
class SimModel:
    """Chunks by content: equal numbers are equal bytes. Without digests only place and version name a chunk."""

    contents: tuple[int, ...]
    digests: bool = True
    etag: str | None = "v1"
    key: str = "model.safetensors"

    def content(self, chunk: int) -> object:
        """Return the content of a slot that holds the chunk."""
        return self.contents[chunk]

    def shared(self, needs: Mapping[int, Sequence[int]]) -> bytes:
        count = len(self.contents)
        start = np.arange(count, dtype=np.int64) * CHUNK_BYTES
        digests = np.zeros((count, 32), np.uint8)
        digests[:, 0] = self.contents
        table = ChunkTable(
            np.zeros(count, np.int32),
            start,
            start + CHUNK_BYTES,
            "blake3" if self.digests else None,
            digests if self.digests else None,
        )
        wanted = {rank: np.array(sorted(chunks), np.int64) for rank, chunks in needs.items()}
        return pickle.dumps(SimTables((Shard(self.key, count * CHUNK_BYTES, self.etag),), table, NO_TENSORS, wanted))


@dataclass
class SimLoad:
    """A load as the coordinator knows it."""

    load_id: str
    model: SimModel
    needs: Mapping[int, Sequence[int]]
    hedge_after_s: float = 0.0  # 0: never
    begun: bool = False
    begun_before: bool = False
    replaced: bool = False  # some rank
    left_before: bool = False  # some rank, before the agent was restarted
    ended: bool = False
    attempt: int = 1
    incarnations: dict[int, int] = field(default_factory=dict)
    placements: dict[int, SimRank] = field(default_factory=dict)  # the process it started last for each rank
    done: set[int] = field(default_factory=set)
    host: SimRank | None = None  # the process that hosts its only rank, and begins and ends it; else the coordinator
    deadline_s: float = DEADLINE_S  # of leases
    node_id: str = ""  # of the node, as in `peers`
    peers: tuple[NodePeer, ...] = ()  # nodes of the load that feed each other
    elsewhere: Mapping[int, Sequence[int]] = field(default_factory=dict)  # what ranks on other nodes need

    def job(self) -> NodeJob:
        return NodeJob(
            load_id=self.load_id,
            attempt=self.attempt,
            shared=self.model.shared({**self.elsewhere, **self.needs}),
            store_identity="sim",
            ranks=tuple(self.needs),
            done=frozenset(self.done),
            min_slots=min_slots(len(self.needs)),
            chunk_attempts=CHUNK_ATTEMPTS,
            lease_deadline_s=self.deadline_s,
            record=b"",
            hedge_factor=2.0 if self.hedge_after_s else 0.0,
            hedge_after_s=self.hedge_after_s,
            incarnations=tuple(self.incarnations.get(rank, 0) for rank in self.needs),
            again=self.begun_before,
            replaced=self.replaced,
            process=None if self.host is None else self.host.process,
        )

    def tables(self, job: NodeJob) -> JobTables:
        members = Members(self.peers, b"key") if self.peers else NO_MEMBERS
        return JobTables.of(job, members=members, node_id=self.node_id)


class SimRank:
    """One process with one rank in it: the real `RankState`, and everything round it as single events."""

    def __init__(self, node: NodeSimulation, load: SimLoad, rank: int, incarnation: int) -> None:
        self.node, self.load, self.rank, self.incarnation = node, load, rank, incarnation
        number = next(node.pids)
        self.process = ProcessId(number, start_time=number)
        self.needed = set(load.needs[rank])
        identity = RankIdentity(load.load_id, load.attempt, rank, incarnation, self.process)
        self.state = RankState(identity, len(self.needed), MOST_REQUESTS, itertools.count(1), choose=self._choose)
        self.alive = True
        self.asleep = False
        self.has_joined = False  # any agent: it maps the arena
        self.left = False  # its run has ended
        self.error: LongshoreError | None = None
        self.copying: list[tuple[int, int]] = []
        self.waits_with: RankUpdate | None = None
        self._begun_s: dict[str, float] = {}  # by lease
        self._which = 0

    @property
    def works(self) -> bool:
        return self.alive and not self.asleep and not self.left

    @property
    def owes_an_answer(self) -> bool:
        """It has something of the arena in hand, or has not reported that it has not."""
        unsaid = self.leases or self.state.results.fetched or self.finished
        return not self.left and bool(unsaid or not self.state.joined)

    @property
    def finished(self) -> bool:
        return self.state.placed == self.needed

    @property
    def leases(self) -> list[LeaseOrder]:
        """Those that are being written, then those that have not begun."""
        return [] if self.left else [*self.state.begun.values(), *self.state.leases]

    @property
    def readable(self) -> list[tuple[int, int]]:
        """(chunk, slot) that it reads, or is going to read."""
        return [] if self.left else [*self.copying, *self.state.readable.items()]

    @property
    def commits(self) -> int:
        """Commits that it has not reported."""
        return sum(result.commit is not None for result in self.state.results.fetched)

    # -- the arena ---------------------------------------------------------------------------------------------

    def begin_write(self) -> None:
        """Begin with the next lease; one that the agent has closed is returned."""
        lease = self.state.next_lease(self.node.now_s)
        if lease is None:
            return
        if self.state.is_void(lease.lease_id, False):
            self.state.fetch_ended(FetchedChunk(lease.lease_id), 0, 0.0, self.node.now_s)
        else:
            self._begun_s[lease.lease_id] = self.node.now_s
            self.node.write(self, lease.slot, ("half of", lease.lease_id))
            if lease.keep_slot != NO_SLOT:
                self.node.write(self, lease.keep_slot, ("half of", lease.lease_id))

    def end_write(self, error: LongshoreError | None = None, index: int = 0, *, at_once: bool = False) -> None:
        """The bytes are there, or the last try has failed; a closed lease may be committed all the same.

        `at_once`: the chunk is placed too, out of the leased slot.
        """
        begun = list(self.state.begun.values())
        if not begun:
            return
        lease, placed_bytes = begun[index % len(begun)], 0
        if lease.read_slot != NO_SLOT or error is None:
            commit = self._fetch(lease)
            self.node.write(self, lease.slot, self.load.model.content(lease.chunk))
            result = FetchedChunk(lease.lease_id, commit)
            placed_bytes = CHUNK_BYTES if at_once and lease.chunk in self.needed else 0
        else:
            self.node.write(self, lease.slot, ("rubbish of", lease.lease_id))
            result = FetchedChunk(lease.lease_id, failure=FetchFailure(lease.lease_id, lease.chunk, error, 1))
        took_s = self.node.now_s - self._begun_s.pop(lease.lease_id)
        self.state.fetch_ended(result, CHUNK_BYTES, took_s, self.node.now_s, placed_bytes)

    def _fetch(self, lease: LeaseOrder) -> Commit:
        """Read the kept copy, or fetch the chunk and keep it if there is memory for it."""
        content = self.load.model.content(lease.chunk)
        if lease.read_slot != NO_SLOT:
            assert self.node.memory[lease.read_slot] == content, "a kept slot has another chunk"
            return Commit(lease.lease_id, lease.chunk, source=ARENA_READ)
        self.node.fetched[self.load.model, lease.chunk] += 1
        return Commit(lease.lease_id, lease.chunk, kept=self._keep(lease))

    def _keep(self, lease: LeaseOrder) -> bool:
        """Copy the chunk to the lease's kept slot, if it has one and there is memory for it."""
        kept = lease.keep_slot != NO_SLOT and self.node.has_memory
        if kept:
            self.node.write(self, lease.keep_slot, self.load.model.content(lease.chunk))
        return kept

    def begin_place(self, index: int = 0) -> None:
        """Begin to copy a readable chunk, when no copy is under way."""
        if not self.copying:
            self._which = index
            self.copying = self.state.next_chunks(1, self.node.now_s)
            self._check_copied()

    def end_place(self) -> None:
        self._check_copied()
        copied, self.copying = self.copying, []
        self.state.chunks_placed({chunk: CHUNK_BYTES for chunk, _ in copied}, self.node.now_s)

    def place(self, index: int = 0) -> None:
        self.begin_place(index)
        self.end_place()

    def _check_copied(self) -> None:
        for chunk, slot in self.copying:
            found = self.node.memory[slot]
            assert found == self.load.model.content(chunk), f"slot {slot} has {found}, not chunk {chunk}"
            assert chunk in self.needed

    def _choose(self, chunks: Iterable[int], most: int) -> list[int]:
        found = list(chunks)
        return [found[self._which % len(found)]]

    def drain(self) -> None:
        """Drain the rank. It uses no slot of the arena afterwards."""
        self.state.drain(self.node.now_s)
        while self.state.begun:
            self.end_write()
        while self.readable:
            self.place()

    # -- the conversation --------------------------------------------------------------------------------------

    def say_hello(self, fate: str = "arrives") -> None:
        self.drain()
        self.waits_with = None
        hello = self.state.hello()
        answer = self.node.deliver(hello, fate)
        if answer is None:
            return
        known = answer is True
        stop = answer if isinstance(answer, LongshoreError) else None
        try:
            batch = self.node.ledger.batch(hello) if known else 1
            self.state.welcomed(hello, JoinReply("", known=known, stop=stop, batch=batch), self.node.now_s)
            self.has_joined |= self.state.joined
        except LongshoreError as error:
            self._end(error)

    def exchange(
        self, fate: str = "arrives", want: int | None = 3, wait: bool = False, *, cancel: bool = False
    ) -> None:
        """Send one message. `want`: leases; None: as many as the rank wants. `wait`: the agent may hold the answer."""
        if cancel:
            return self._end(LoadCancelled("cancelled"))
        if not self.state.joined:
            return self.say_hello(fate)
        if self.waits_with is not None:
            return self.poll()
        if self.finished and not self.state.draining:
            self.state.drain(self.node.now_s, finish=True)
        leaving = self.finished and self.state.drained
        update = self.state.update(self.node.now_s, leaving=leaving)
        if want is not None and not self.finished:
            update = replace(update, want_leases=want)
        answer = self.node.deliver(update, fate)
        nothing = isinstance(answer, Orders) and replace(answer, short_of="") == Orders()
        if wait and nothing and not (leaving or self.leases or self.readable):
            self.waits_with = update
        else:
            self._obey(update, answer if isinstance(answer, Orders) else None)

    def poll(self) -> None:
        """The agent holds the answer back until there is one."""
        update, self.waits_with = self.waits_with, None
        if update is not None and self.works:
            ledger = self.node.ledger
            self._obey(update, ledger.orders_for(update, self.node.now_s) or ledger.no_orders(update))

    def agent_is_gone(self) -> None:
        """Its next message, or the one that waits, is lost with the agent."""
        if self.alive and self.state.joined and not self.left:
            update, self.waits_with = self.waits_with or self.state.update(self.node.now_s), None
            self._obey(update, None)

    def _obey(self, update: RankUpdate, orders: Orders | None) -> None:
        for lease in () if orders is None else orders.leases:
            self.node.check_unread(lease.slot)
        try:
            if self.state.answered(update, orders, self.node.now_s) is Next.LEFT:
                self._end(None)
        except LongshoreError as error:
            self._end(error)

    def _end(self, error: LongshoreError | None) -> None:
        """`RankLoader._end`: nothing is in use, and the agent learns it."""
        if error is None:
            if self.load.placements.get(self.rank) is self:
                self.load.done.add(self.rank)
        else:
            self.state.stop(error)
            while self.state.begun:
                self.end_write()
            self.copying = []
            if self.state.may_hold_slots:
                self.node.deliver(self.state.update(self.node.now_s, leaving=True), "arrives")
        self.error, self.left = error, True


class NodeSimulation:
    """The node. `fates` of messages: arrives, lost (never), unanswered, late (unanswered, arrives later), twice."""

    def __init__(
        self,
        slot_count: int,
        ready_slots: int | None = None,
        seed: int = 0,
        hedge_after_s: float = 0.0,
        kept_slots: int = 0,
    ) -> None:
        self.slot_count = slot_count  # of the window
        self.kept_slots = kept_slots
        self.has_memory = True  # for chunks that are to be kept
        self.hedge_after_s = hedge_after_s
        self.ready_slots = slot_count if ready_slots is None else ready_slots
        self.journal = MemoryJournal(slot_count + kept_slots)
        self.chance = random.Random(seed)
        self.cache = self._new_cache()
        self.ledger = NodeLedger(self.cache, CHUNK_BYTES, self.chance)
        self.now_s = 0.0
        self.pids = itertools.count(100)
        self.memory: list[object] = [None] * (slot_count + kept_slots)
        self.loads: dict[str, SimLoad] = {}
        self.restarted = False
        self.ranks: list[SimRank] = []  # every process there ever was
        self.late: list[RankHello | RankUpdate] = []
        self.fetched: Counter[tuple[SimModel, int]] = Counter()

    def _new_cache(self) -> ChunkCache:
        return ChunkCache(
            self.slot_count + self.kept_slots,
            window_slots=self.slot_count,
            journal=self.journal,
            ready_slots=self.ready_slots,
        )

    # -- memory ------------------------------------------------------------------------------------------------

    def write(self, who: SimRank, slot: int, content: object) -> None:
        self.check_unread(slot)
        others = [rank for rank in self.ranks if rank.alive and rank is not who]
        leases = [lease for rank in others for lease in rank.leases]
        assert slot not in {slot for lease in leases for slot in (lease.slot, lease.keep_slot)}, (
            "two writers in one slot"
        )
        self.memory[slot] = content

    def shrink(self) -> None:
        """Give the memory of one kept slot back, as the agent does when the host lacks some."""
        me = ProcessId(1, 1)
        if (lease := self.cache.shrink(me)) is not None:
            self.check_unread(lease.slot)
            self.memory[lease.slot] = "zeros"
            self.cache.shrunk(lease)

    def check_unread(self, slot: int) -> None:
        living = [rank for rank in self.ranks if rank.alive]
        reading = {slot for rank in living for _, slot in rank.readable}
        assert slot not in reading | {lease.read_slot for rank in living for lease in rank.leases}, (
            "a writer where somebody reads"
        )

    # -- messages ----------------------------------------------------------------------------------------------

    def deliver(self, message: RankHello | RankUpdate, fate: str) -> object:
        """The agent's answer; None when none comes."""
        if fate == "late":
            self.late.append(message)
        if fate in ("late", "lost"):
            return None
        answer = self._hand_in(message)
        if fate == "twice":
            self._hand_in(message)
        return None if fate == "unanswered" else answer

    def late_message_arrives(self, index: int = 0) -> None:
        if self.late:
            self._hand_in(self.late.pop(index % len(self.late)))

    def _hand_in(self, message: RankHello | RankUpdate) -> object:
        if isinstance(message, RankHello):
            return self.ledger.join(message, self.now_s)
        orders, _ = self.ledger.exchange(message, self.now_s, settled=message.leaving)
        return orders or self.ledger.no_orders(message)

    # -- the coordinator ---------------------------------------------------------------------------------------

    def add_load(self, model: SimModel, needs: Mapping[int, Sequence[int]]) -> SimLoad:
        load = SimLoad(f"load-{len(self.loads)}", model, needs, self.hedge_after_s)
        load.incarnations = dict.fromkeys(needs, 0)
        self.loads[load.load_id] = load
        self.begin(load)
        return load

    def host_rank(self, model: SimModel, chunks: Sequence[int]) -> SimRank:
        """Make a process that begins a load of one rank for itself, without a coordinator."""
        load = SimLoad(f"hosted-{len(self.loads)}", model, {0: chunks}, self.hedge_after_s, incarnations={0: 0})
        load.host = load.placements[0] = self.new_rank(load, 0, 0)
        self.loads[load.load_id] = load
        self.ranks.append(load.host)
        return load.host

    def add_part(self, load: SimLoad, needs: Mapping[int, Sequence[int]]) -> SimLoad:
        """Ranks of the same load that a lost node had: a later attempt brings them here."""
        part = SimLoad(load.load_id, load.model, needs, attempt=load.attempt + 1)
        part.incarnations = dict.fromkeys(needs, 1)
        self.loads[f"{load.load_id} again"] = part
        self.begin(part)
        return part

    def begin(self, load: SimLoad) -> None:
        if not load.begun and not load.ended and (load.host is None or load.host.works):
            job = load.job()
            load.begun = self.ledger.begin(job, self.now_s, load.tables(job))
            load.begun_before |= load.begun

    def start_rank(self, load: SimLoad, rank: int) -> None:
        """A process for the rank, when it has none."""
        if load.begun and not load.ended and rank not in load.placements:
            placement = self.new_rank(load, rank, load.incarnations[rank])
            load.placements[rank] = placement
            self.ranks.append(placement)

    def new_rank(self, load: SimLoad, rank: int, incarnation: int) -> SimRank:
        return SimRank(self, load, rank, incarnation)

    def give_up_rank(self, load: SimLoad, rank: int) -> None:
        """Its process is dead or stuck: the next incarnation may come."""
        if load.begun and not load.ended and rank in load.placements and load.host is None:
            load.placements.pop(rank)
            load.done.discard(rank)
            load.incarnations[rank] += 1
            load.replaced = True
            self.ledger.rank_lost(load.load_id, rank, load.incarnations[rank], self.now_s)

    def end_load(self, load: SimLoad) -> None:
        self.ledger.end(load.load_id, self.now_s)
        load.ended = True

    # -- time and death ----------------------------------------------------------------------------------------

    def kill(self, rank: SimRank) -> None:
        rank.alive = False

    def mapping(self) -> list[SimRank]:
        """Ranks whose processes map the arena."""
        return [rank for rank in self.ranks if rank.alive and rank.has_joined and not rank.left]

    def living(self) -> set[ProcessId]:
        return {rank.process for rank in self.ranks if rank.alive}

    def restart_agent(self) -> None:
        """Kill the agent between two messages. The coordinator sends the loads to its successor."""
        self.restarted = True
        self.late.clear()
        self.cache = self._new_cache()
        restored = self.cache.restore([rank.process for rank in self.mapping()], self.now_s)
        self.ledger = NodeLedger(self.cache, CHUNK_BYTES, self.chance, restored=restored)
        for load in self.loads.values():
            load.begun = False
            load.left_before |= bool(load.done)
        for rank in self.ranks:
            rank.agent_is_gone()

    def add_ready(self, ready_slots: int) -> None:
        self.ready_slots = max(self.ready_slots, min(ready_slots, self.slot_count))
        self.ledger.add_ready(ready_slots)

    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)

    def tick(self) -> None:
        """Do what the agent's thread does: notice deaths, kill the holders of revoked slots."""
        for process in self.ledger.processes() - self.living():
            self.ledger.process_dead(process, self.now_s)
        for load in self.loads.values():
            if load.host is not None and not load.host.alive:
                load.ended = True
                assert load.job().part not in self.ledger._loads, "a share has outlived its process"
                assert load.job().part not in self.cache.shares.waiting
        self.ledger.expire(self.now_s)
        by_process = {rank.process: rank for rank in self.ranks}
        for process in self.ledger.overdue(self.now_s):
            rank = by_process[process]
            if rank.alive:
                assert rank.owes_an_answer, "killed though it had let go of everything"
                self.kill(rank)

    # -- to the end --------------------------------------------------------------------------------------------

    def errors(self) -> dict[str, LongshoreError]:
        """Loads that the agent says cannot go on."""
        beat = self.ledger.beat("node", "host", "0", self.now_s, ())
        return {load.load_id: load.error for load in beat.loads if load.error is not None}

    def end_failed_loads(self) -> None:
        for load_id in self.errors():
            self.end_load(self.loads[load_id])

    def settle(self, rounds: int = 400) -> None:
        """Run without further faults: loads without an error complete within `rounds` turns of every rank."""
        self.wake()
        for _ in range(rounds):
            if self.settle_round():
                break
            self.time_passes(1.0)
        else:
            raise AssertionError("a load does not end though nothing goes wrong any more")
        self.settle_former()

    def wake(self) -> None:
        """No process is stopped any more, and every slot has memory."""
        for rank in self.ranks:
            rank.asleep = False
        self.add_ready(self.slot_count)

    def settle_round(self) -> bool:
        """One turn of everything without faults. Return True when every load has ended."""
        self.end_failed_loads()
        self.tick()
        for load in self.loads.values():
            if load.host is not None and load.host.left and not load.ended:
                self.end_load(load)
        open_loads = [load for load in self.loads.values() if not load.ended]
        for load in open_loads:
            self.begin(load)
            for rank in load.needs:
                placement = load.placements.get(rank)
                if placement is not None and (not placement.alive or (placement.left and rank not in load.done)):
                    self.give_up_rank(load, rank)
                self.start_rank(load, rank)
        if all(load.begun and load.done == set(load.needs) for load in open_loads):
            return True
        for rank in self.ranks:
            self.take_turn(rank)
        return False

    def settle_former(self) -> None:
        """Abandoned processes that go on all the same learn it."""
        for rank in self.ranks:
            for _ in range(3):
                self.take_turn(rank)

    def take_turn(self, rank: SimRank) -> None:
        """All that a healthy rank does between two messages, and the message."""
        if not rank.works:
            return
        while rank.leases:
            rank.begin_write()
            rank.end_write()
        while rank.readable:
            rank.place()
        rank.exchange()

    def step(self, rank: SimRank, chance: random.Random) -> None:
        """One thing that a healthy rank does."""
        which = chance.randrange(8)
        action = chance.randrange(5)
        if action == 0:
            rank.begin_write()
        elif action == 1:
            rank.end_write(None, which, at_once=chance.random() < 0.5)
        elif action == 2:
            (rank.end_place if rank.copying else rank.begin_place)()
        else:
            rank.exchange("arrives", chance.randrange(5), chance.random() < 0.3)

    def check_leases(self) -> None:
        """Check that each chunk has one fetch, or two with a hedge, each in a slot of its own."""
        for node_load in self.ledger._loads.values():
            places = node_load.ranks.values()
            running = Counter(chunk for place in places for chunk in place.leases.values())
            assert max(running.values(), default=0) <= (2 if self.hedge_after_s else 1)
            report = node_load.report("node", "host")
            assert report.hedges_won <= report.hedges <= report.needed_chunks

    def check_reports(self) -> None:
        """Counters add up, for every load that is complete."""
        beat = self.ledger.beat("node", "host", "0", self.now_s, ())
        complete = {load.load_id for load in beat.loads if load.complete}
        for load in self.loads.values():
            if load.ended:
                continue
            assert load.load_id in complete
            report = self.ledger.report(load.load_id, "node", "host")
            assert report.needed_chunks == len(set().union(*load.needs.values()))
            assert report.store_chunks <= report.needed_chunks
            assert report.refetched_bytes == CHUNK_BYTES * report.refetched_chunks
            check_sources(report)
            if not (self.restarted and (load.replaced or load.left_before)):
                assert report.unknown_bytes == 0
        assert all(rank.done for rank in beat.ranks)

    def check_nothing_is_left(self) -> None:
        """Every load ended, every process gone or idle: the whole arena is there for the next load."""
        for load in self.loads.values():
            if not load.ended:
                self.end_load(load)
        self.tick()
        stats = self.cache.stats()
        assert (stats.leased_slots, stats.quarantined_slots, stats.in_use_slots, stats.kept_in_use_slots) == (0,) * 4
        assert self.cache.reserve("last", self.slot_count)
        nobody = ProcessId(1, 1)
        for number in range(self.slot_count):
            assert self.cache.lease(bytes([99, number]) * 16, nobody, 1e9, owner="last") is not None


def check_sources(report: NodeReport) -> None:
    """Check that every needed byte and chunk has a source."""
    known = report.store_chunks + report.disk_chunks + report.peer_chunks + report.cached_chunks
    chunks = known + report.unknown_chunks
    assert report.needed_chunks == chunks or report.refetched_chunks >= chunks - report.needed_chunks > 0, report
    known_bytes = report.store_bytes + report.disk_bytes + report.peer_bytes + report.cached_bytes
    size_bytes = known_bytes + report.unknown_bytes
    assert report.needed_bytes == size_bytes - report.refetched_bytes, report
