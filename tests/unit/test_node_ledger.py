"""All loads of one node, whatever happens to its ranks, messages and agent: no wrong byte, no leak, always an end."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.node.node_ledger import NodeLedger
from cluster.errors import ChunkFailed, LoadCancelled, RankLost, RankTaken
from cluster.fit.needs import min_slots
from cluster.messages import GroupMember, Orders, RankHello, RankUpdate
from storage.arena.chunk_cache import ChunkCache
from storage.errors import (
    ArenaTooSmall,
    IntegrityError,
    LongshoreError,
    ObjectNotFound,
    RangeMismatch,
    ShortRead,
    StoreUnavailable,
    Throttled,
)
from storage.host.processes import ProcessId
from tests.support.node_simulation import CHUNK_BYTES, DEADLINE_S, NodeSimulation, SimLoad, SimModel, SimRank


def is_named(error: LongshoreError) -> bool:
    """Return whether the error names the chunk, shard and rank, and is not a cancellation."""
    return {"shard", "chunk", "rank"} <= error.details.keys() and not isinstance(error, LoadCancelled | RankLost)


FATES = ("arrives", "arrives", "arrives", "twice", "unanswered", "late", "lost")
FAULTS = (StoreUnavailable, Throttled, ShortRead, RangeMismatch, IntegrityError, ObjectNotFound)

contents = st.lists(st.integers(0, 9), min_size=1, max_size=10).map(tuple)
models = st.builds(SimModel, contents, digests=st.just(True))
# Chunks of models without digests are identified by their place, so their contents must differ everywhere.
plain_models = st.builds(
    lambda count, key, etag: SimModel(
        tuple(range(100 * (1 + key), 100 * (1 + key) + count)), digests=False, etag=etag, key=f"m{key}"
    ),
    st.integers(1, 10),
    st.integers(0, 0),
    st.sampled_from(["v1", None]),
)


@st.composite
def needs_of(draw: st.DrawFn, count: int) -> dict[int, list[int]]:
    """1 to 3 ranks: all need all (tensor parallel), or each a part of its own (fully sharded), or anything."""
    ranks = draw(st.integers(1, 3))
    chunks = st.lists(st.integers(0, count - 1), unique=True, max_size=count)
    kind = draw(st.sampled_from(["all", "parts", "any"]))
    if kind == "all":
        return {rank: list(range(count)) for rank in range(ranks)}
    if kind == "parts":
        return {rank: list(range(rank * count // ranks, (rank + 1) * count // ranks)) for rank in range(ranks)}
    return {rank: draw(chunks) for rank in range(ranks)}


def error_of(kind: type[LongshoreError], chunk: int) -> LongshoreError:
    return kind("a fault of the test", shard="model.safetensors", chunk=chunk)


class NodeMachine(RuleBasedStateMachine):
    """Every rule is one event in the life of a node."""

    @initialize(
        extra_slots=st.integers(0, 8),
        ready=st.integers(0, 3),
        seed=st.integers(0, 9),
        hedge=st.sampled_from([0, 0.5]),
        kept_slots=st.sampled_from([0, 2, 40]),
    )
    def start(self, extra_slots: int, ready: int, seed: int, hedge: float, kept_slots: int) -> None:
        self.node = NodeSimulation(min_slots(3) + extra_slots, ready, seed, hedge, kept_slots)

    @rule()
    def memory_is_given_back(self) -> None:
        self.node.shrink()

    @rule(has_memory=st.booleans())
    def memory_for_kept_chunks(self, has_memory: bool) -> None:
        self.node.has_memory = self.node.cache.may_grow = has_memory

    def _rank(self, index: int) -> SimRank | None:
        living = [rank for rank in self.node.ranks if rank.works]
        return living[index % len(living)] if living else None

    def _load(self, index: int) -> SimLoad | None:
        loads = [load for load in self.node.loads.values() if not load.ended]
        return loads[index % len(loads)] if loads else None

    @precondition(lambda self: len(self.node.loads) < 4)
    @rule(model=st.one_of(models, models, plain_models), data=st.data())
    def new_load(self, model: SimModel, data: st.DataObject) -> None:
        self.node.add_load(model, data.draw(needs_of(len(model.contents))))

    @precondition(lambda self: 0 < len(self.node.loads) < 4)
    @rule(index=st.integers(0, 3), data=st.data())
    def same_model_again(self, index: int, data: st.DataObject) -> None:
        model = list(self.node.loads.values())[index % len(self.node.loads)].model
        self.node.add_load(model, data.draw(needs_of(len(model.contents))))

    @precondition(lambda self: len(self.node.loads) < 4)
    @rule(model=st.one_of(models, plain_models))
    def new_host(self, model: SimModel) -> None:
        self.node.host_rank(model, range(len(model.contents)))

    @rule(index=st.integers(0, 3))
    def host_ends(self, index: int) -> None:
        load = self._load(index)
        if load is not None and load.host is not None and load.host.left:
            self.node.end_load(load)

    @rule(index=st.integers(0, 3), rank=st.integers(0, 2))
    def begin_and_start(self, index: int, rank: int) -> None:
        load = self._load(index)
        if load is not None:
            self.node.begin(load)
            if rank in load.needs:
                self.node.start_rank(load, rank)

    @rule(
        index=st.integers(0, 8),
        fate=st.sampled_from(FATES),
        want=st.sampled_from([None, 0, 1, 2, 3, 4]),
        wait=st.booleans(),
        cancel=st.sampled_from([False] * 9 + [True]),
    )
    def message(self, index: int, fate: str, want: int | None, wait: bool, cancel: bool) -> None:
        rank = self._rank(index)
        if rank is not None:
            rank.exchange(fate, want, wait, cancel=cancel)

    @rule(index=st.integers(0, 8))
    def turn(self, index: int) -> None:
        rank = self._rank(index)
        if rank is not None:
            self.node.take_turn(rank)

    @rule(index=st.integers(0, 9))
    def late_message(self, index: int) -> None:
        self.node.late_message_arrives(index)

    @rule(index=st.integers(0, 8))
    def begin_write(self, index: int) -> None:
        rank = self._rank(index)
        if rank is not None:
            rank.begin_write()

    @rule(
        index=st.integers(0, 8),
        which=st.integers(0, 3),
        fault=st.sampled_from((None, None, None, *FAULTS)),
        at_once=st.booleans(),
    )
    def end_write(self, index: int, which: int, fault: type[LongshoreError] | None, at_once: bool) -> None:
        rank = self._rank(index)
        if rank is not None:
            rank.end_write(None if fault is None else error_of(fault, 0), which, at_once=at_once)

    @rule(index=st.integers(0, 8), which=st.integers(0, 3))
    def begin_place(self, index: int, which: int) -> None:
        rank = self._rank(index)
        if rank is not None:
            rank.begin_place(which)

    @rule(index=st.integers(0, 8))
    def end_place(self, index: int) -> None:
        rank = self._rank(index)
        if rank is not None:
            rank.end_place()

    @rule(index=st.integers(0, 8))
    def process_dies(self, index: int) -> None:
        rank = self._rank(index)
        if rank is not None:
            self.node.kill(rank)

    @rule(index=st.integers(0, 8))
    def process_hangs(self, index: int) -> None:
        rank = self._rank(index)
        if rank is not None:
            rank.asleep = True

    @rule(index=st.integers(0, 8))
    def process_wakes(self, index: int) -> None:
        asleep = [rank for rank in self.node.ranks if rank.alive and rank.asleep]
        if asleep:
            asleep[index % len(asleep)].asleep = False

    @rule(index=st.integers(0, 3), rank=st.integers(0, 2), start=st.booleans())
    def coordinator_gives_up_a_rank(self, index: int, rank: int, start: bool) -> None:
        """Dead or not: the old process may live on for a while."""
        load = self._load(index)
        if load is not None and rank in load.needs:
            self.node.give_up_rank(load, rank)
            if start:
                self.node.start_rank(load, rank)

    @rule(index=st.integers(0, 3))
    def end_load(self, index: int) -> None:
        load = self._load(index)
        if load is not None and load.host is None:
            self.node.end_load(load)

    @rule()
    def agent_restarts(self) -> None:
        self.node.restart_agent()

    @rule(ready=st.integers(0, 16))
    def slots_get_ready(self, ready: int) -> None:
        self.node.add_ready(ready)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.node.time_passes(seconds)

    @rule()
    def tick(self) -> None:
        self.node.tick()

    @invariant()
    def a_load_that_cannot_go_on_says_where_and_why(self) -> None:
        if hasattr(self, "node"):
            for error in self.node.errors().values():
                assert is_named(error), error

    @invariant()
    def nobody_fetches_what_two_others_do(self) -> None:
        if hasattr(self, "node"):
            self.node.check_leases()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.settle()
            self.node.check_reports()
            self.node.check_nothing_is_left()


TestNodeMachine = NodeMachine.TestCase


def test_kept_chunks_stay_until_a_load_that_found_them_has_read_them() -> None:
    """Another load that keeps as much as fits may not evict them."""
    node = NodeSimulation(2 * min_slots(1), kept_slots=4)
    model, other = SimModel((1, 2, 3, 4)), SimModel((5, 6, 7, 8))
    first = node.add_load(model, {0: range(4)})
    node.settle()
    node.end_load(first)
    again, beside = (node.add_load(each, {0: range(4)}) for each in (model, other))
    node.start_rank(beside, 0)
    while not beside.done:
        node.take_turn(beside.placements[0])
    node.settle()
    assert again.done == {0}
    assert node.fetched == {(each, chunk): 1 for each in (model, other) for chunk in range(4)}


TestNodeMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_lives_keep_the_invariants(seed: int) -> None:
    """The same events as above in long random orders, with probabilities that let loads get far before they break."""
    chance = random.Random(seed)
    node = NodeSimulation(
        min_slots(3) + chance.randrange(6),
        chance.randrange(4),
        seed,
        chance.choice([0.0, 0.5]),
        chance.choice([0, 3, 60]),
    )
    models = [SimModel(tuple(chance.randrange(30) for _ in range(chance.randrange(1, 30)))) for _ in range(2)]
    for _ in range(chance.randrange(1, 4)):
        model = chance.choice(models)
        count, ranks = len(model.contents), chance.randrange(1, 4)
        node.add_load(model, {rank: chance.sample(range(count), chance.randrange(count + 1)) for rank in range(ranks)})
        if chance.random() < 0.5:
            node.host_rank(model, range(count))
    trouble = chance.choice([0.02, 0.1, 0.3])
    for _ in range(300):
        for load in node.loads.values():
            node.begin(load)
            for rank in load.needs:
                if chance.random() < 0.2:
                    node.start_rank(load, rank)
        node.add_ready(node.ready_slots + (chance.random() < 0.1))
        for rank in [rank for rank in node.ranks if rank.works]:
            if chance.random() < trouble:
                misbehave(node, rank, chance)
            else:
                node.step(rank, chance)
        if chance.random() < 0.3:
            node.time_passes(chance.choice([0.5, 2.0]))
        if chance.random() < trouble:
            disturb(node, chance)
        node.check_leases()
        node.end_failed_loads()
    node.settle()
    node.check_reports()
    node.check_nothing_is_left()


def misbehave(node: NodeSimulation, rank: SimRank, chance: random.Random) -> None:
    """One fault of a rank."""
    action = chance.randrange(6)
    if action == 0:
        node.kill(rank)
    elif action == 1:
        rank.asleep = True
    elif action == 2:
        rank.end_write(error_of(chance.choice(FAULTS[:5]), 0))
    elif action == 3 and chance.random() < 0.2:
        rank.exchange(cancel=True)
    else:
        rank.exchange(chance.choice(FATES[3:]))


def disturb(node: NodeSimulation, chance: random.Random) -> None:
    """One event of the node or the coordinator."""
    action = chance.randrange(8)
    if action == 0:
        node.time_passes(DEADLINE_S)
    elif action == 1:
        load = chance.choice(list(node.loads.values()))
        node.give_up_rank(load, chance.choice(list(load.needs)))
    elif action == 2 and chance.random() < 0.3:
        node.restart_agent()
    elif action == 3 and chance.random() < 0.1:
        node.end_load(chance.choice(list(node.loads.values())))
    elif action == 4:
        for rank in node.ranks:
            rank.asleep = False
    elif action == 5:
        node.late_message_arrives(chance.randrange(8))
    else:
        node.tick()


# --- without faults ---------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_without_faults_each_chunk_leaves_the_store_once(data: st.DataObject, seed: int) -> None:
    """Also when ranks start late, models share bytes, and a model is loaded twice at once or once more."""
    chance = random.Random(seed)
    chosen = data.draw(st.lists(models, min_size=1, max_size=3))
    needs = [data.draw(needs_of(len(model.contents))) for model in chosen]
    different = {
        c for model, parts in zip(chosen, needs, strict=True) for p in parts.values() for c in map(model.content, p)
    }
    node = NodeSimulation(max(len(different), 1) + sum(min_slots(len(parts)) for parts in needs))
    for model, parts in zip(chosen, needs, strict=True):
        node.add_load(model, parts)
    for _ in range(400):
        for load in node.loads.values():
            for rank in load.needs:
                if chance.random() < 0.05:
                    node.start_rank(load, rank)
        for rank in [rank for rank in node.ranks if rank.works]:
            node.step(rank, chance)
        node.time_passes(0.01)
    node.settle()
    by_content = [model.content(chunk) for (model, chunk), times in node.fetched.items() for _ in range(times)]
    assert sorted(by_content) == sorted(different)  # type: ignore[type-var]
    for load in node.loads.values():
        report = node.ledger.report(load.load_id, "node", "host")
        assert report.store_chunks + report.cached_chunks == report.needed_chunks
        assert (report.refetched_chunks, report.retries) == (0, {})
    node.check_reports()
    node.check_nothing_is_left()


@settings(max_examples=20, deadline=None)
@given(extra=st.integers(0, 4), ranks=st.integers(1, 3), loads=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_loads_far_larger_than_the_arena_end(extra: int, ranks: int, loads: int, seed: int) -> None:
    """Any arena of `min_slots` does, for several loads too: they take turns."""
    chance = random.Random(seed)
    node = NodeSimulation(min_slots(ranks) + extra)
    for number in range(loads):
        model = SimModel(tuple(range(number * 80, number * 80 + 80)))
        node.add_load(model, {rank: sorted(chance.sample(range(80), 60)) for rank in range(ranks)})
    node.settle(rounds=1000)
    node.check_reports()
    assert max(Counter(node.fetched).values()) == 1
    node.check_nothing_is_left()


# --- one thing at a time ----------------------------------------------------------------------------------------


def node_with(chunks: int = 6, ranks: int = 2, slots: int = 8) -> tuple[NodeSimulation, list[SimRank]]:
    """A node with one load that every rank needs whole, its ranks joined."""
    node = NodeSimulation(slots)
    load = node.add_load(SimModel(tuple(range(chunks))), {rank: list(range(chunks)) for rank in range(ranks)})
    for rank in range(ranks):
        node.start_rank(load, rank)
        load.placements[rank].say_hello()
    return node, [load.placements[rank] for rank in range(ranks)]


def test_leases_of_a_lost_answer_are_granted_again_after_a_hello():
    node, (first, second) = node_with()
    first.exchange("unanswered", want=4)
    second.exchange(want=9)
    assert [lease.chunk for lease in second.leases] == [4, 5]  # the agent thinks that the first fetches the others
    first.say_hello()
    second.exchange(want=9)
    assert [lease.chunk for lease in second.leases] == [4, 5, 0, 1, 2, 3]
    assert node.cache.stats().quarantined_slots == 0


def test_a_late_hello_takes_nothing_from_its_own_rank():
    node, (first, _) = node_with()
    first.say_hello("late")
    first.say_hello()
    first.exchange(want=2)
    first.begin_write()
    node.late_message_arrives()
    assert node.cache.stats().leased_slots == 2
    while first.leases:
        first.begin_write()
        first.end_write()
    first.exchange(want=0)
    assert node.cache.stats().committed_slots == 2


def test_a_late_loss_does_not_take_the_rank_from_its_new_process():
    node, (first, _) = node_with()
    load = first.load
    node.kill(first)
    node.give_up_rank(load, 0)
    node.start_rank(load, 0)
    fresh = load.placements[0]
    fresh.say_hello()
    node.ledger.rank_lost(load.load_id, 0, fresh.incarnation, node.now_s)
    fresh.exchange(want=2)
    assert [lease.chunk for lease in fresh.leases] == [0, 1]


def test_chunks_of_an_abandoned_rank_move_before_its_slots():
    node, (first, second) = node_with(chunks=2)
    first.exchange(want=2)
    slots = {lease.slot for lease in first.leases}
    node.give_up_rank(first.load, 0)
    second.exchange(want=2)
    assert [lease.chunk for lease in second.leases] == [0, 1]
    assert not slots & {lease.slot for lease in second.leases}
    assert node.cache.stats().quarantined_slots == 2
    first.exchange()
    assert isinstance(first.error, LongshoreError)  # it learns that another process has the rank, and releases it
    assert node.cache.stats().quarantined_slots == 0


def test_the_later_of_two_processes_of_one_incarnation_has_the_rank():
    """A coordinator that was restarted may start a process again that it took for dead."""
    node, (first, _) = node_with(chunks=2)
    first.exchange(want=2)
    second = first.load.placements[0] = SimRank(node, first.load, 0, 0)
    node.ranks.append(second)
    second.say_hello()
    assert second.state.joined
    first.state.joined = False
    first.say_hello()
    assert isinstance(first.error, RankTaken)
    node.settle()
    assert second.left
    assert second.error is None


def test_a_slot_of_two_equal_chunks_stays_until_both_are_read():
    node = NodeSimulation(3)
    load = node.add_load(SimModel((7, 7, 1, 2, 3, 4)), {0: [0, 1, 2, 3, 4, 5]})
    node.start_rank(load, 0)
    rank = load.placements[0]
    rank.say_hello()
    rank.exchange(want=1)
    rank.begin_write()
    rank.end_write()
    rank.exchange(want=1)
    assert [chunk for chunk, _ in rank.readable] == [0, 1]
    assert [lease.chunk for lease in rank.leases] == [2]
    rank.place()
    rank.exchange(want=9)
    assert len(rank.leases) == 2
    while rank.leases:
        rank.begin_write()
        rank.end_write()
    rank.place()  # chunk 1, out of the slot that chunk 0 was in
    node.settle()
    assert node.fetched[load.model, 0] + node.fetched[load.model, 1] == 1


def test_a_resident_model_keeps_no_slots_from_others():
    node = NodeSimulation(min_slots(2))
    first = node.add_load(SimModel((1, 2)), {0: [0, 1], 1: [0]})
    second = node.add_load(SimModel((3,)), {0: [0], 1: [0]})
    assert not second.begun
    node.settle()
    assert first.done == {0, 1}
    assert second.done == {0, 1}
    # The process of a loaded rank dies: its slices are fetched again, beside whatever runs then.
    node.kill(first.placements[0])
    node.give_up_rank(first, 0)
    third = node.add_load(SimModel((5, 6, 7, 8, 9)), {0: [0, 1, 2, 3, 4], 1: [4]})
    node.settle()
    assert third.done == {0, 1}
    node.check_reports()


def test_late_slot_memory_evicts_no_chunk_of_a_load_that_fits():
    slow = NodeSimulation(6, ready_slots=2)
    load = slow.add_load(SimModel(tuple(range(6))), {0: list(range(6))})
    slow.start_rank(load, 0)
    for ready in (2, 2, 2, 4, 4, 6):
        slow.add_ready(ready)
        slow.take_turn(load.placements[0])
        assert slow.cache.stats().evicted == 0
    slow.settle()
    assert slow.cache.stats().committed_slots == 6


def test_an_unreadable_chunk_ends_only_its_load():
    node, ranks = node_with(chunks=3)
    other = node.add_load(SimModel((50, 51)), {0: [0, 1]})
    while not node.errors():
        for rank in ranks:
            node.time_passes(1.0)
            rank.exchange(want=1)
            while rank.leases:
                rank.begin_write()
                rank.end_write(
                    IntegrityError("flipped", shard="model.safetensors", chunk=rank.leases[0].chunk, found="b")
                )
    error = node.errors()["load-0"]
    assert isinstance(error, IntegrityError)
    assert {"shard", "chunk", "found", "rank", "pid"} <= error.details.keys()
    for rank in ranks:
        rank.exchange()
        assert rank.error is error
    node.settle()
    assert other.done == {0}
    node.check_nothing_is_left()


@pytest.mark.parametrize("kind", [StoreUnavailable, ObjectNotFound, Throttled])
def test_other_failures_end_as_chunk_failed_with_where_and_why(kind: type[LongshoreError]):
    node, (first, second) = node_with(chunks=1)
    for _ in range(40):
        for rank in (first, second):
            rank.exchange(want=1)
            rank.begin_write()
            rank.end_write(error_of(kind, 0))
            node.time_passes(1.0)
    error = next(iter(node.errors().values()))
    assert isinstance(error, ChunkFailed)
    assert error.details["cause"] == kind.__name__
    assert (error.details["shard"], error.details["chunk"]) == ("model.safetensors", 0)
    assert error.details["rank"] in (0, 1)


def test_a_chunk_whose_holders_keep_dying_ends_the_load():
    node, _ = node_with(chunks=1, ranks=1)
    load = node.loads["load-0"]
    while not node.errors():
        placement = load.placements[0]
        placement.exchange()
        placement.exchange(want=1)
        assert len(placement.leases) == 1
        node.kill(placement)
        node.tick()
        node.give_up_rank(load, 0)
        node.start_rank(load, 0)
        node.time_passes(6.0)
    error = node.errors()["load-0"]
    assert isinstance(error, ChunkFailed)
    assert error.details["cause"] == "worker_died"
    assert is_named(error)


def test_a_slot_of_an_expired_lease_is_freed_by_its_rank():
    node, (first, second) = node_with(chunks=2)
    first.exchange(want=2)
    first.begin_write()
    node.time_passes(DEADLINE_S)
    second.exchange(want=2)
    assert [lease.chunk for lease in second.leases] == [0, 1]
    first.exchange(want=0)
    assert len(first.state.closed) == 2
    first.end_write()  # it does not stop for that, and reports a commit
    first.begin_write()  # the other one is returned
    assert node.cache.stats().quarantined_slots == 2
    first.exchange(want=0)
    assert node.cache.stats().quarantined_slots == 0
    assert node.ledger.report("load-0", "node", "host").retries == {"lease_expired": 2}
    node.settle()
    node.check_nothing_is_left()


def test_ranks_of_an_ended_load_get_a_stop_and_are_released():
    node, (first, second) = node_with()
    first.exchange(want=4)
    first.begin_write()
    node.end_load(first.load)
    assert node.cache.stats().quarantined_slots == 4
    for rank in (first, second):
        rank.exchange()
        assert isinstance(rank.error, LoadCancelled)
    assert node.cache.stats().free_slots == node.slot_count
    late = SimRank(node, first.load, 1, 0)
    late.say_hello()
    assert isinstance(late.error, LoadCancelled)
    with pytest.raises(LoadCancelled):
        node.ledger.begin(first.load.job(), node.now_s)


def test_a_rank_that_leaves_early_blocks_no_other():
    node, (first, second) = node_with(slots=5, chunks=12)
    first.exchange(want=3)
    first.exchange(cancel=True)
    assert node.cache.stats().free_slots == 5
    for _ in range(20):
        node.take_turn(second)
    assert second.finished  # the cancelled rank's share of the arena did not stop it
    assert node.errors() == {}


def test_a_restarted_agent_keeps_slots_until_ranks_say_hello():
    node, (first, second) = node_with(slots=8)
    first.exchange(want=2)
    first.begin_write()
    first.end_write()
    first.exchange(want=1)
    second.exchange(want=0)
    reading = {slot for _, slot in second.readable}
    writing = {lease.slot for lease in first.leases}
    node.restart_agent()
    newcomer = node.add_load(SimModel((90, 91, 92, 93, 94)), {0: [0, 1, 2, 3, 4]})
    node.start_rank(newcomer, 0)
    newcomer.placements[0].say_hello()
    newcomer.placements[0].exchange(want=5)
    assert reading
    assert writing
    assert not (reading | writing) & {lease.slot for lease in newcomer.placements[0].leases}
    node.settle()
    assert node.fetched[first.load.model, 0] == 1  # what was committed is not fetched again
    node.check_reports()
    node.check_nothing_is_left()


def test_a_repeated_begin_starts_a_load_once():
    node, (first, _) = node_with()
    first.exchange(want=3)
    assert node.ledger.begin(first.load.job(), 0.0)
    assert node.cache.stats().leased_slots == 3


def test_a_rank_done_before_its_agent_started_holds_no_slots():
    """The coordinator sent the load to the new agent before it knew that, so it sends it again."""
    node, (only,) = node_with(ranks=1, slots=4)
    while not only.left:
        node.take_turn(only)
    load = only.load
    node.restart_agent()
    load.done.clear()
    node.begin(load)
    other = node.add_load(SimModel((7,)), {0: [0]})
    assert not other.begun
    load.done.add(0)
    assert node.ledger.begin(load.job(), node.now_s)
    node.begin(other)
    assert other.begun
    beat = node.ledger.beat("node", "host", "0", node.now_s, ())
    assert {(rank.load_id, rank.done) for rank in beat.ranks} == {(load.load_id, True), (other.load_id, False)}


def test_done_counts_for_one_rank_incarnation_only():
    node, (only,) = node_with(ranks=1)
    load = only.load
    node.restart_agent()
    node.begin(load)
    late = replace(load.job(), done=frozenset({0}))
    node.kill(only)
    node.give_up_rank(load, 0)
    node.ledger.begin(late, node.now_s)
    (rank,) = node.ledger.beat("node", "host", "0", node.now_s, ()).ranks
    assert (rank.incarnation, rank.done) == (1, False)
    node.settle()
    node.check_reports()


def test_a_load_that_needs_no_more_slots_blocks_no_other():
    """Its coordinator was killed before any agent had the load, so nothing ends it."""
    node, (first,) = node_with(ranks=1, slots=7)
    forgotten = node.add_load(SimModel((7,)), {0: [0], 1: [0]})
    node.end_load(first.load)
    behind = node.add_load(SimModel((8,)), {0: [0]})
    assert not forgotten.begun
    assert not behind.begun
    for _ in range(20):
        node.time_passes(1.0)
        node.begin(behind)
    assert behind.begun


def waiting(node: NodeSimulation, host: SimRank) -> None:
    assert not host.load.begun


def begun(node: NodeSimulation, host: SimRank) -> None:
    node.end_load(node.loads["load-0"])
    node.begin(host.load)
    assert host.load.begun


def writing(node: NodeSimulation, host: SimRank) -> None:
    begun(node, host)
    host.exchange()
    host.exchange(want=2)
    host.begin_write()
    assert node.cache.stats().leased_slots


def left(node: NodeSimulation, host: SimRank) -> None:
    """It has everything and has reported it, and dies before it ends the load."""
    begun(node, host)
    while not host.left:
        node.take_turn(host)


@pytest.mark.parametrize("state", [waiting, begun, writing, left])
def test_a_hosted_share_ends_with_its_process(state: Callable[[NodeSimulation, SimRank], None]) -> None:
    node = NodeSimulation(min_slots(1))
    node.add_load(SimModel((1,)), {0: [0]})
    host = node.host_rank(SimModel((5, 6, 7)), [0, 1, 2])
    node.begin(host.load)
    state(node, host)
    holders = {holder.load_id: holder for holder in node.ledger.slot_holders()}
    assert ("hosted-1" in holders) == (state is not left)
    assert all(holder.pid == host.process.pid for load_id, holder in holders.items() if load_id == "hosted-1")
    node.kill(host)
    node.tick()
    assert "hosted-1" not in {holder.load_id for holder in node.ledger.slot_holders()}
    assert "hosted-1" not in {load.load_id for load in node.ledger.beat("node", "", "0", 0.0, ()).loads}
    assert host.process not in node.ledger.processes()
    node.check_nothing_is_left()


def test_a_process_is_in_its_group_until_it_leaves_or_dies() -> None:
    node = NodeSimulation(9)
    hosts = [node.host_rank(SimModel((5, 6)), [0, 1]) for _ in range(2)]
    for host in hosts:
        member = GroupMember(host.load.load_id, "run", "s3://m", "r1", host.process)
        assert node.ledger.begin(replace(host.load.job(), group=member), 0.0)
        node.ledger.end(host.load.load_id, 0.0)

    def members() -> list[str]:
        return [member.load_id for member in node.ledger.beat("node", "host", "0", 0.0, ()).members]

    assert members() == [host.load.load_id for host in hosts]
    assert node.ledger.is_busy
    node.kill(hosts[0])
    node.ledger.process_dead(hosts[0].process, 0.0)
    assert members() == [hosts[1].load.load_id]
    node.ledger.leave(hosts[1].load.load_id)
    assert members() == []
    assert not node.ledger.is_busy


def test_a_hosted_load_that_ended_before_it_began_does_not_begin() -> None:
    """Messages of one process may overtake each other, and it lives on."""
    ledger = NodeLedger(ChunkCache(9), CHUNK_BYTES)
    load = SimLoad("hosted-0", SimModel((1,)), {0: [0]}, incarnations={0: 0})
    load.host = SimRank(NodeSimulation(9), load, 0, 0)
    ledger.end("hosted-0", 0.0)
    with pytest.raises(LoadCancelled, match="before it began"):
        ledger.begin(load.job(), 0.0)
    assert ledger.slot_holders() == ()


def test_the_ledger_names_the_holders_of_slots() -> None:
    node, (first,) = node_with(ranks=1, slots=7)
    node.add_load(SimModel((7,)), {0: [0], 1: [0]})
    node.begin(node.host_rank(SimModel((8,)), [0]).load)
    said = [str(holder) for holder in node.ledger.slot_holders()]
    assert said == ["load-0: 3", "load-1: waits for 5", "hosted-2 (process 101): waits for 3"]
    first.exchange(want=2)
    node.end_load(first.load)
    assert next(str(holder) for holder in node.ledger.slot_holders()) == "load-0: 2"  # until its process releases it


@pytest.mark.parametrize("digests", [True, False])
def test_ranks_of_a_lost_node_join_a_node_with_ranks(digests):
    """The earlier ranks receive nothing, close nothing and fetch nothing again. Every chunk is fetched once."""
    model = SimModel((1, 2, 3, 4), digests=digests, etag=None)
    node = NodeSimulation(12)
    load = node.add_load(model, {0: [0, 1, 2]})
    node.start_rank(load, 0)
    first = load.placements[0]
    first.exchange()
    first.exchange(want=2)
    first.begin_write()
    part = node.add_part(load, {1: [0, 1, 2, 3]})
    node.start_rank(part, 1)
    part.placements[1].exchange()
    first.end_write()
    first.exchange(want=0)
    assert first.state.joined
    assert first.error is None
    node.settle()
    assert (load.done, part.done) == ({0}, {1})
    assert [node.fetched[model, chunk] for chunk in range(4)] == [1, 1, 1, 1]
    report = node.ledger.report(load.load_id, "node", "host")
    assert (report.store_chunks, report.needed_chunks, report.cached_chunks) == (4, 7, 3)
    node.check_nothing_is_left()


def test_a_node_share_that_waits_for_slots_ends_with_its_load():
    node = NodeSimulation(5)
    load = node.add_load(SimModel((1, 2)), {0: [0, 1], 1: [0, 1]})
    part = node.add_part(load, {2: [0, 1]})
    assert not part.begun
    node.end_load(load)
    assert node.cache.reserve("another", 5)


def test_an_arena_that_is_too_small_is_refused_at_begin():
    node = NodeSimulation(4)
    with pytest.raises(ArenaTooSmall, match="fewer slots"):
        node.add_load(SimModel((1,)), {0: [0], 1: [0]})
    small = NodeLedger(ChunkCache(9), CHUNK_BYTES - 1)
    job = SimLoad("large", SimModel((1,)), {0: [0]}).job()
    with pytest.raises(ArenaTooSmall, match="published in chunks of 8 bytes"):
        small.begin(job, 0.0)
    assert small.processes() == set()


def test_a_load_without_chunks_is_complete_once_ranks_arrive():
    node = NodeSimulation(3)
    load = node.add_load(SimModel((1,)), {0: []})
    node.settle()
    assert load.done == {0}
    node.check_reports()


def test_the_heartbeat_lists_ranks_and_returns_records():
    node, (first, _) = node_with()
    beat = node.ledger.beat("node", "host", "0", 5.0, ["load-0", "never"])
    assert beat.records == {"load-0": b""}
    assert {(rank.rank, rank.pid, rank.silent_s) for rank in beat.ranks} == {
        (0, first.process.pid, 5.0),
        (1, first.process.pid + 1, 5.0),
    }
    assert not beat.loads[0].complete
    assert node.ledger.processes() == {rank.process for rank in node.ranks}


def test_messages_about_unknown_loads_are_answered():
    ledger = NodeLedger(ChunkCache(3), CHUNK_BYTES)
    me = ProcessId(1, 1)
    assert ledger.join(RankHello("x", 1, 0, 0, me), 0.0) is False
    assert ledger.exchange(RankUpdate("x", 1, 0, 0, me, 1), 0.0) == (Orders(rejoin=True), False)
    assert ledger.orders_for(RankUpdate("x", 1, 0, 0, me, 1), 0.0) == Orders(rejoin=True)
    ledger.rank_lost("x", 0, 1, 0.0)
    ledger.end("x", 0.0)
    with pytest.raises(LongshoreError, match="does not know"):
        ledger.report("x", "node", "host")


def test_a_failed_node_ends_all_its_loads():
    node, (first, _) = node_with()
    out_of_memory = ArenaTooSmall("shared memory ran out")
    node.ledger.fail_all(out_of_memory)
    first.exchange(want=1)
    assert first.error is out_of_memory


def test_a_hello_after_the_end_holds_no_slot():
    node, (first, _) = node_with(chunks=2)
    first.exchange(want=2)
    while first.leases:
        first.begin_write()
        first.end_write()
    first.exchange(want=0)
    node.give_up_rank(first.load, 1)
    node.end_load(first.load)
    late = RankHello(first.load.load_id, 1, 1, 1, ProcessId(999, 1), number=1)
    assert isinstance(node.ledger.join(late, node.now_s), LoadCancelled)
    node.kill(first)
    node.tick()
    assert node.cache.stats().in_use_slots == 0


def test_a_new_agent_takes_over_the_living_processes_of_groups() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living, dead = ProcessId.current(), ProcessId(ended.pid, 1)
    members = [
        GroupMember(f"hosted-{number}", "run", "s3://m", "r1", process)
        for number, process in enumerate((living, dead, living))
    ]
    ledger = NodeLedger(ChunkCache(9), CHUNK_BYTES)
    ledger.leave("hosted-2")  # before the agent received it
    ledger.take_members(members)
    assert ledger.beat("node", "host", "0", 0.0, ()).members == (members[0],)
    ledger.leave("hosted-0")
    assert not ledger.is_busy


def test_ranks_that_were_removed_leave_their_share():
    """A share that only had such ranks is ended alone; another one goes on with its other ranks."""
    node, (first, second) = node_with(chunks=2)
    node.settle()
    load = first.load
    part = node.add_part(load, {2: [0, 1]})
    node.start_rank(part, 2)
    node.settle()
    shares = (node.ledger.report(load.load_id, "node", "host", attempt) for attempt in (load.attempt, part.attempt))
    assert [(share.store_chunks, share.cached_chunks) for share in shares] == [(2, 0), (0, 2)]
    node.kill(part.placements[2])
    node.ledger.end(load.load_id, node.now_s, part.attempt)
    node.kill(second)
    job = load.job()
    fewer = replace(job, ranks=(0,), incarnations=(0,), done=frozenset({0}), min_slots=0, again=True)
    assert node.ledger.begin(fewer, node.now_s)
    beat = node.ledger.beat("node", "host", "0", node.now_s, ())
    assert [(rank.attempt, rank.rank, rank.done) for rank in beat.ranks] == [(load.attempt, 0, True)]
    assert [each.complete for each in beat.loads] == [True]
    assert first.error is None
    node.tick()
    assert node.cache.stats().in_use_slots == 0


def test_a_rank_that_reads_lets_go_of_its_slots_when_another_is_removed_from_its_share():
    """Its worker was replaced just before. Slots that nobody lets go of would have it killed, or be lost."""
    node, (first, second) = node_with(chunks=4)
    first.exchange(want=2)
    first.begin_write()
    first.end_write()
    first.exchange(want=1)
    assert (len(first.leases), node.cache.stats().committed_slots) == (2, 1)
    node.kill(second)
    fewer = replace(first.load.job(), ranks=(0,), incarnations=(0,))
    assert node.ledger.begin(fewer, node.now_s)
    assert node.cache.stats().quarantined_slots == 2
    first.exchange()
    first.say_hello()
    assert node.cache.stats().quarantined_slots == 0
    assert node.ledger.overdue(node.now_s + 100) == set()
    first.exchange(want=4)
    assert len(first.leases) == 3  # all but the chunk that it has read
    assert first.error is None
