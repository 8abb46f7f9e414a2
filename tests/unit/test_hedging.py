"""A chunk whose fetch is far slower than its peers is hedged: when, by which rank, and the fate of the slots."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.fit.needs import min_slots
from cluster.messages import LeaseOrder
from cluster.scheduling.concurrency import ENOUGH, Hedges
from storage.errors import StoreUnavailable
from tests.support.node_simulation import DEADLINE_S, NodeSimulation, SimModel, SimRank

AFTER_S = 1.0
CHUNKS = 10

# --- when ---------------------------------------------------------------------------------------------------------


def watching(took_s: float, *, fetches: int = ENOUGH, factor: float = 3.0, after_s: float = 1.0) -> Hedges:
    hedges = Hedges(factor, after_s)
    for number in range(fetches):
        hedges.begun(f"done-{number}", -1 - number, 0.0)
        hedges.ended(f"done-{number}", took_s, brought=True)
    return hedges


@given(took_s=st.floats(0.01, 100), factor=st.floats(0.5, 10), after_s=st.floats(0, 10), age_s=st.floats(0, 1000))
def test_a_fetch_is_due_when_far_older_than_usual(took_s: float, factor: float, after_s: float, age_s: float) -> None:
    hedges = watching(took_s, factor=factor, after_s=after_s)
    hedges.begun("slow", 7, 0.0)
    assert (hedges.due(age_s) == 7) == (age_s >= max(after_s, factor * took_s))


@given(starts=st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_oldest_is_first_and_each_chunk_is_due_once(starts: list[float]) -> None:
    hedges = watching(0.1)
    order = sorted(range(len(starts)), key=lambda chunk: starts[chunk])
    for chunk in order:
        hedges.begun(f"first-{chunk}", chunk, starts[chunk])
    due = []
    while (chunk := hedges.due(1000.0)) is not None:
        due.append(chunk)
        hedges.begun(f"second-{chunk}", chunk, 1000.0, second=True)
    assert due == order
    assert hedges.count == len(starts)
    for chunk in order:  # both are abandoned, and the fetch restarts: it was hedged already
        hedges.ended(f"first-{chunk}", 1001.0)
        hedges.ended(f"second-{chunk}", 1001.0)
        hedges.begun(f"third-{chunk}", chunk, 1001.0)
    assert hedges.due(10_000.0) is None
    assert hedges.won == 0


def test_nothing_is_due_without_a_median_or_when_off() -> None:
    for hedges in (watching(0.1, fetches=ENOUGH - 1), watching(0.1, factor=0.0)):
        hedges.begun("slow", 7, 0.0)
        assert hedges.due(1e9) is None
    failing = Hedges(3.0, 1.0)
    for number in range(100):  # a failed fetch says nothing about the time of a chunk
        failing.begun(str(number), number, 0.0)
        failing.ended(str(number), 0.1)
    failing.begun("slow", 7, 0.0)
    assert failing.due(1e9) is None


# --- on a node ------------------------------------------------------------------------------------------------------


def stalled(ranks: int = 2, chunks: int = CHUNKS) -> tuple[NodeSimulation, list[SimRank], LeaseOrder]:
    """Return a node where rank 0 holds a lease that it does not end, and all other chunks are there."""
    node = NodeSimulation(chunks + min_slots(ranks), hedge_after_s=AFTER_S)
    load = node.add_load(SimModel(tuple(range(chunks))), {rank: list(range(chunks)) for rank in range(ranks)})
    for rank in range(ranks):
        node.start_rank(load, rank)
        load.placements[rank].say_hello()
    first = load.placements[0]
    first.exchange(want=1)
    first.begin_write()
    slow = first.leases[0]
    helper = load.placements[ranks - 1]
    for _ in range(chunks):
        helper.exchange(want=1)
        for lease in list(helper.leases):
            if lease.chunk != slow.chunk:
                helper.begin_write()
                helper.end_write(index=len(helper.state.begun) - 1)
        node.time_passes(0.01)
    helper.exchange(want=0)
    return node, [load.placements[rank] for rank in range(ranks)], slow


def hedge(node: NodeSimulation, rank: SimRank, slow: LeaseOrder) -> LeaseOrder:
    """Return the rank's second lease on the chunk."""
    rank.exchange(want=3)
    assert [lease for lease in rank.leases if lease != slow] == []  # not yet
    node.time_passes(AFTER_S)
    rank.exchange(want=3)
    (second,) = [lease for lease in rank.leases if lease != slow]
    assert second.chunk == slow.chunk
    assert second.slot != slow.slot
    node.check_leases()
    return second


def test_the_second_fetch_wins_and_the_first_is_closed():
    node, (first, other), slow = stalled()
    hedge(node, other, slow)
    other.begin_write()
    other.end_write()
    other.exchange(want=3)
    assert (slow.chunk, slow.slot) not in other.readable
    assert node.cache.stats().quarantined_slots == 1  # the first may still be writing there
    first.exchange(want=0)
    assert first.state.closed == {slow.lease_id}
    assert first.leases == [slow]  # it is still writing
    node.time_passes(2 * DEADLINE_S)
    node.tick()
    assert first.alive  # fenced, but no reason to kill it before its deadline and the grace have passed
    before = node.ledger.report("load-0", "node", "host")
    first.end_write()  # it had all the bytes, in vain
    first.exchange(want=0)
    assert node.cache.stats().quarantined_slots == 0
    after = node.ledger.report("load-0", "node", "host")
    assert (before.store_chunks, before.store_bytes) == (after.store_chunks, after.store_bytes)
    node.settle()
    report = node.ledger.report("load-0", "node", "host")
    assert (report.hedges, report.hedges_won, report.retries, report.refetched_chunks) == (1, 1, {}, 0)
    node.check_reports()
    node.check_nothing_is_left()


def test_the_first_fetch_wins_and_the_second_is_closed():
    node, (first, other), slow = stalled()
    second = hedge(node, other, slow)
    other.begin_write()
    first.end_write()
    first.exchange(want=0)
    other.exchange(want=0)
    assert other.state.closed == {second.lease_id}
    other.end_write(StoreUnavailable("its connection was closed"))
    node.settle()
    report = node.ledger.report("load-0", "node", "host")
    assert (report.hedges, report.hedges_won, report.retries) == (1, 0, {})
    node.check_reports()
    node.check_nothing_is_left()


def test_a_single_rank_hedges_itself():
    node, (only,), slow = stalled(ranks=1)
    second = hedge(node, only, slow)
    only.begin_write()
    assert only.state.begun.keys() == {slow.lease_id, second.lease_id}
    only.end_write(index=list(only.state.begun).index(second.lease_id))
    only.exchange(want=3)
    assert only.state.closed == {slow.lease_id}
    node.settle()
    node.check_reports()
    node.check_nothing_is_left()


def test_both_fetches_may_end_in_one_message():
    node, (only,), slow = stalled(ranks=1)
    hedge(node, only, slow)
    only.begin_write()
    only.end_write()
    only.end_write()
    only.exchange(want=3)
    assert node.ledger.report("load-0", "node", "host").store_chunks == CHUNKS
    assert node.cache.stats().leased_slots == node.cache.stats().quarantined_slots == 0
    node.settle()
    node.check_reports()
    node.check_nothing_is_left()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_of_two_fetches_fails_and_the_other_continues(failing: int):
    node, (first, other), slow = stalled()
    hedge(node, other, slow)
    other.begin_write()
    ranks = [first, other]
    ranks[failing].end_write(StoreUnavailable("reset"))
    ranks[failing].exchange(want=3)
    assert not ranks[failing].leases  # the chunk is not pending: it is being fetched
    ranks[1 - failing].end_write()
    node.settle()
    assert node.fetched[first.load.model, slow.chunk] == 1
    node.check_reports()
    node.check_nothing_is_left()


def test_a_chunk_is_hedged_once():
    node, (_, other), slow = stalled()
    hedge(node, other, slow)
    node.time_passes(5 * AFTER_S)
    other.exchange(want=3)
    assert len(other.leases) == 1
    node.check_leases()


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 4), chunks=st.integers(12, 40), held=st.integers(1, 3), seed=st.integers(0, 999))
def test_a_rank_that_hangs_does_not_delay_the_others(ranks: int, chunks: int, held: int, seed: int) -> None:
    """The others fetch a second time whatever it has leased. Its waking up changes nothing."""
    chance = random.Random(seed)
    node = NodeSimulation(chunks + held + min_slots(ranks), hedge_after_s=0.1)
    load = node.add_load(SimModel(tuple(range(chunks))), {rank: list(range(chunks)) for rank in range(ranks)})
    for rank in range(ranks):
        node.start_rank(load, rank)
        load.placements[rank].say_hello()
    hangs, *others = (load.placements[rank] for rank in range(ranks))
    hangs.exchange(want=held)
    for _ in range(chance.randrange(held + 1)):
        hangs.begin_write()
    hangs.asleep = True
    while not all(rank.finished for rank in others):
        for rank in others:
            node.take_turn(rank)
        node.check_leases()
        node.time_passes(0.05)
        assert node.now_s < DEADLINE_S
    hangs.asleep = False
    node.settle()
    report = node.ledger.report("load-0", "node", "host")
    assert (report.hedges, report.retries) == (held, {})
    node.check_reports()
    node.check_nothing_is_left()
