"""The queue of one load on one node: order, failed chunks, ranks that come and go, and completion."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduling.lease_queue import ChunkState, LeaseQueue
from cluster.scheduling.retry import Fail, Retry
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Answer, CachedChunk
from storage.host.processes import ProcessId


def ids(*chunks: int) -> np.ndarray:
    return np.array(chunks, np.int64)


def commit(queue: LeaseQueue, chunk: int, rank: int = 0) -> tuple[int, ...]:
    queue.leased(chunk, rank)
    return queue.committed(chunk)


def test_a_rank_gets_its_own_chunks_first_and_then_helps():
    queue = LeaseQueue({0: ids(2, 3), 1: ids(0, 1, 3), 2: ids()})
    got = []
    for rank in (0, 0, 0, 2, 1):
        chunk = queue.next_for(rank)
        got.append(chunk)
        if chunk is not None:
            queue.leased(chunk, rank)
    assert got == [2, 3, 0, 1, None]


def test_a_rank_that_is_far_ahead_helps_before_it_continues():
    """Otherwise it would finish and leave, and the slow rank would have to fetch all that only it needs."""
    queue = LeaseQueue({0: np.arange(0, 200, 2), 1: np.arange(1, 200, 2)})
    got = []
    while (chunk := queue.next_for(1)) is not None:  # rank 0 is idle
        queue.leased(chunk, 1)
        got.append(chunk)
    assert sorted(got) == list(range(200))
    seen: set[int] = set()
    for chunk in got:
        behind = min(set(range(200)) - seen)
        assert chunk - behind <= 16 or chunk == behind
        seen.add(chunk)
    assert got[:4] == [1, 3, 5, 7]


def test_an_assigned_chunk_is_reserved_until_a_failure_or_loss():
    queue = LeaseQueue({0: ids(0, 1, 2), 1: ids(3)})
    queue.assign(0, ids(1, 2, 3))  # 3 is not its own
    queue.leased(3, 1)
    assert queue.next_for(1) == 0
    queue.leased(0, 1)
    assert queue.next_for(1) is None
    assert queue.next_for(0) == 1
    queue.leased(1, 0)
    queue.failed(1, 0, "unavailable")
    assert queue.next_for(1) == 1  # any rank may try now
    queue.leased(1, 1)
    assert queue.next_for(0) == 2
    queue.leased(2, 0)
    queue.requeue(2, None, "")
    assert queue.next_for(1) is None  # returned: still its own
    queue.rank_lost(0)
    assert queue.next_for(1) is None  # no rank needs it
    assert queue.restart_rank(0) == []
    assert queue.next_for(1) == 2
    queue.assign(0, ids(2))
    assert queue.next_for(1) is None
    assert queue.next_for(0) == 2


def test_chunks_are_leased_in_plan_order():
    queue = LeaseQueue({0: ids(1, 5), 1: ids(3, 5), 2: ids()}, ids(5, 3, 1))
    got = []
    for rank in (2, 0, 1):
        chunk = queue.next_for(rank)
        assert chunk is not None
        assert queue.next_for(rank) == chunk  # asking changes nothing
        queue.leased(chunk, rank)
        got.append(chunk)
    assert got == [5, 1, 3]
    assert queue.next_for(0) is None
    assert [queue.committed(chunk) for chunk in got] == [(0, 1), (0,), (1,)]


def test_the_load_is_complete_when_every_rank_has_all_chunks():
    queue = LeaseQueue({0: ids(1, 2), 1: ids(2)})
    for chunk in (1, 2):
        commit(queue, chunk)
    assert queue.placed(0, 1)
    assert not queue.placed(0, 1)  # reported twice
    assert not queue.placed(1, 1)  # never needed
    assert not queue.placed(1, 77)
    assert queue.placed(1, 2)
    assert queue.outstanding(0) == [2]
    assert (queue.left(0), queue.left(1)) == (1, 0)
    assert queue.chunks() == [1, 2]
    assert not queue.complete
    assert queue.placed(0, 2)
    assert queue.complete
    assert queue.state(1) is ChunkState.DONE


def test_an_order_must_contain_every_needed_chunk():
    with pytest.raises(ValueError, match="order"):
        LeaseQueue({0: ids(1, 2)}, ids(1))
    assert LeaseQueue({0: ids(2)}, ids(3, 2, 1)).pending() == [2]
    assert LeaseQueue({}).complete
    assert LeaseQueue({0: ids()}).complete


def test_leasing_a_present_chunk_is_a_bug():
    queue = LeaseQueue({0: ids(1)})
    commit(queue, 1)
    with pytest.raises(ValueError, match="committed"):
        queue.leased(1, 0)


def test_a_failed_chunk_goes_to_another_rank_then_to_anyone():
    queue = LeaseQueue({0: ids(1, 2), 1: ids(1, 2)})
    queue.leased(1, 0)
    assert isinstance(queue.failed(1, 0, "digest_mismatch"), Retry)
    assert queue.next_for(0) == 2
    assert queue.next_for(1) == 1
    queue.leased(1, 1)
    assert isinstance(queue.failed(1, 1, "unavailable"), Retry)
    assert (queue.next_for(0), queue.next_for(1)) == (1, 1)
    assert queue.failures(1) == ((0, "digest_mismatch"), (1, "unavailable"))
    assert queue.failures(2) == ()


def test_no_rank_waits_for_a_lost_or_finished_rank():
    queue = LeaseQueue({0: ids(1), 1: ids(1)})
    queue.leased(1, 0)
    queue.failed(1, 0, "unavailable")
    assert queue.next_for(0) is None
    queue.rank_lost(1)
    assert queue.next_for(0) == 1
    other = LeaseQueue({0: ids(1, 2), 1: ids(2)})
    other.leased(1, 0)
    other.failed(1, 0, "unavailable")
    commit(other, 2)
    assert other.next_for(0) is None
    other.placed(1, 2)
    assert other.next_for(0) == 1
    assert other.next_for(1) == 1


def test_a_retry_waits_for_its_delay():
    queue = LeaseQueue({0: ids(1, 2)})
    queue.leased(1, 0)
    decision = queue.failed(1, 0, "throttled", now_s=100.0, fraction=0.5)
    assert decision == Retry(0.25)
    assert queue.next_for(0, 100.2) == 2
    assert queue.next_for(0, 100.25) == 1


def test_used_up_budgets_end_in_fail():
    queue = LeaseQueue({0: ids(1, 2, 3)})
    queue.leased(1, 0)
    assert isinstance(queue.failed(1, 0, "not_found", 3), Fail)
    for number in range(3):
        queue.leased(2, 0)
        assert isinstance(queue.failed(2, 0, "unavailable", 3), Fail if number == 2 else Retry)
    for number in range(5):
        queue.leased(3, 0)
        assert isinstance(queue.requeue(3, 0, "lease_expired"), Fail if number == 4 else Retry)


def test_a_returned_lease_counts_as_no_failure():
    queue = LeaseQueue({0: ids(1)})
    for _ in range(50):
        queue.leased(1, 0)
        assert queue.requeue(1, None, "") == Retry(0.0)
    assert queue.next_for(0) == 1
    assert queue.failures(1) == ()


def test_a_hedged_chunk_is_leased_until_the_last_lease_ends():
    queue = LeaseQueue({0: ids(1), 1: ids(1)})
    queue.leased(1, 0)
    queue.leased(1, 1)
    queue.failed(1, 0, "unavailable")
    assert queue.state(1) is ChunkState.LEASED
    assert queue.committed(1) == (0, 1)
    queue.failed(1, 1, "unavailable")  # the slower one, too late to matter
    assert queue.state(1) is ChunkState.COMMITTED


def test_a_rank_waits_for_chunks_that_others_fetch():
    queue = LeaseQueue({0: ids(1, 2, 3)})
    queue.wait_for(1, "k")
    queue.wait_for(2, "k")
    assert queue.next_for(0) == 3
    assert queue.waiting_for(["other"]) == []
    assert queue.waiting_for(["k", "k"]) == [1, 2]
    assert queue.next_for(0) == 1


def test_evicted_chunks_are_refetched_only_if_needed():
    queue = LeaseQueue({0: ids(1, 2)})
    for chunk in (1, 2):
        commit(queue, chunk)
    queue.placed(0, 1)
    queue.evicted(1)
    queue.evicted(2)
    assert queue.pending() == [2]


def test_a_restarted_rank_gets_everything_again():
    queue = LeaseQueue({0: ids(1, 2, 3), 1: ids(2, 3)})
    for chunk in (1, 2, 3):
        commit(queue, chunk)
    for rank, chunk in ((0, 1), (0, 2), (1, 2)):
        queue.placed(rank, chunk)
    queue.rank_lost(0)
    queue.rank_lost(0)
    assert queue.needing(3) == (1,)
    assert not queue.placed(0, 3)
    assert not queue.complete
    assert queue.restart_rank(0) == [3]  # in the arena for rank 1's sake
    assert queue.outstanding(0) == [1, 2, 3]
    assert queue.pending() == [1, 2]
    assert queue.outstanding(1) == [3]


def test_nothing_is_fetched_for_an_absent_rank():
    queue = LeaseQueue({0: ids(1), 1: ids(2)})
    queue.rank_lost(1)
    assert queue.pending() == [1]
    assert queue.restart_rank(1) == []
    assert queue.pending() == [1, 2]


# --- a whole node, in small steps and any order ---


class Node:
    """Cache, queue and ranks of one load, driven at random; slots are never fewer than the load's minimum."""

    def __init__(self, needs: dict[int, np.ndarray], slot_count: int, seed: int) -> None:
        self.queue = LeaseQueue(needs)
        self.cache = ChunkCache(slot_count)
        assert self.cache.reserve("load", slot_count)
        self.random = random.Random(seed)
        self.processes = {rank: ProcessId(rank + 1, 0) for rank in needs}
        self.leases: dict[int, dict[str, int]] = {rank: {} for rank in needs}
        self.readable: dict[int, dict[int, CachedChunk]] = {rank: {} for rank in needs}
        self.placed: dict[int, set[int]] = {rank: set() for rank in needs}
        self.fetched = 0
        self.now_s = 0.0

    def key(self, chunk: int) -> bytes:
        return chunk.to_bytes(32, "little")

    def ask(self, rank: int) -> None:
        chunk = self.queue.next_for(rank, self.now_s)
        if chunk is None:
            return
        cached = self.cache.lookup(self.key(chunk))
        if cached is not None:
            self.tell(chunk, cached, self.queue.committed(chunk))
            return
        lease = self.cache.lease(self.key(chunk), self.processes[rank], self.now_s + 100, owner="load")
        if lease is not None:
            self.queue.leased(chunk, rank)
            self.leases[rank][lease.lease_id] = chunk

    def tell(self, chunk: int, cached: CachedChunk, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            assert self.cache.pin(cached, rank, owner="load")
            assert self.cache.hold(cached, self.processes[rank], rank, owner="load")
            self.readable[rank][chunk] = cached

    def fetch(self, rank: int, *, fails: bool) -> None:
        if not self.leases[rank]:
            return
        lease_id, chunk = self.leases[rank].popitem()
        if fails:
            self.cache.abandon(lease_id)
            self.queue.failed(chunk, rank, "unavailable", now_s=self.now_s, fraction=self.random.random())
            return
        answer = self.cache.commit(lease_id, 1)
        assert answer is Answer.DONE
        self.fetched += 1
        cached = self.cache.lookup(self.key(chunk))
        assert cached is not None
        self.tell(chunk, cached, self.queue.committed(chunk))

    def place(self, rank: int) -> None:
        if self.readable[rank]:
            chunk, cached = self.readable[rank].popitem()
            assert self.queue.placed(rank, chunk)
            assert self.cache.release(cached, self.processes[rank], rank)
            assert self.cache.unpin(cached, rank)
            self.placed[rank].add(chunk)

    def die(self, rank: int) -> None:
        for cached in self.readable[rank].values():
            assert self.cache.unpin(cached, rank)
        self.queue.rank_lost(rank)
        for lease in self.cache.process_dead(self.processes[rank]):
            self.queue.requeue(self.leases[rank][lease.lease_id], rank, "worker_died", now_s=self.now_s)
        self.leases[rank], self.readable[rank], self.placed[rank] = {}, {}, set()
        self.processes[rank] = ProcessId(rank + 1, self.processes[rank].start_time + 1)
        for chunk in self.queue.restart_rank(rank):
            cached = self.cache.lookup(self.key(chunk))
            assert cached is not None  # another rank's pin kept it
            self.tell(chunk, cached, (rank,))


needs_of_ranks = st.lists(st.sets(st.integers(0, 25)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    needs_of_ranks,
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 3),
)
def test_every_node_ends_with_everything_placed(sets, slot_count, seed, failing, deaths):
    """One slot is enough; without failures no needed chunk is fetched twice."""
    needs = {rank: np.array(sorted(chunks), np.int64) for rank, chunks in enumerate(sets)}
    node = Node(needs, slot_count, seed)
    steps = 0
    while not node.queue.complete:
        steps += 1
        assert steps < 100_000, "no progress"
        node.now_s += 0.01
        rank = node.random.randrange(len(sets))
        action = node.random.randrange(4)
        if action == 0:
            node.ask(rank)
        elif action == 1:
            node.fetch(rank, fails=node.random.random() < failing)
        elif action == 2:
            node.place(rank)
        elif deaths and node.random.random() < 0.02:
            deaths -= 1
            failing = 0.1
            node.die(rank)
    assert node.placed == dict(enumerate(sets))
    if not failing:
        assert node.fetched == len(set().union(*sets))
