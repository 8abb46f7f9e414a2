"""A node without threads, processes and a network: loads, ranks that misbehave, a coordinator, slots with contents.

    NodeSimulation -- begin, rank_lost, end --> NodeLedger (real) on a ChunkCache (real) over a journal
    SimRank --------- hello, exchange --------> the same; writes and reads `memory`, as a process would the arena

Every method is one event. What must always hold is asserted where it could break: a rank that reads finds the chunk it
was told of; nobody writes where somebody may read; a process that does its duty is never killed. A SimRank does what
`actors.rank.executor.RankLoader` does, one step at a time.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.node.chunk_sources import STORE, by_source
from actors.node.node_ledger import NodeLedger
from cluster.errors import LoadCancelled
from cluster.fit.needs import min_slots
from cluster.layouts.mesh import Layout
from cluster.messages import Commit, FetchFailure, LeaseOrder, NodeJob, Orders, RankHello, RankUpdate
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


NOTHING = np.empty(0, np.int32)
NO_TENSORS = CutModel(Layout(), (), (), (), NOTHING, NOTHING, NOTHING, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class SimTables(SharedTables):
    """Tables of a model without tensors: what each rank touches is said, not worked out."""

    wanted: dict[int, NDArray[np.int64]]

    def chunk_ids(self, rank: int) -> NDArray[np.int64]:
        return self.wanted[rank]

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
        """What a slot holds that holds the chunk."""
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
    """What the coordinator knows of a load."""

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

    def job(self) -> NodeJob:
        return NodeJob(
            load_id=self.load_id,
            attempt=self.attempt,
            shared=self.model.shared(self.needs),
            store_identity="sim",
            ranks=tuple(self.needs),
            done=frozenset(self.done),
            min_slots=min_slots(len(self.needs)),
            chunk_attempts=CHUNK_ATTEMPTS,
            lease_deadline_s=DEADLINE_S,
            record=b"",
            hedge_factor=2.0 if self.hedge_after_s else 0.0,
            hedge_after_s=self.hedge_after_s,
            incarnations=tuple(self.incarnations.get(rank, 0) for rank in self.needs),
            again=self.begun_before,
            replaced=self.replaced,
            process=None if self.host is None else self.host.process,
        )


class SimRank:
    """One process with one rank in it."""

    def __init__(self, node: NodeSimulation, load: SimLoad, rank: int, incarnation: int) -> None:
        self.node, self.load, self.rank, self.incarnation = node, load, rank, incarnation
        self.process = ProcessId(next(node.pids), 1)
        self.needed = set(load.needs[rank])
        self.alive = True
        self.asleep = False
        self.joined = False
        self.has_joined = False  # any agent: it maps the arena
        self.left = False  # its run has ended
        self.error: LongshoreError | None = None
        self.numbers = itertools.count(1)
        self.leases: list[LeaseOrder] = []  # not begun, or being written
        self.writing: dict[str, LeaseOrder] = {}
        self.closed: set[str] = set()
        self.readable: list[tuple[int, int]] = []
        self.placed: set[int] = set()
        self.sources: dict[int, str] = {}
        self.committed: list[Commit] = []
        self.failed: list[FetchFailure] = []
        self.returned: list[str] = []
        self.placed_now: list[int] = []
        self.waits_with: RankUpdate | None = None

    @property
    def works(self) -> bool:
        return self.alive and not self.asleep and not self.left

    @property
    def owes_an_answer(self) -> bool:
        """It has something of the arena in hand, or has not said that it has not."""
        unsaid = self.leases or self.committed or self.failed or self.returned
        return not self.left and bool(unsaid or not self.joined)

    @property
    def finished(self) -> bool:
        return self.placed == self.needed

    # -- the arena ---------------------------------------------------------------------------------------------

    def begin_write(self, index: int = 0) -> None:
        unbegun = [lease for lease in self.leases if lease.lease_id not in self.writing]
        if unbegun:
            lease = unbegun[index % len(unbegun)]
            self.writing[lease.lease_id] = lease
            self.node.write(self, lease.slot, ("half of", lease.lease_id))

    def end_write(self, error: LongshoreError | None = None, index: int = 0) -> None:
        """The bytes are there, or the try has failed; a closed lease may be committed all the same."""
        if not self.writing:
            return
        lease = list(self.writing.values())[index % len(self.writing)]
        self._drop(lease)
        if error is None:
            self.node.write(self, lease.slot, self.load.model.content(lease.chunk))
            self.node.fetched[self.load.model, lease.chunk] += 1
            self.committed.append(Commit(lease.lease_id, lease.chunk))
            self.sources[lease.chunk] = STORE
        else:
            self.node.write(self, lease.slot, ("rubbish of", lease.lease_id))
            self.failed.append(FetchFailure(lease.lease_id, lease.chunk, error, 1))

    def place(self, index: int = 0) -> None:
        if self.readable:
            chunk, slot = self.readable.pop(index % len(self.readable))
            found = self.node.memory[slot]
            assert found == self.load.model.content(chunk), f"slot {slot} has {found}, not chunk {chunk}"
            assert chunk in self.needed
            assert chunk not in self.placed, f"chunk {chunk} was told twice"
            self.placed.add(chunk)
            self.placed_now.append(chunk)

    def _drop(self, lease: LeaseOrder) -> None:
        self.leases.remove(lease)
        self.writing.pop(lease.lease_id, None)

    def give_back_closed(self) -> None:
        """Leases that the agent closed and that are not being written."""
        for lease in list(self.leases):
            if lease.lease_id in self.closed and lease.lease_id not in self.writing:
                self._drop(lease)
                self.returned.append(lease.lease_id)

    def drain(self) -> None:
        """Nothing of the arena is in use after this."""
        while self.writing:
            self.end_write()
        self.returned += [lease.lease_id for lease in self.leases]
        self.leases.clear()
        while self.readable:
            self.place()

    # -- the conversation --------------------------------------------------------------------------------------

    def say_hello(self, fate: str = "arrives") -> None:
        self.drain()
        self.committed, self.failed, self.returned, self.placed_now = [], [], [], []
        self.closed.clear()
        self.waits_with = None
        self.joined = False
        hello = RankHello(
            self.load.load_id,
            self.load.attempt,
            self.rank,
            self.incarnation,
            self.process,
            tuple(sorted(self.placed)),
            next(self.numbers),
            fetched=by_source(self.sources),
        )
        answer = self.node.deliver(hello, fate)
        if isinstance(answer, LongshoreError):
            self._end(answer)
        elif answer is True:
            self.joined = self.has_joined = True

    def exchange(self, fate: str = "arrives", want: int = 3, wait: bool = False, *, cancel: bool = False) -> None:
        if not self.joined:
            return self.say_hello(fate)
        if self.waits_with is not None:
            return self.poll()
        leaving = self.finished or cancel
        if leaving:
            self.drain()
        update = RankUpdate(
            self.load.load_id,
            self.load.attempt,
            self.rank,
            self.incarnation,
            self.process,
            next(self.numbers),
            committed=tuple(self.committed),
            failed=tuple(self.failed),
            placed=tuple(self.placed_now),
            returned=tuple(self.returned),
            want_leases=0 if leaving else want,
            wait_s=1.0 if wait else 0.0,
            placed_bytes=len(self.placed),
            leaving=leaving,
        )
        self.committed, self.failed, self.returned, self.placed_now = [], [], [], []
        answer = self.node.deliver(update, fate)
        if cancel:
            return self._end(LoadCancelled("cancelled"))
        if isinstance(answer, Orders):
            self._obey(answer, leaving)
            if self.joined and wait and answer == Orders() and not (leaving or self.leases or self.readable):
                self.waits_with = update
        else:
            self.joined = False  # it will drain and say hello

    def poll(self) -> None:
        """The agent holds the answer back until there is one."""
        update, self.waits_with = self.waits_with, None
        if update is not None and self.works:
            self._obey(self.node.ledger.orders_for(update, self.node.now_s) or Orders(), False)

    def _obey(self, orders: Orders, leaving: bool) -> None:
        if leaving and not orders.rejoin:
            return self._end(None)
        if orders.stop is not None:
            return self._end(orders.stop)
        if orders.rejoin:
            self.joined = False
            return None
        for lease in orders.leases:
            self.node.check_unread(lease.slot)
        self.leases += orders.leases
        self.closed |= set(orders.closed_leases)
        self.readable += [pair for pair in orders.readable]
        return None

    def _end(self, error: LongshoreError | None) -> None:
        """What `RankLoader._end` does: nothing in use, and the agent is told so."""
        if error is None:
            if self.load.placements.get(self.rank) is self:
                self.load.done.add(self.rank)
        else:
            while self.writing:
                self.end_write()
            farewell = RankUpdate(
                self.load.load_id,
                self.load.attempt,
                self.rank,
                self.incarnation,
                self.process,
                next(self.numbers),
                committed=tuple(self.committed),
                failed=tuple(self.failed),
                placed=tuple(self.placed_now),
                returned=(*self.returned, *(lease.lease_id for lease in self.leases)),
                leaving=True,
            )
            self.leases, self.readable = [], []
            self.node.deliver(farewell, "arrives")
        self.error, self.left, self.joined = error, True, False


class NodeSimulation:
    """The node. `fates` of messages: arrives, lost (never), unanswered, late (unanswered, arrives later), twice."""

    def __init__(
        self, slot_count: int, ready_slots: int | None = None, seed: int = 0, hedge_after_s: float = 0.0
    ) -> None:
        self.slot_count = slot_count
        self.hedge_after_s = hedge_after_s
        self.ready_slots = slot_count if ready_slots is None else ready_slots
        self.journal = MemoryJournal(slot_count)
        self.chance = random.Random(seed)
        self.cache = ChunkCache(slot_count, journal=self.journal, ready_slots=self.ready_slots)
        self.ledger = NodeLedger(self.cache, CHUNK_BYTES, self.chance)
        self.now_s = 0.0
        self.pids = itertools.count(100)
        self.memory: list[object] = [None] * slot_count
        self.loads: dict[str, SimLoad] = {}
        self.restarted = False
        self.ranks: list[SimRank] = []  # every process there ever was
        self.late: list[RankHello | RankUpdate] = []
        self.fetched: Counter[tuple[SimModel, int]] = Counter()

    # -- memory ------------------------------------------------------------------------------------------------

    def write(self, who: SimRank, slot: int, content: object) -> None:
        self.check_unread(slot)
        others = [rank for rank in self.ranks if rank.alive and rank is not who]
        assert slot not in {lease.slot for rank in others for lease in rank.leases}, "two writers in one slot"
        self.memory[slot] = content

    def check_unread(self, slot: int) -> None:
        reading = {slot for rank in self.ranks if rank.alive for _, slot in rank.readable}
        assert slot not in reading, "a writer where somebody reads"

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
        return self.ledger.exchange(message, self.now_s, settled=message.leaving)[0] or Orders()

    # -- the coordinator ---------------------------------------------------------------------------------------

    def add_load(self, model: SimModel, needs: Mapping[int, Sequence[int]]) -> SimLoad:
        load = SimLoad(f"load-{len(self.loads)}", model, needs, self.hedge_after_s)
        load.incarnations = dict.fromkeys(needs, 0)
        self.loads[load.load_id] = load
        self.begin(load)
        return load

    def host_rank(self, model: SimModel, chunks: Sequence[int]) -> SimRank:
        """A process that is to begin a load of one rank for itself: no coordinator knows of it."""
        load = SimLoad(f"hosted-{len(self.loads)}", model, {0: chunks}, self.hedge_after_s, incarnations={0: 0})
        load.host = load.placements[0] = SimRank(self, load, 0, 0)
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
            load.begun = self.ledger.begin(load.job(), self.now_s)
            load.begun_before |= load.begun

    def start_rank(self, load: SimLoad, rank: int) -> None:
        """A process for the rank, when it has none."""
        if load.begun and not load.ended and rank not in load.placements:
            placement = SimRank(self, load, rank, load.incarnations[rank])
            load.placements[rank] = placement
            self.ranks.append(placement)

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
        return [rank for rank in self.ranks if rank.alive and not rank.left]

    def restart_agent(self) -> None:
        """The agent is killed between two messages; the coordinator tells its successor the loads again."""
        self.restarted = True
        self.late.clear()
        self.cache = ChunkCache(self.slot_count, journal=self.journal, ready_slots=self.ready_slots)
        restored = self.cache.restore([rank.process for rank in self.mapping()], self.now_s)
        self.ledger = NodeLedger(self.cache, CHUNK_BYTES, self.chance, restored=restored)
        for load in self.loads.values():
            load.begun = False
            load.left_before |= bool(load.done)
        for rank in self.ranks:
            rank.waits_with = None
            if rank.alive and rank.joined:
                rank.joined = False

    def add_ready(self, ready_slots: int) -> None:
        self.ready_slots = max(self.ready_slots, min(ready_slots, self.slot_count))
        self.ledger.add_ready(ready_slots)

    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)

    def tick(self) -> None:
        """What the agent's thread does: deaths are noticed, holders of taken-back slots are killed."""
        living = {rank.process for rank in self.ranks if rank.alive}
        for process in self.ledger.processes() - living:
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
        """No more faults: every load that has no error is complete within `rounds` turns of every rank."""
        for rank in self.ranks:
            rank.asleep = False
        self.add_ready(self.slot_count)
        for _ in range(rounds):
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
                break
            for rank in self.ranks:
                self.take_turn(rank)
            self.time_passes(1.0)
        else:
            raise AssertionError("a load does not end though nothing goes wrong any more")
        for rank in self.ranks:  # those that were given up and go on all the same
            for _ in range(3):
                self.take_turn(rank)

    def take_turn(self, rank: SimRank) -> None:
        """All that a healthy rank does between two messages, and the message."""
        if not rank.works:
            return
        rank.give_back_closed()
        while rank.leases:
            rank.begin_write()
            rank.end_write()
        while rank.readable:
            rank.place()
        rank.exchange()

    def check_leases(self) -> None:
        """Nobody fetches what a third does; only a hedge is fetched by two, each in a slot of its own."""
        for node_load in self.ledger._loads.values():
            places = node_load.ranks.values()
            running = Counter(chunk for place in places for chunk in place.leases.values())
            assert max(running.values(), default=0) <= (2 if self.hedge_after_s else 1)
            report = node_load.report("node", "host", 0)
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
        assert (stats.leased_slots, stats.quarantined_slots, stats.in_use_slots) == (0, 0, 0)
        assert self.cache.reserve("last", self.slot_count)
        nobody = ProcessId(1, 1)
        for number in range(self.slot_count):
            assert self.cache.lease(bytes([99, number]) * 16, nobody, 1e9, owner="last") is not None


def check_sources(report: NodeReport) -> None:
    """What was needed came from somewhere, by the bytes and by the number of chunks."""
    chunks = report.store_chunks + report.disk_chunks + report.cached_chunks + report.unknown_chunks
    assert report.needed_chunks == chunks or report.refetched_chunks >= chunks - report.needed_chunks > 0, report
    size_bytes = report.store_bytes + report.disk_bytes + report.cached_bytes + report.unknown_bytes
    assert report.needed_bytes == size_bytes - report.refetched_bytes, report
