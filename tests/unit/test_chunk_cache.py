"""The laws of the chunk cache, on a model of a node, and cases that deserve a name."""

from __future__ import annotations

import pytest

from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Answer, Lease, MemoryJournal, SlotRecord, SlotState
from storage.errors import ArenaTooSmall
from storage.host.processes import ProcessId

W1, W2 = ProcessId(1, 1), ProcessId(2, 1)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(cache: ChunkCache, number: int, owner: object = None) -> int:
    """Commit chunk `number` and return its slot."""
    lease = cache.lease(key(number), W1, 10, owner=owner)
    assert lease is not None
    assert cache.commit(lease.lease_id, 1)
    return lease.slot


def test_the_least_recently_used_chunk_is_evicted():
    cache = ChunkCache(3)
    for number in (1, 2, 3):
        put(cache, number)
    assert cache.lookup(key(1))
    lease = cache.lease(key(4), W1, 10)
    assert lease is not None
    assert lease.evicted_key == key(2)
    assert [number for number in (1, 2, 3, 4) if key(number) in cache] == [1, 3]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.committed, stats.evicted) == (1, 0, 3, 1)
    assert cache.lookup(key(2)) is None
    assert cache.stats().misses == 1


def test_unpinning_a_chunk_makes_it_most_recently_used():
    cache = ChunkCache(2)
    put(cache, 1)
    chunk = cache.lookup(key(1))
    assert chunk is not None
    assert cache.pin(chunk, "rank 0")
    put(cache, 2)
    assert cache.unpin(chunk, "rank 0")
    put(cache, 3)
    assert key(1) in cache
    assert key(2) not in cache


def test_an_unpinned_slot_becomes_available():
    cache = ChunkCache(1)
    lease = cache.lease(key(1), W1, 10)
    assert lease is not None
    assert cache.lease(key(2), W2, 10) is None
    assert cache.commit(lease.lease_id, 5, ["rank 0", "rank 1"])
    chunk = cache.lookup(key(1))
    assert chunk is not None
    assert cache.lease(key(2), W2, 10) is None
    assert cache.unpin(chunk, "rank 0")
    assert cache.lease(key(2), W2, 10) is None
    assert cache.unpin(chunk, "rank 1")
    assert cache.lease(key(2), W2, 10) is not None


def test_a_dead_ranks_pins_last_until_it_cannot_be_reading():
    cache = ChunkCache(1)
    put(cache, 1)
    chunk = cache.lookup(key(1))
    assert chunk is not None
    assert cache.pin(chunk, ("load", 0, 3))
    assert cache.hold(chunk, W2, ("load", 0, 3))
    assert cache.processes() == {W2}
    assert cache.unpin(chunk, ("load", 0, 3))
    assert cache.lease(key(2), W1, 10) is None
    assert cache.process_dead(W2) == []
    assert cache.lease(key(2), W1, 10) is not None


def test_a_late_release_does_not_unpin_the_slots_next_chunk():
    cache = ChunkCache(1)
    put(cache, 1)
    first = cache.lookup(key(1))
    assert first is not None
    assert cache.hold(first, W1, "rank")
    assert cache.release(first, W1, "rank")
    put(cache, 2)
    second = cache.lookup(key(2))
    assert second is not None
    assert cache.hold(second, W1, "rank")
    assert not cache.release(first, W1, "rank")
    assert not cache.pin(first, "rank")
    assert cache.lease(key(3), W1, 10) is None


def test_a_hedge_gets_its_own_slot_and_the_slower_is_a_duplicate():
    cache = ChunkCache(2)
    slow, fast = cache.lease(key(1), W1, 10), cache.lease(key(1), W2, 10)
    assert slow is not None
    assert fast is not None
    assert slow.slot != fast.slot
    assert len(cache.in_flight(key(1))) == 2
    assert cache.commit(fast.lease_id, 5)
    assert cache.commit(slow.lease_id, 5) is Answer.DUPLICATE
    assert cache.commit(slow.lease_id, 5) is Answer.LATE
    assert cache.commit(fast.lease_id, 5) is Answer.REPEATED
    assert cache.abandon(fast.lease_id) is Answer.LATE
    assert cache.stats().free_slots == 1
    assert cache.in_flight(key(1)) == ()


def test_an_expired_lease_frees_its_chunk_but_not_its_slot():
    cache = ChunkCache(2)
    late = cache.lease(key(1), W1, 10)
    assert late is not None
    assert cache.expire(9.9) == []
    assert cache.expire(10) == [late]
    assert cache.expire(10) == []
    assert cache.in_flight(key(1)) == ()
    again = cache.lease(key(1), W2, 20)
    assert again is not None
    assert again.slot != late.slot
    assert cache.commit(late.lease_id, 5) is Answer.LATE
    assert key(1) not in cache
    assert cache.overdue(12, 5) == []
    assert cache.overdue(15, 5) == [late]
    assert cache.abandon(late.lease_id)
    assert cache.abandon(late.lease_id) is Answer.REPEATED
    assert cache.overdue(15, 5) == []


def test_a_minimum_is_reserved_and_larger_loads_wait():
    cache = ChunkCache(4)
    with pytest.raises(ArenaTooSmall, match="LONGSHORE_ARENA_BYTES"):
        cache.reserve("huge", 5)
    assert cache.reserve("old", 1)
    held = [cache.lease(key(number), W1, 10, owner="old") for number in range(4)]
    assert None not in held
    assert not cache.reserve("new", 2)  # all slots are in use
    assert not cache.reserve("newer", 1)  # and the first to ask comes first
    for lease in held[:3]:
        assert lease is not None
        cache.abandon(lease.lease_id)
        # Above its minimum the old load gets nothing more while another waits for its own.
        assert cache.lease(key(9), W1, 10, owner="old") is None
    assert cache.reserve("new", 2)
    assert cache.reserve("newer", 1)
    assert cache.lease(key(9), W1, 10, owner="old") is None
    assert cache.lease(key(5), W1, 10, owner="new")
    assert cache.lease(key(6), W1, 10, owner="newer")
    assert cache.lease(key(7), W1, 10, owner="new")
    assert cache.lease(key(8), W1, 10, owner="new") is None


def test_shared_slots_go_to_the_oldest_waiting_load():
    cache = ChunkCache(4)
    assert cache.reserve("old", 1)
    assert cache.reserve("young", 1)
    taken = [cache.lease(key(number), W1, 10, owner="young") for number in range(3)]
    assert cache.lease(key(4), W1, 10, owner="old")
    assert cache.lease(key(5), W1, 10, owner="old") is None
    assert taken[0] is not None
    cache.abandon(taken[0].lease_id)
    assert cache.lease(key(6), W1, 10, owner="young") is None
    assert cache.lease(key(6), W1, 10, owner="nobody in particular") is None
    assert cache.lease(key(5), W1, 10, owner="old")


def test_a_refused_load_that_ended_blocks_no_other():
    cache = ChunkCache(2)
    assert cache.reserve("old", 1)
    assert cache.reserve("young", 0)
    taken = [cache.lease(key(number), W1, 10, owner="old") for number in range(2)]
    assert cache.lease(key(3), W1, 10, owner="old") is None
    assert len(cache.end_owner("old", 0)) == 2
    for lease in taken:
        assert lease is not None
        assert cache.abandon(lease.lease_id)
    assert cache.lease(key(3), W1, 10, owner="young")


def test_slots_are_used_as_they_become_ready():
    cache = ChunkCache(2, ready_slots=0)
    assert cache.lease(key(1), W1, 10) is None
    cache.add_ready(1)
    lease = cache.lease(key(1), W1, 10)
    assert lease is not None
    assert lease.slot == 0
    assert cache.lease(key(2), W1, 10) is None
    cache.add_ready(2)
    cache.add_ready(1)
    assert cache.lease(key(2), W1, 10) is not None
    assert cache.stats().ready_slots == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_leases_of_programs_of_users_stay_known_as_such(restarts: bool):
    """Also those of kept slots, and after a restart: the agent kills no such program."""
    journal = MemoryJournal(4)
    cache = ChunkCache(4, window_slots=2, journal=journal)
    cache.may_grow = True
    for number, may_kill in enumerate([True, False]):
        assert cache.lease(key(number), (W1, W2)[number], 10, keep=True, may_kill=may_kill) is not None
    if restarts:
        cache = ChunkCache(4, window_slots=2, journal=journal)
        cache.restore([W1, W2], 10)
    else:
        cache.expire(10)
    found = cache.overdue(20, 5)
    assert len(found) == 4
    assert all(lease.may_kill is (lease.holder == W1) for lease in found)


def test_leases_of_another_arena_or_restart_are_recognised():
    journal = MemoryJournal(1)
    before = ChunkCache(1, journal=journal)
    old = before.lease(key(1), W1, 10)
    assert old is not None
    after = ChunkCache(1, journal=journal)
    assert after.restore([W1], 5) == [after.overdue(5, 0)[0]]
    assert after.commit(old.lease_id, 5) is Answer.LATE
    assert after.abandon(old.lease_id)
    new = after.lease(key(1), W1, 10)
    assert new is not None
    assert new.lease_id != old.lease_id
    assert after.commit(old.lease_id, 5) is Answer.LATE
    assert ChunkCache(1).commit(new.lease_id, 5) is Answer.UNKNOWN


def keeping_cache(kept_slots: int = 1) -> ChunkCache:
    return ChunkCache(4 + kept_slots, window_slots=4)


def keep(cache: ChunkCache, number: int, *, copied: bool = True) -> Lease:
    """Fetch a chunk that nobody needs any more, and keep it."""
    lease = cache.lease(key(number), W1, 10, keep=True)
    assert lease is not None
    assert cache.commit(lease.lease_id, 5, kept=copied)
    return lease


def test_a_kept_chunk_leaves_the_window_at_once():
    cache = keeping_cache()
    keep(cache, 1)
    assert (cache.in_window(key(1)), key(1) in cache, cache.stats().free_slots) == (False, True, 4)


def test_a_chunk_that_was_not_copied_is_not_kept():
    cache = keeping_cache()
    keep(cache, 1, copied=False)
    assert cache.kept(key(1)) is None
    assert cache.in_window(key(1))
    assert keep(cache, 2).keep is not None


def test_a_kept_chunk_stays_while_a_lease_reads_it():
    cache = keeping_cache()
    keep(cache, 1)
    reading = cache.lease(key(1), W1, 10)
    assert reading is not None
    assert reading.read == cache.kept(key(1))
    assert cache.revoke(reading.lease_id, 0)  # its holder may still be reading
    other = cache.lease(key(2), W1, 10, keep=True)
    assert other is not None
    assert other.keep is None
    assert cache.shrink(ProcessId(1, 1)) is None
    assert cache.abandon(reading.lease_id)
    assert keep(cache, 3).keep is not None
    assert cache.kept(key(1)) is None


def test_a_kept_slot_is_fenced_with_its_lease():
    cache = keeping_cache()
    lease = cache.lease(key(1), W1, 10, keep=True)
    assert lease is not None
    assert cache.expire(10) == [lease]
    other = cache.lease(key(2), W1, 20, keep=True)
    assert other is not None
    assert other.keep is None
    assert cache.commit(lease.lease_id, 5, kept=True) is Answer.LATE
    assert cache.kept(key(1)) is None
    assert cache.process_dead(W1) == [other]
    assert keep(cache, 1).keep is not None


def test_no_memory_is_taken_while_it_may_not_grow():
    cache = keeping_cache(2)
    cache.may_grow = False
    assert keep(cache, 3).keep is None
    cache.may_grow = True
    keep(cache, 1)
    cache.may_grow = False
    keep(cache, 2)  # in the memory of the first, which is evicted
    assert (cache.kept(key(1)), cache.kept(key(2)) is None) == (None, False)


def test_memory_that_was_given_back_is_used_last():
    cache = keeping_cache(2)
    keep(cache, 1)
    keep(cache, 2)
    agent = ProcessId(1, 1)
    lease = cache.shrink(agent)
    assert lease is not None
    assert (cache.kept(key(1)), cache.reclaimable_slots) == (None, 1)
    cache.shrunk(lease)
    assert keep(cache, 3).keep.slot == lease.slot
    assert cache.reclaimable_slots == 2


def test_restoring_twice_or_late_is_refused():
    cache = ChunkCache(1)
    put(cache, 1)
    with pytest.raises(ValueError, match="before any slot"):
        cache.restore([], 0)


def test_a_chunk_recorded_twice_is_restored_once():
    journal = MemoryJournal(2)
    for slot in (0, 1):
        journal.write_record(slot, SlotRecord(SlotState.COMMITTED, 4, 5, key(1)))
    cache = ChunkCache(2, journal=journal, ready_slots=0)
    assert cache.restore([], 0) == []
    stats = cache.stats()
    assert (stats.committed_slots, stats.free_slots, stats.ready_slots) == (1, 1, 2)


def test_unknown_chunks_and_leases_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ChunkCache(0)
    cache = ChunkCache(1)
    put(cache, 1)
    chunk = cache.lookup(key(1))
    assert chunk is not None
    with pytest.raises(KeyError):
        cache.shares.drop("nobody", 0)
    assert not cache.unpin(chunk, "nobody")
    assert not cache.release(chunk, W1, "nobody")
