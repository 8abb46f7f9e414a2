"""The decisions of a rank: nothing lost, nothing twice; what may start, what is worth a message, how it ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.node.chunk_sources import STORE
from actors.rank.state import HOLD_S, REPORT_S, FetchedChunk, Next, RankIdentity, RankState
from cluster.errors import LoadCancelled
from cluster.messages import (
    ARENA_READ,
    Commit,
    FetchFailure,
    JoinReply,
    LeaseOrder,
    Orders,
    RankHello,
    RankUpdate,
)
from cluster.scheduling.concurrency import START
from storage.errors import IntegrityError, Throttled
from storage.host.processes import ProcessId

SIZE_BYTES = 8  # of each chunk
HEARTBEAT_S = 1.0
ME = RankIdentity("load", 1, 0, 0, ProcessId(1, 1))


def facts(state: RankState) -> object:
    """Everything that a message or an event may change."""
    return (
        [*state.leases], {*state.begun}, {*state.closed}, dict(state.readable), {*state.copying}, {*state.placed},
        state.working, state.requests, state.batch, state.placed_bytes, state.joined, state.may_hold_slots,
        repr(state.results), state.throttles, state.fetch_time,
    )  # fmt: skip


class RankMachine(RuleBasedStateMachine):
    """A rank and an agent that leases and grants as it likes; messages and answers that are lost, late, repeated."""

    @initialize(
        chunks=st.integers(0, 10),
        needed=st.integers(0, 10),
        most=st.integers(1, 6),
        holds=st.booleans(),
        batch=st.booleans(),
    )
    def start(self, chunks: int, needed: int, most: int, holds: bool, batch: bool) -> None:
        self.chunks = chunks
        self.needed = range(min(needed, chunks))
        self.allowed = True  # readable chunks are not held back
        choose = self._choose if holds else None
        self.state = RankState(ME, len(self.needed), most, itertools.count(1), heartbeat_s=HEARTBEAT_S, choose=choose)
        self.batch = 4 if batch else 1
        self.now_s = 0.0
        self.ids = itertools.count()
        self.working: list[LeaseOrder] = []
        self.pausing: list[LeaseOrder] = []
        self.returning: list[LeaseOrder] = []
        self.copying: list[int] = []
        self.asked: RankUpdate | None = None
        self.arrived = False
        self.left = False
        # What the agent knows.
        self.open: dict[str, int] = {}
        self.granted: dict[int, int] = {}
        self.reported: set[int] = set()
        self.old: list[Callable[[], object]] = []  # events that have happened

    def _choose(self, chunks: Iterable[int], most: int) -> list[int]:
        return sorted(chunks)[:most] if self.allowed else []

    # -- fetching and placing

    @rule()
    def fetch_starts(self) -> None:
        before = self.state.may_fetch
        lease = self.state.next_lease(self.now_s)
        assert before == (lease is not None)
        if lease is not None:
            assert self.state.working <= self.state.requests
            self.working.append(lease)

    @rule(which=st.integers(0, 5), end=st.sampled_from(["commit", "commit", "at once", "failed", "returned"]))
    def fetch_ends(self, which: int, end: str) -> None:
        if self.working:
            lease = self.working.pop(which % len(self.working))
            commit = Commit(lease.lease_id, lease.chunk) if end in ("commit", "at once") else None
            failure = FetchFailure(lease.lease_id, lease.chunk, Throttled("slow"), 1) if end == "failed" else None
            placed_bytes = SIZE_BYTES if end == "at once" and lease.chunk in self.needed else 0
            result, now_s = FetchedChunk(lease.lease_id, commit, failure), self.now_s
            self._happens(lambda: self.state.fetch_ended(result, SIZE_BYTES, 0.1, now_s, placed_bytes))

    @rule(which=st.integers(0, 5))
    def fetch_pauses(self, which: int) -> None:
        if self.working:
            self.pausing.append(self.working.pop(which % len(self.working)))
            self.state.pause_begun("throttled", self.now_s)

    @rule(which=st.integers(0, 5))
    def pause_is_over(self, which: int) -> None:
        if self.pausing:
            self.returning.append(self.pausing.pop(which % len(self.pausing)))
            self.state.pause_over()

    @rule()
    def fetch_goes_on(self) -> None:
        if self.returning and (self.state.may_try or self.state.ends_tries(True)):
            self.working.append(self.returning.pop())
            self.state.pause_ended(self.now_s)

    @rule(most=st.integers(1, 4))
    def copies_start(self, most: int) -> None:
        if not self.copying:
            chunks = self.state.next_chunks(most, self.now_s)
            assert len(chunks) <= most
            assert all(self.granted.get(chunk, slot) == slot for chunk, slot in chunks)
            self.copying = [chunk for chunk, _ in chunks]

    @rule()
    def copies_end(self) -> None:
        sizes_bytes, now_s = dict.fromkeys(self.copying, SIZE_BYTES), self.now_s
        self.copying = []
        self._happens(lambda: self.state.chunks_placed(sizes_bytes, now_s))

    @rule(allowed=st.booleans())
    def chunks_are_held_back(self, allowed: bool) -> None:
        self.allowed = allowed

    @rule(seconds=st.sampled_from([0.01, REPORT_S, HOLD_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    # -- messages

    @precondition(lambda self: self.asked is None and not self.left)
    @rule(arrives=st.sampled_from([True, True, True, False]))
    def rank_sends(self, arrives: bool) -> None:
        if not self.state.joined:
            self._says_hello(arrives)
            return
        if self.state.finished and not self.state.draining:
            self.state.drain(self.now_s, finish=True)
        update = self.state.update(self.now_s, leaving=self.state.finished and self.state.drained)
        self.asked, self.arrived = update, arrives
        assert not self.state.results
        for chunk in update.placed:
            assert chunk not in self.state.readable, "its slot will be read"
            assert chunk not in self.state.copying, "its slot is being read"
        if arrives:
            for lease_id in update.lease_ids():
                del self.open[lease_id]  # fails for a lease that was reported twice
            for chunk in update.placed:
                self.granted.pop(chunk, None)
            self.reported |= {*update.placed, *(commit.chunk for commit in update.committed)}

    def _says_hello(self, arrives: bool) -> None:
        self.state.drain(self.now_s)
        assert not self.state.leases
        if not self.state.drained:
            return
        hello = self.state.hello()
        assert set(hello.placed) == self.state.placed
        assert set(hello.fetched.get(STORE, ())) == self.state.sources.keys()
        assert not self.state.results.fetched
        if arrives:
            self.open, self.granted = {}, {}
            self.reported |= {*hello.placed}
            reply, now_s = JoinReply("", batch=self.batch), self.now_s
            self._happens(lambda: self.state.welcomed(hello, reply, now_s))

    @precondition(lambda self: self.asked is not None)
    @rule(
        known=st.sampled_from([True, True, True, False]),
        lost=st.sampled_from([False, False, False, True]),
        leases=st.integers(0, 6),
        grants=st.integers(0, 3),
        closed=st.booleans(),
        requests=st.integers(0, 8),
    )
    def agent_answers(self, known: bool, lost: bool, leases: int, grants: int, closed: bool, requests: int) -> None:
        update, self.asked = self.asked, None
        assert update is not None
        if not self.arrived:
            answer: Orders | None = None
        elif not known:
            answer = Orders(rejoin=True)
        elif update.leaving:
            answer = Orders()
        else:
            given = []
            for _ in range(min(leases, update.want_leases) if self.chunks else 0):
                lease_id = f"lease-{next(self.ids)}"
                self.open[lease_id] = next(self.ids) % self.chunks  # perhaps one that the rank is fetching already
                given.append(LeaseOrder(lease_id, self.open[lease_id], 100, 60.0))
            outstanding = [chunk for chunk in self.needed if chunk not in self.reported | self.granted.keys()]
            readable = tuple((chunk, next(self.ids)) for chunk in outstanding[:grants])
            self.granted.update(readable)
            answer = Orders(tuple(given), readable, tuple(self.open)[:1] if closed else (), "slots", requests)
        received, now_s = None if lost else answer, self.now_s
        after = self.state.answered(update, received, now_s)
        self._is_old(lambda: self.state.answered(update, received, now_s))
        self.left = after is Next.LEFT
        assert not self.left or (self.arrived and update.leaving)

    @rule(which=st.integers(0, 50))
    def something_old_is_repeated(self, which: int) -> None:
        if self.old:
            before = facts(self.state)
            self.old[which % len(self.old)]()
            assert facts(self.state) == before

    def _happens(self, event: Callable[[], object]) -> None:
        event()
        self._is_old(event)

    def _is_old(self, event: Callable[[], object]) -> None:
        self.old = [*self.old[-20:], event]
        self.something_old_is_repeated(-1)

    # -- laws

    @invariant()
    def every_lease_and_every_grant_is_here(self) -> None:
        if hasattr(self, "state") and self.state.joined and self.asked is None:
            held = [*self.state.leases, *self.state.begun.values()]
            results = self.state.results
            ids = [*(lease.lease_id for lease in held), *(result.lease_id for result in results.fetched)]
            assert sorted(ids) == sorted(self.open)
            assert self.granted.keys() <= self.state.readable.keys() | self.state.copying | {*results.placed}

    @invariant()
    def each_chunk_counts_once(self) -> None:
        if hasattr(self, "state"):
            assert self.state.placed_bytes == SIZE_BYTES * len(self.state.placed)
            assert self.state.placed <= {*self.needed}

    def teardown(self) -> None:
        """Check that without further faults the rank leaves with everything and uses no slot."""
        if not hasattr(self, "state"):
            return
        self.allowed = True
        for _ in range(200):
            while self.pausing:
                self.pause_is_over(0)
            self.fetch_goes_on()
            self.fetch_starts()
            self.fetch_ends(0, "at once")
            self.time_passes(HOLD_S)  # chunks that were held back may be placed
            self.copies_start(4)
            self.copies_end()
            if self.asked is not None:
                self.agent_answers(True, False, 6, 3, False, 0)
            elif not self.left:
                self.rank_sends(True)
            if self.left:
                break
        assert self.left
        assert self.state.finished
        assert not self.state.may_hold_slots
        assert (self.open, self.granted) == ({}, {})
        assert self.reported >= {*self.needed}


TestRankMachine = RankMachine.TestCase
TestRankMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


# --- one thing at a time ----------------------------------------------------------------------------------------


def rank(needed: int = 40, *, batch: int = 8, **options: Any) -> RankState:
    """A rank that an agent knows."""
    state = RankState(ME, needed, 8, itertools.count(1), heartbeat_s=HEARTBEAT_S, **options)
    state.welcomed(state.hello(), JoinReply("", batch=batch), 0.0)
    return state


def exchange(state: RankState, orders: Orders, now_s: float = 0.0) -> RankUpdate:
    update = state.update(now_s)
    assert state.answered(update, orders, now_s) is Next.GO_ON
    return update


def leases(*chunks: int) -> tuple[LeaseOrder, ...]:
    return tuple(LeaseOrder(f"lease-{chunk}", chunk, chunk, 60.0) for chunk in chunks)


def fetch(state: RankState, now_s: float = 0.0, placed_bytes: int = 0, source: str = "") -> None:
    """One fetch, from its start to its end."""
    lease = state.next_lease(now_s)
    assert lease is not None
    result = FetchedChunk(lease.lease_id, Commit(lease.lease_id, lease.chunk, source=source))
    state.fetch_ended(result, SIZE_BYTES, 0.1, now_s, placed_bytes)


def test_requests_in_flight_are_those_that_the_agent_allows() -> None:
    state = rank()
    exchange(state, Orders(leases(*range(20))))
    for allowed in (START, 6, 8):
        while state.next_lease(0.0) is not None:
            pass
        assert state.working == allowed
        exchange(state, Orders(requests=6 if allowed == START else 64))
    assert (state.requests, state.peak_requests) == (8, 8)  # `most`


def test_a_chunk_out_of_memory_is_no_request_that_the_agent_measures() -> None:
    state = rank()
    exchange(state, Orders(leases(0, 1)))
    fetch(state, source=ARENA_READ)
    fetch(state)
    assert len(state.update(0.0).requests) == 1


def test_a_rank_has_spare_leases_while_it_asks_the_agent() -> None:
    state = rank(1)
    assert state.want_leases == START + 8
    exchange(state, Orders(leases(*range(5)), requests=8))
    assert state.want_leases == 8 + 8 - 5
    fetch(state, placed_bytes=SIZE_BYTES)
    assert state.finished
    assert state.want_leases == 0


def test_a_result_is_sent_at_once_only_while_a_place_is_free() -> None:
    state = rank()
    exchange(state, Orders(leases(*range(START + 2))))
    assert state.update_due_s == HEARTBEAT_S
    for _ in range(START - 1):
        state.next_lease(0.2)
    fetch(state, 0.3)
    assert state.update_due_s == 0.3 + REPORT_S  # others of the node may need it
    fetch(state, 0.31)
    assert state.update_due_s == 0.3 + REPORT_S
    fetch(state, 0.32)
    assert state.update_due_s == -math.inf  # a request is free, and no lease is left
    assert len(exchange(state, Orders(), 0.33).committed) == 3


def test_urgent_updates_are_sent_at_once() -> None:
    state = rank(batch=1)
    exchange(state, Orders(leases(*range(10))))
    for _ in range(START):
        assert state.update_due_s > 0
        fetch(state)
    assert state.update_due_s == -math.inf
    exchange(state, Orders(requests=5))
    assert state.update_due_s == -math.inf
    exchange(state, Orders())
    for _ in range(5):
        state.next_lease(0.0)
    assert state.update_due_s > 0
    state.pause_begun("throttled", 0.0)
    assert state.update_due_s == -math.inf
    assert state.update(0.0).throttled == state.throttles == 1


def test_an_idle_rank_lets_the_agent_hold_its_answer() -> None:
    state = rank()
    assert exchange(state, Orders(leases(1))).wait_s == HEARTBEAT_S
    assert exchange(state, Orders()).wait_s == 0


def test_a_pause_frees_its_place_and_takes_one_again() -> None:
    state = rank()
    exchange(state, Orders(leases(0, 1, 2), requests=1))
    assert state.next_lease(0.0) is not None
    assert state.next_lease(0.0) is None
    state.pause_begun("unavailable", 0.0)
    second = state.next_lease(0.0)
    assert second is not None
    state.pause_over()
    assert not state.may_try
    state.fetch_ended(FetchedChunk(second.lease_id), 0, 0.1, 0.0)
    assert not state.may_fetch  # the place is that of the fetch that comes back
    assert state.may_try


def test_a_drain_returns_unstarted_leases_and_ends_retries() -> None:
    state = rank()
    exchange(state, Orders(leases(0, 1, 2), requests=1))
    assert state.next_lease(0.0) is not None
    state.drain(0.0)
    assert [result.lease_id for result in state.results.fetched] == ["lease-1", "lease-2"]
    assert state.is_void("lease-0", True)
    assert not state.drained
    state.fetch_ended(FetchedChunk("lease-0"), 0, 0.1, 0.0)
    assert state.drained


def test_a_finished_rank_ends_started_reads_unless_abandoned() -> None:
    state = rank(1)
    exchange(state, Orders(leases(0, 1), requests=2))
    assert state.next_lease(0.0) is not None
    fetch(state, 0.0, SIZE_BYTES)
    state.drain(0.0, finish=True)
    assert state.update_due_s == HEARTBEAT_S
    assert state.is_void("lease-0", False)
    assert not state.is_void("lease-0", True)
    update = state.update(1.0)
    assert state.answered(update, Orders(stop=LoadCancelled("the load is over")), 1.0) is Next.GO_ON
    assert state.abandoned
    state.drain(1.0, finish=True)
    assert state.is_void("lease-0", True)


def test_a_finished_rank_says_hello_after_a_lost_message() -> None:
    """Only a hello repeats which chunks it has; an agent that goes on would wait for them for ever."""
    state = rank(2)
    exchange(state, Orders(readable=((0, 5), (1, 6))))
    state.next_chunks(2, 0.0)
    state.chunks_placed({0: SIZE_BYTES, 1: SIZE_BYTES}, 0.0)
    state.drain(0.0, finish=True)
    lost = state.update(0.0)
    assert state.answered(lost, None, 0.0) is Next.REJOIN
    state.drain(0.0)
    assert state.hello().placed == lost.placed == (0, 1)


def test_a_complete_rank_ends_well_unless_an_object_is_damaged() -> None:
    for stop, ends_well in ((LoadCancelled("over"), True), (IntegrityError("damaged"), False)):
        state = rank(0)
        state.drain(0.0, finish=True)
        update = state.update(0.0, leaving=True)
        if ends_well:
            assert state.answered(update, Orders(stop=stop), 0.0) is Next.LEFT
        else:
            with pytest.raises(IntegrityError):
                state.answered(update, Orders(stop=stop), 0.0)
        assert not state.may_hold_slots


def test_nothing_starts_after_a_stop() -> None:
    state = rank()
    exchange(state, Orders(leases(0, 1), ((7, 0),)))
    state.stop(LoadCancelled("now"))
    state.stop(LoadCancelled("later"))
    assert str(state.error) == "now"
    assert state.next_lease(0.0) is None
    assert state.next_chunks(8, 0.0) == []
    assert state.is_void("lease-0", True)
    assert state.update_due_s == -math.inf


def test_a_granted_slot_is_reported_free_only_after_its_copy() -> None:
    """The rank fetched the chunk too, and was faster: the agent would lease the slot to a writer."""
    state = rank()
    exchange(state, Orders(leases(3), ((3, 10), (4, 11))))
    assert state.next_chunks(1, 0.0) == [(3, 10)]
    fetch(state, 0.0, SIZE_BYTES)
    assert exchange(state, Orders()).placed == ()
    state.chunks_placed({3: SIZE_BYTES}, 0.0)
    assert exchange(state, Orders(leases(4))).placed == (3,)
    fetch(state, 0.0, SIZE_BYTES)  # before its copy starts: nobody copies it again
    assert state.next_chunks(8, 0.0) == []
    assert exchange(state, Orders(readable=((4, 12),))).placed == (4,)
    assert state.next_chunks(8, 0.0) == []
    assert exchange(state, Orders()).placed == (4,)
    assert state.placed_bytes == 2 * SIZE_BYTES


def test_a_new_rank_of_the_process_continues_its_message_numbers() -> None:
    numbers = itertools.count(1)
    messages: list[RankHello | RankUpdate] = []
    for _ in range(2):
        state = RankState(ME, 1, 8, numbers)
        messages += [state.hello(), state.update(0.0)]
    assert [message.number for message in messages] == [1, 2, 3, 4]


# --- held back --------------------------------------------------------------------------------------------------


def holding(*allowed: int) -> RankState:
    """Readable are 3, then 2; only `allowed` chunks may be placed."""
    state = rank(choose=lambda chunks, most: [chunk for chunk in chunks if chunk in allowed][:most])
    exchange(state, Orders(readable=((3, 0), (2, 1))))
    return state


def test_chunks_are_placed_in_the_order_in_which_they_came() -> None:
    state = rank()
    exchange(state, Orders(readable=((3, 0), (1, 1), (2, 2))))
    assert state.next_chunks(2, 0.0) == [(3, 0), (1, 1)]
    assert state.next_chunks(2, 0.0) == [(2, 2)]


def test_chosen_chunks_are_placed_in_the_order_of_the_choice() -> None:
    """Tensors that are converted begin in the plan's order, so that few have memory at a time."""
    state = holding(1, 2, 3)
    exchange(state, Orders(readable=((1, 2),)))
    state._choose = lambda chunks, most: sorted(chunks)[:most]
    assert state.next_chunks(2, 0.0) == [(1, 2), (2, 1)]
    assert state.next_chunks(2, 0.0) == [(3, 0)]


def test_held_chunks_wait_for_those_that_come() -> None:
    state = holding(1)
    assert state.next_chunks(8, 0.0) == []
    assert exchange(state, Orders(readable=((1, 2),))).wait_s == HEARTBEAT_S  # nothing goes on here
    assert state.next_chunks(8, 0.0) == [(1, 2)]
    assert len(state.readable) == 2


def test_first_held_chunk_goes_on_when_nothing_is_fetched() -> None:
    state = holding()
    assert state.next_chunks(8, 0.0) == []
    assert state.next_chunks(8, HOLD_S / 2) == []
    assert state.next_chunks(8, HOLD_S) == [(2, 1)]  # or slots that others need would be held for ever
    exchange(state, Orders(leases(1)))
    assert state.next_chunks(8, HOLD_S) == []
    assert state.next_chunks(8, 2 * HOLD_S) == []  # a fetch is under way
    lease = state.next_lease(2 * HOLD_S)
    assert lease is not None
    state.fetch_ended(FetchedChunk(lease.lease_id), 0, 0.0, 2.9 * HOLD_S)
    assert state.next_chunks(8, 3 * HOLD_S) == []  # there was one a moment ago
    assert state.next_chunks(8, 3.9 * HOLD_S) == [(3, 0)]


def test_a_drain_forgets_held_chunks() -> None:
    for looked in (True, False):
        state = holding()
        if looked:
            assert state.next_chunks(8, 0.0) == []
        state.drain(0.0)
        assert state.next_chunks(8, 0.0) == []
        assert state.drained
