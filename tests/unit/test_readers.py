"""Readers on demand: what the agent fetches and keeps for a group of them, whatever they do to each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.node.reader_group import ReaderGroup
from actors.rank.state import RankIdentity
from actors.reader.state import IDLE_S, ReaderState
from cluster.fit.needs import min_slots
from cluster.messages import NodeJob, Orders, RankUpdate
from cluster.scheduling.lease_queue import ChunkState, LeaseQueue
from tests.support.node_simulation import CHUNK_BYTES, MOST_REQUESTS, NodeSimulation, SimLoad, SimModel, SimRank

PATIENCE_S = 10.0
NOTHING: dict[int, list[int]] = {rank: [] for rank in range(3)}

# --- the pure parts ------------------------------------------------------------------------------------------


def test_chunks_are_needed_when_they_are_asked_for():
    queue = LeaseQueue({0: np.arange(4), 1: np.arange(4)}, on_demand=True)
    assert queue.complete
    assert queue.next_for(0) is None
    assert queue.ask(0, 2)
    assert not queue.ask(0, 2)
    assert (queue.next_for(1), queue.left(0), queue.complete) == (2, 1, False)
    queue.leased(2, 1)
    assert queue.committed(2) == (0,)
    assert queue.ask(1, 2)
    assert queue.placed(0, 2)
    assert queue.state(2) is ChunkState.COMMITTED
    assert queue.placed(1, 2)
    assert (queue.state(2), queue.complete) == (ChunkState.DONE, True)
    assert queue.ask(0, 2)  # once more
    assert queue.next_for(0) == 2


def test_a_reader_that_begins_anew_needs_nothing():
    queue = LeaseQueue({0: np.arange(4)}, on_demand=True)
    queue.ask(0, 1)
    queue.rank_lost(0)
    assert not queue.ask(0, 3)
    assert queue.restart_rank(0) == []
    assert (queue.left(0), queue.placed_chunks(0), queue.outstanding(0)) == (0, 0, [])
    assert queue.ask(0, 3)


def group(readers: int = 3, chunks: int = 6) -> ReaderGroup:
    return ReaderGroup({rank: np.arange(chunks) for rank in range(readers)}, 3, PATIENCE_S, 0.0)


def test_other_readers_expect_what_one_has_asked_for():
    readers = group()
    assert readers.asked(0, 3, 0.0) == [1, 2]
    assert readers.asked(1, 3, 0.0) == []
    assert readers.expects(2, 3)
    readers.read(2, 3, 0.0)
    assert readers.asked(0, 3, 0.0) == []  # all have read it, or ask for it now


def test_passed_chunks_are_not_expected():
    readers = group()
    readers.asked(0, 1, 0.0)
    assert readers.passed(1, 0, 3, 0.0) == [1]
    assert readers.asked(0, 2, 0.0) == [2]
    assert readers.asked(0, 4, 0.0) == [1, 2]
    assert readers.passed(1, 5, 10**12, 0.0) == []


def test_chunks_returned_unread_stay_while_slots_do():
    readers = group(2)
    readers.asked(0, 1, 0.0)
    readers.read(1, 1, 0.0)
    readers.returned(0, 1)
    assert readers.expects(0, 1)
    assert readers.drop(0, 5, [], NOTHING, 0.0) == [(0, 1)]
    readers.asked(0, 2, 0.0)
    readers.read(1, 2, 0.0)
    readers.returned(0, 2)
    readers.asked(0, 2, 0.0)
    assert readers.drop(0, 5, [], NOTHING, 0.0) == []


def test_a_reader_is_admitted_to_so_many_chunks():
    readers = group()
    for chunk in (5, 4, 3, 2, 5):
        readers.ask(0, chunk)
    assert readers.admit(0) == [5, 4, 3]
    assert readers.waits(0)
    assert readers.admit(0) == []
    readers.read(0, 4, 0.0)
    assert readers.admit(0) == [2]
    readers.withdraw(0, 2)
    readers.withdraw(0, 3)
    assert not readers.waits(0)
    assert (readers.admit(0), readers.admit(1)) == ([], [])


def test_an_idle_reader_waits_again_for_what_it_was_not_granted():
    readers = group(2)
    for chunk in (1, 2, 3):
        readers.ask(1, chunk)
    assert readers.admit(1) == [1, 2, 3]
    # The store, or another node, may need longer for a chunk than readers wait for each other.
    assert readers.drop(0, 5, [], NOTHING, PATIENCE_S + 1, waiting=[1]) == []
    assert readers.drop(0, 5, [], {0: [], 1: [2]}, PATIENCE_S + 1) == [(1, 1), (1, 3)]
    assert readers.admit(1) == [1, 3]


def test_a_reader_that_waits_loses_the_last_chunk_that_it_expects():
    readers = group(2)
    for chunk in (1, 2, 3):
        readers.asked(0, chunk, 0.0)
    readers.ask(1, 0)
    assert readers.admit(1) == [0]
    assert readers.drop(1, 4, [], NOTHING, 0.0) == []  # it would fetch this one for others
    assert readers.drop(1, 0, [], NOTHING, 0.0) == [(1, 3)]
    assert readers.drop(0, 5, [], NOTHING, 0.0) == []


def test_a_chunk_that_another_reader_has_in_hand_is_not_given_up_for_a_slot():
    readers = group(3)
    for chunk in (1, 2, 3):
        readers.ask(0, chunk)
    for chunk in readers.admit(0):
        readers.asked(0, chunk, 0.0)
    readers.ask(1, 0)
    readers.admit(1)
    assert readers.drop(1, 0, [], NOTHING, 0.0) == []  # each slot is reader 0's
    readers.read(0, 2, 0.0)
    assert readers.drop(1, 0, [], NOTHING, 0.0) == [(1, 2), (2, 2)]  # so that a slot is free at once


def test_what_was_returned_goes_piece_by_piece_but_for_what_lies_behind():
    readers = group(2)
    for chunk in (0, 1, 4, 5):
        readers.asked(1, chunk, 0.0)
        readers.read(0, chunk, 0.0)
        readers.returned(1, chunk)
    readers.ask(1, 3)
    readers.admit(1)
    found = [readers.drop(0, 2, [], NOTHING, 0.0) for _ in range(4)]
    assert found == [[(1, 0), (1, 1)], [(1, 5)], [(1, 4)], []]


def test_idle_readers_lose_their_chunks_when_slots_are_short():
    readers = group(2)
    readers.asked(0, 1, 0.0)
    readers.asked(0, 2, 0.0)
    assert readers.drop(0, 5, [2], NOTHING, 0.0) == [(1, 2)]  # the arena keeps it
    assert readers.drop(0, 5, [], NOTHING, PATIENCE_S) == []
    assert readers.drop(0, 5, [], NOTHING, PATIENCE_S + 1) == [(1, 1)]
    readers.read(0, 1, PATIENCE_S + 1)
    assert readers.asked(0, 3, 2 * PATIENCE_S + 2) == []
    readers.read(1, 0, PATIENCE_S + 1)  # it goes on
    assert readers.asked(0, 4, PATIENCE_S + 1) == [1]


def test_nobody_is_late_before_a_reader_has_read_something():
    readers = group(2)
    readers.asked(0, 0, 0.0)
    readers.asked(1, 0, 0.0)
    for rank in (0, 1):
        readers.returned(rank, 0)  # their programs are not ready yet
    late_s = 3 * PATIENCE_S
    assert readers.asked(0, 0, late_s) == []
    assert readers.asked(0, 1, late_s) == [1]
    readers.read(0, 0, late_s)
    assert readers.asked(0, 2, late_s + PATIENCE_S) == [1]
    assert readers.drop(0, 3, [], NOTHING, late_s + PATIENCE_S) == []  # not even what was returned
    assert readers.drop(0, 3, [], NOTHING, late_s + PATIENCE_S + 1) == [(1, 0), (1, 1), (1, 2)]


# --- on a node -----------------------------------------------------------------------------------------------


@dataclass
class ReaderLoad(SimLoad):
    """The readers of one group."""

    def job(self) -> NodeJob:
        job = super().job()
        return NodeJob(
            **{name: getattr(job, name) for name in job.__slots__}
            # Nobody waits for the deadline of a lease.
            | {"on_demand": True, "group_patience_s": PATIENCE_S, "lease_deadline_s": 100 * PATIENCE_S}
        )


class SimReader(SimRank):
    """A process with one reader in it."""

    def __init__(self, node: NodeSimulation, load: SimLoad, rank: int, incarnation: int) -> None:
        super().__init__(node, load, rank, incarnation)
        identity = RankIdentity(load.load_id, load.attempt, rank, incarnation, self.process)
        self.state: ReaderState = ReaderState(identity, MOST_REQUESTS, itertools.count(1), heartbeat_s=0.5)
        self.has_read: list[int] = []
        self.answer: tuple[RankUpdate, Orders] | None = None  # on its way

    @property
    def finished(self) -> bool:
        return self.state.finished

    @property
    def readable(self) -> list[tuple[int, int]]:
        return [] if self.left else list(self.state.readable.items())

    def drain(self) -> None:
        self.state.drain(self.node.now_s)
        while self.state.begun:
            self.end_write()
        for chunk in list(self.state.reads.elements()):
            self.state.end_read(chunk)

    def read(self, chunk: int) -> bool:
        """Begin to read a chunk if it is readable, and want it otherwise."""
        slot = self.state.begin_read(chunk)
        if slot is None:
            self.state.want([chunk])
            return False
        self.check(chunk, slot)
        return True

    def await_chunk(self, chunk: int) -> None:
        """A consumer begins to wait until it can read the chunk."""
        self.state.want([chunk])
        self.state.awaited[chunk] += 1

    def read_awaited(self) -> None:
        """Every consumer whose chunk is readable begins to read it."""
        for chunk in list(self.state.awaited.elements()):
            if self.read(chunk):
                self.state.awaited[chunk] -= 1

    def send(self) -> None:
        """Send an update whose answer is on its way for a while."""
        if self.state.joined and self.answer is None:
            update = self.state.update(self.node.now_s)
            orders = self.node.deliver(update, "arrives")
            assert isinstance(orders, Orders)
            self.answer = update, orders

    def receive(self) -> None:
        """The answer arrives."""
        answer, self.answer = self.answer, None
        if answer is not None:
            self._obey(*answer)

    def exchange(
        self, fate: str = "arrives", want: int | None = 3, wait: bool = False, *, cancel: bool = False
    ) -> None:
        self.receive()
        if not self.left:
            super().exchange(fate, want, wait, cancel=cancel)

    def agent_is_gone(self) -> None:
        self.receive()
        super().agent_is_gone()

    def end_reads(self) -> None:
        for chunk in list(self.state.reads.elements()):
            self.check(chunk, self.state.readable[chunk])
            self.state.end_read(chunk)
            self.has_read.append(chunk)

    def check(self, chunk: int, slot: int) -> None:
        assert self.node.memory[slot] == self.load.model.content(chunk), f"slot {slot} has another chunk than {chunk}"

    def take_turn(self) -> None:
        """Fetch what is leased, and exchange one message."""
        while self.leases:
            self.begin_write()
            self.end_write()
        if not self.state.joined and not self.finished:
            self.load.begun = False  # whoever is not known begins the load, if it is not there
            self.node.begin(self.load)
        self.exchange(want=None)

    def read_now(self, chunk: int, others: Sequence[SimReader] = (), turns: int = 12, passes_s: float = 0.0) -> None:
        """Read a chunk as a consumer does, and give it back."""
        for _ in range(turns):
            if self.read(chunk):
                self.end_reads()
                self.state.give_back([chunk], self.node.now_s)
                return
            self.take_turn()
            for other in others:
                other.take_turn()
            self.node.time_passes(passes_s)
        raise AssertionError(f"chunk {chunk} does not come")


@dataclass
class Group:
    """A node with the readers of one model."""

    slots: int
    chunks: int
    readers: int
    kept_slots: int = 0
    late: int = 0  # readers, the last ones, that a test starts itself
    node: NodeSimulation = field(init=False)
    all: list[SimReader] = field(init=False)

    def __post_init__(self) -> None:
        self.node = NodeSimulation(self.slots, kept_slots=self.kept_slots)
        self.model = SimModel(tuple(range(self.chunks)))
        needs = {rank: list(range(self.chunks)) for rank in range(self.readers)}
        self.load = ReaderLoad("group", self.model, needs, incarnations=dict.fromkeys(needs, 0))
        self.node.loads["group"] = self.load
        self.node.begin(self.load)
        self.all = [self.start(rank) for rank in range(self.readers - self.late)]

    def start(self, rank: int) -> SimReader:
        reader = SimReader(self.node, self.load, rank, self.load.incarnations[rank])
        self.load.placements[rank] = reader
        self.node.ranks.append(reader)
        reader.exchange()
        return reader

    @property
    def fetched(self) -> int:
        """Chunks that left the store, those fetched twice counted twice."""
        return sum(self.node.fetched.values())

    def close(self) -> None:
        """End every reader, and check that the whole arena is free."""
        for reader in self.all:
            if reader.works:
                reader.state.close()
                for _ in range(4):
                    reader.take_turn() if not reader.left else None
                assert reader.left
        self.node.check_nothing_is_left()


def test_only_chunks_that_are_asked_for_are_fetched():
    here = Group(slots=8, chunks=20, readers=1)
    (reader,) = here.all
    for chunk in (3, 17, 4):
        reader.read_now(chunk)
    assert (reader.has_read, here.fetched) == ([3, 17, 4], 3)
    report = here.node.ledger.report("group", "n", "h")
    assert report.store_bytes == 3 * CHUNK_BYTES
    here.close()


@pytest.mark.parametrize("late", [1, 2])
def test_readers_that_begin_later_cause_no_second_read(late: int):
    """The others read until the window is full of what they keep for those that have not come, and wait for these."""
    here = Group(slots=9, chunks=64, readers=3, late=late)
    at = [0, 0, 0]
    for turn in range(1000):
        if turn == 100:
            assert 0 < max(at) <= 9
            here.all += [here.start(rank) for rank in range(3 - late, 3)]
        for number, reader in enumerate(here.all):
            if at[number] < 64 and reader.read(at[number]):
                reader.end_reads()
                reader.state.give_back([at[number]], here.node.now_s)
                at[number] += 1
            reader.take_turn()
        here.node.time_passes(PATIENCE_S / 200)
    assert at == [64, 64, 64]
    assert here.fetched == 64
    here.close()


def chunks_of_ranks(ranks: int, tensors: int, size: int) -> list[list[int]]:
    """Return the chunks that each rank of an engine reads: of two tensors its rows, of the third all, and so on."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    rows = size // ranks
    for tensor in range(tensors):
        for rank, chunks in enumerate(found):
            first, end = (0, size) if tensor % 3 == 2 else (rank * rows, min(size, (rank + 1) * rows + 1))
            chunks.extend(range(tensor * size + first, tensor * size + end))
    return found


@pytest.mark.parametrize(
    ("ranks", "slots", "seed"), [(2, 46, 0), (3, 12, 4), (3, 12, 16), (4, 12, 10), (4, 46, 1), (4, 46, 14)]
)
def test_ranks_that_skip_different_chunks_never_stop(ranks: int, slots: int, seed: int):
    """They read ahead, begin one after the other, and are fast and slow in turns. The window is full all the time."""
    random = Random(seed)
    lists = chunks_of_ranks(ranks, tensors=20, size=12)
    here = Group(slots=slots, chunks=240, readers=ranks)
    at, ahead = [0] * ranks, max(2, min(15, slots // (ranks + 1)))
    speeds = [random.choice([0.3, 1, 1, 3]) for _ in range(ranks)]
    begins = [0] + [random.choice([0, 0, 5, 40]) for _ in range(ranks - 1)]
    random.shuffle(begins)
    for turn in range(3000):
        for rank in random.sample(range(ranks), ranks):
            reader, chunks = here.all[rank], lists[rank]
            if random.random() < 0.02:
                speeds[rank] = random.choice([0.0, 0.3, 1, 1, 3])
            whole, rest = divmod(speeds[rank], 1)
            for _ in range((int(whole) + (random.random() < rest)) * (turn >= begins[rank])):
                reader.state.want(chunks[at[rank] : at[rank] + ahead])
                if at[rank] == len(chunks) or not reader.read(chunks[at[rank]]):
                    break
                reader.end_reads()
                reader.state.give_back([chunks[at[rank]]], here.node.now_s)
                following = [*chunks[at[rank] + 1 : at[rank] + 2], 240]
                reader.state.pass_by(chunks[at[rank]] + 1, following[0])
                at[rank] += 1
            reader.take_turn()
        here.node.time_passes(0.01)
    assert at == [len(chunks) for chunks in lists]
    assert here.fetched < 1.5 * 240
    here.close()


@pytest.mark.parametrize("kept_slots", [0, 100])
def test_a_reader_ten_times_slower_causes_no_second_read(kept_slots: int):
    here = Group(slots=8, chunks=64, readers=2, kept_slots=kept_slots)
    at = [0, 0]
    for turn in range(10 * 64 * 2):
        for number, reader in enumerate(here.all):
            if (number == 1 and turn % 10) or at[number] == 64:
                reader.take_turn()  # threads of a slow reader fetch all the same
            elif reader.read(at[number]):
                reader.end_reads()
                reader.state.give_back([at[number]], here.node.now_s)
                at[number] += 1
            reader.take_turn()
        here.node.time_passes(0.5)
        if at == [64, 64]:
            break
    assert at == [64, 64]
    assert here.fetched == 64
    here.close()


@pytest.mark.parametrize("fate", ["stops", "dies", "never starts"])
def test_a_reader_that_does_nothing_delays_the_others_by_the_patience(fate: str):
    here = Group(slots=8, chunks=40, readers=2)
    reader, other = here.all
    if fate == "dies":
        other.read(0)
        other.take_turn()
        here.node.kill(other)
        here.node.tick()
    elif fate == "stops":
        for chunk in (0, 1):
            other.read(chunk)
            other.take_turn()
        other.asleep = True
    waited_s = 0.0
    for chunk in range(40):
        while not reader.read(chunk):
            reader.take_turn()
            here.node.time_passes(0.5)
            waited_s += 0.5
        reader.end_reads()
        reader.state.give_back([chunk], here.node.now_s)
        reader.take_turn()
    assert here.fetched in (40, 41)
    assert waited_s <= 40 * 1.0 + PATIENCE_S + 1
    if fate == "stops":  # what was dropped for it is read again, and counted
        other.asleep = False
        for chunk in range(40):
            other.read_now(chunk, [reader])
        late = 1  # the lease that it slept through: its bytes came too late to be committed
        assert here.node.ledger.report("group", "n", "h").refetched_chunks == here.fetched - 40 - late > 0
    here.close()


def test_readers_of_different_parts_do_not_wait_for_each_other():
    here = Group(slots=8, chunks=40, readers=2)
    first, second = here.all
    first.state.pass_by(20, 40)
    second.state.pass_by(0, 20)
    for reader in here.all:
        reader.take_turn()
    for chunk in range(20):
        first.read_now(chunk)
        second.read_now(chunk + 20)
    assert (here.fetched, here.node.now_s) == (40, 0.0)
    here.close()


def test_a_chunk_read_again_comes_from_the_kept_slots():
    here = Group(slots=8, chunks=40, readers=1, kept_slots=40)
    (reader,) = here.all
    for chunk in [*range(40), *range(40)]:
        reader.read_now(chunk)
    assert here.fetched == 40
    here.close()


def test_a_group_that_all_have_left_begins_anew():
    here = Group(slots=8, chunks=10, readers=1)
    (reader,) = here.all
    reader.read_now(0)
    reader.state.close()
    while not reader.left:
        reader.take_turn()
    here.all = [here.start(0)]
    here.all[0].read_now(1)
    assert (here.all[0].has_read, here.all[0].error) == ([1], None)
    here.close()


def test_a_restarted_agent_serves_what_is_still_wanted():
    here = Group(slots=8, chunks=10, readers=1)
    (reader,) = here.all
    assert not reader.read(5)
    reader.take_turn()
    here.node.restart_agent()
    here.node.begin(here.load)
    reader.read_now(5)
    assert reader.has_read == [5]
    here.close()


def test_a_reader_that_is_not_used_gives_everything_back():
    here = Group(slots=8, chunks=10, readers=1)
    (reader,) = here.all
    reader.state.want([1, 2, 3])
    reader.take_turn()
    reader.take_turn()
    assert reader.read(1)
    reader.end_reads()
    reader.take_turn()
    assert set(reader.state.readable) == {1, 2, 3}
    here.node.time_passes(IDLE_S + 1)
    reader.take_turn()
    assert not reader.state.readable
    assert here.node.cache.stats().in_use_slots <= 2  # those that were not read are expected, until others need slots
    reader.read_now(2)
    here.close()


def test_another_load_gets_the_slots_of_what_was_given_back_unread():
    here = Group(slots=8, chunks=10, readers=1)
    (reader,) = here.all
    reader.state.want(range(7))
    for _ in range(4):
        reader.take_turn()
    here.node.time_passes(IDLE_S + 1)
    reader.take_turn()
    assert here.node.cache.stats().in_use_slots > 8 - min_slots(1)
    other = ReaderLoad("other", SimModel(tuple(range(50, 60))), {0: list(range(10))}, incarnations={0: 0})
    here.node.loads["other"] = other
    here.node.begin(other)
    assert other.begun
    here.all.append(SimReader(here.node, other, 0, 0))
    here.all[-1].read_now(3)
    reader.read_now(0)
    here.close()


def test_what_one_thread_awaits_another_cannot_give_back():
    here = Group(slots=8, chunks=10, readers=1)
    (reader,) = here.all
    reader.await_chunk(5)
    for _ in range(3):
        reader.state.give_back([5], here.node.now_s)  # first it is wanted, then asked for, then readable
        reader.take_turn()
    reader.state.drain(here.node.now_s)  # the agent was restarted before the thread woke
    assert 5 in reader.state.wanted
    reader.say_hello()
    for _ in range(3):
        reader.take_turn()
    reader.read_awaited()
    reader.end_reads()
    assert reader.has_read == [5]
    here.close()


def test_a_chunk_that_is_granted_while_it_was_given_back_keeps_its_slot():
    here = Group(slots=4, chunks=10, readers=1)
    (reader,) = here.all
    reader.await_chunk(5)
    reader.take_turn()
    reader.begin_write()
    reader.end_write()
    reader.send()  # the answer grants the chunk
    reader.state.awaited.clear()
    reader.state.give_back([5], here.node.now_s)
    reader.state.want([5])
    reader.receive()
    assert reader.read(5)
    reader.send()
    assert reader.answer is not None
    assert reader.answer[0].returned_unread == ()  # else the agent would give the slot to another chunk
    reader.end_reads()
    here.close()


class ManyReaders(RuleBasedStateMachine):
    """Any readers, messages, deaths and restarts. Nobody reads a wrong byte, and nothing is left."""

    @initialize(slots=st.integers(7, 10), readers=st.integers(1, 3), kept=st.sampled_from([0, 5, 30]))
    def begin(self, slots: int, readers: int, kept: int) -> None:
        self.here = Group(slots, 12, readers, kept)
        self.node = self.here.node

    def reader(self, index: int) -> SimReader | None:
        reader = self.here.all[index % len(self.here.all)]
        return reader if reader.works else None

    @rule(index=st.integers(0, 2), chunk=st.integers(0, 11))
    def reads(self, index: int, chunk: int) -> None:
        if (reader := self.reader(index)) is not None and not reader.finished:
            reader.read(chunk)

    @rule(index=st.integers(0, 2))
    def ends_reads(self, index: int) -> None:
        if (reader := self.reader(index)) is not None:
            reader.end_reads()

    @rule(index=st.integers(0, 2), chunks=st.sets(st.integers(0, 11), min_size=4))
    def gives_back(self, index: int, chunks: set[int]) -> None:
        if (reader := self.reader(index)) is not None and not reader.finished:
            reader.state.give_back(chunks, self.node.now_s)

    @rule(index=st.integers(0, 2), first=st.integers(0, 11), count=st.integers(0, 11))
    def passes(self, index: int, first: int, count: int) -> None:
        if (reader := self.reader(index)) is not None:
            reader.state.pass_by(first, first + count)

    @rule(index=st.integers(0, 2))
    def fetches(self, index: int) -> None:
        if (reader := self.reader(index)) is not None:
            reader.begin_write()

    @rule(index=st.integers(0, 2), which=st.integers(0, 3))
    def has_fetched(self, index: int, which: int) -> None:
        if (reader := self.reader(index)) is not None:
            reader.end_write(index=which)

    @rule(index=st.integers(0, 2), fate=st.sampled_from(["arrives", "arrives", "twice", "unanswered", "late", "lost"]))
    def exchanges(self, index: int, fate: str) -> None:
        if (reader := self.reader(index)) is not None and not reader.finished:
            reader.exchange(fate, want=None)

    @rule(index=st.integers(0, 2))
    def sends(self, index: int) -> None:
        if (reader := self.reader(index)) is not None and not reader.finished:
            reader.send()

    @rule(index=st.integers(0, 2))
    def receives(self, index: int) -> None:
        if (reader := self.reader(index)) is not None:
            reader.receive()

    @rule(index=st.integers(0, 2), chunk=st.integers(0, 11))
    def awaits(self, index: int, chunk: int) -> None:
        if (reader := self.reader(index)) is not None and not reader.finished:
            reader.await_chunk(chunk)

    @rule(index=st.integers(0, 2))
    def reads_awaited(self, index: int) -> None:
        if (reader := self.reader(index)) is not None:
            reader.read_awaited()

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.time_passes(seconds)
        self.tick()

    def tick(self) -> None:
        living = [reader for reader in self.here.all if reader.alive]
        self.node.tick()
        assert all(reader.alive for reader in living), "the agent has killed a program of a user"

    @rule(index=st.integers(0, 2))
    def sleeps_or_wakes(self, index: int) -> None:
        reader = self.here.all[index % len(self.here.all)]
        reader.asleep = not reader.asleep

    @rule(index=st.integers(0, 2))
    def dies(self, index: int) -> None:
        number = index % len(self.here.all)
        self.node.kill(self.here.all[number])
        self.node.tick()
        self.here.all[number] = self.here.start(number)

    @rule()
    def late_message(self) -> None:
        self.node.late_message_arrives()

    @precondition(lambda self: self.node.has_memory)
    @rule()
    def agent_restarts(self) -> None:
        self.node.restart_agent()
        self.node.begin(self.here.load)

    @invariant()
    def slots_have_what_readers_see(self) -> None:
        if not hasattr(self, "here"):
            return
        for reader in self.here.all:
            if reader.works:
                for chunk, slot in reader.readable:
                    reader.check(chunk, slot)
                for chunk in reader.state.awaited.elements():  # else nobody would ever wake its consumer
                    assert chunk in reader.state.wanted or chunk in reader.state.readable

    def teardown(self) -> None:
        if not hasattr(self, "here"):
            return
        for reader in self.here.all:
            reader.asleep = False
            reader.receive()
            reader.end_reads()
        self.node.time_passes(60.0)
        self.tick()
        living = [reader for reader in self.here.all if reader.works]
        for chunk in range(12):
            for reader in living:
                reader.state.awaited.clear()
                reader.read_now(chunk, living, turns=60, passes_s=0.5)
        self.here.close()


ManyReaders.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestManyReaders = ManyReaders.TestCase


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from(["ask", "read", "pass", "drop"]))))
def test_nothing_is_expected_that_was_read_or_passed(events: list[tuple[int, int, str]]):
    readers = group()
    settled: set[tuple[int, int]] = set()
    for number, (rank, chunk, event) in enumerate(events):
        if event == "ask":
            readers.asked(rank, chunk, float(number))
            settled.discard((rank, chunk))
        elif event == "read":
            readers.read(rank, chunk, float(number))
            settled.add((rank, chunk))
        elif event == "pass":
            readers.passed(rank, chunk, chunk + 1, float(number))
            settled.add((rank, chunk))
        else:
            readers.drop(0, 5, [chunk], NOTHING, float(number))
        for rank, chunk in settled:
            assert not readers.expects(rank, chunk)


def test_a_reader_opened_again_in_its_process_leaves_the_first_what_it_reads():
    here = Group(slots=4, chunks=20, readers=1)
    (first,) = here.all
    while not first.read(0):
        first.take_turn()
    here.load.incarnations[0] = 1
    second = SimReader(here.node, here.load, 0, 1)
    second.process = first.process
    second.state.identity = second.state.identity._replace(process=first.process)
    second.state._numbers = first.state._numbers
    here.node.ranks.append(second)
    second.exchange()
    for chunk in range(20):
        second.read_now(chunk)
    first.end_reads()  # checks that the slot still has its chunk
    here.all = [first, second]
    here.close()


def test_a_chunk_that_was_dropped_before_it_was_granted_is_asked_for_again():
    """A case that `ManyReaders` found, step by step."""
    state = ManyReaders()
    state.begin(slots=10, readers=2, kept=0)
    for index, chunk in ((0, 3), (0, 1), (1, 0), (0, 2), (1, 4)):
        state.awaits(chunk=chunk, index=index)
    state.exchanges(fate="unanswered", index=0)
    state.awaits(chunk=9, index=1)
    state.exchanges(fate="arrives", index=0)
    for _ in range(8):
        state.reads_awaited(index=0)
    state.awaits(chunk=10, index=0)
    state.exchanges(fate="arrives", index=1)
    state.teardown()  # reads everything, with readers that have been silent for long
