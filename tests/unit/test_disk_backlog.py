"""The queue of disk writes: it pins a chunk only when its turn comes, and never blocks a load."""

from __future__ import annotations

from actors.node.disk_backlog import DiskBacklog, DiskWrite
from actors.node.node_ledger import NodeLedger
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk
from storage.host.processes import ProcessId

RANK, WRITER = ProcessId(1, 1), ProcessId(2, 1)


class Shelf:
    unkept_chunks = 0

    def __init__(self, *numbers: int) -> None:
        self.keys = {key(number) for number in numbers}
        self.touched: list[bytes] = []

    def __contains__(self, found: object) -> bool:
        return found in self.keys

    def touch(self, found: bytes) -> None:
        self.touched.append(found)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def commit(cache: ChunkCache, number: int, owner: object = None, pinners: tuple[object, ...] = ()) -> CachedChunk:
    lease = cache.lease(key(number), RANK, 10, owner=owner)
    assert lease is not None
    assert cache.commit(lease.lease_id, 1, pinners)
    chunk = cache.lookup(key(number))
    assert chunk is not None
    return chunk


def test_without_a_disk_tier_nothing_is_queued() -> None:
    backlog, cache = DiskBacklog(), ChunkCache(2)
    backlog.keep(DiskWrite(commit(cache, 1)))
    backlog.unusable(key(1))
    assert not backlog.on
    assert not backlog.on_disk(key(1))
    assert len(backlog) == 0
    assert backlog.next_unusable() is None
    assert backlog.next(cache, WRITER) is None


def test_a_slot_is_reused_only_after_its_write_ends() -> None:
    backlog, cache = DiskBacklog(Shelf()), ChunkCache(1)
    backlog.keep(DiskWrite(commit(cache, 1)))
    write = backlog.next(cache, WRITER)
    assert write is not None
    assert cache.lease(key(2), RANK, 10) is None
    backlog.done(write, cache, WRITER)
    assert cache.lease(key(2), RANK, 10) is not None
    assert backlog.next(cache, WRITER) is None


def test_a_chunk_evicted_before_its_turn_is_not_written() -> None:
    backlog, cache = DiskBacklog(Shelf()), ChunkCache(2)
    for number in (1, 2, 3):
        backlog.keep(DiskWrite(commit(cache, number)))
    first, second = backlog.next(cache, WRITER), backlog.next(cache, WRITER)
    assert first is not None
    assert second is not None
    assert [write.chunk.key for write in (first, second)] == [key(2), key(3)]
    assert backlog.unkept_chunks == 1


def test_a_chunk_in_a_new_slot_is_written_from_that_slot() -> None:
    backlog, cache = DiskBacklog(Shelf()), ChunkCache(2)
    for number in (1, 2, 3):
        backlog.keep(DiskWrite(commit(cache, number)))
    again = commit(cache, 1)
    backlog.keep(DiskWrite(again))
    write = backlog.next(cache, WRITER)
    assert write is not None
    assert write.chunk == again


def test_a_chunk_whose_kept_copy_was_evicted_is_written_from_the_window() -> None:
    backlog, cache = DiskBacklog(Shelf()), ChunkCache(6, window_slots=4)
    assert cache.reserve("load", 2)
    for number in (1, 2):
        lease = cache.lease(key(number), RANK, 10, owner="load", keep=True)
        assert lease is not None
        cache.commit(lease.lease_id, 1, ("rank",), kept=True)
        kept = cache.kept(key(number))
        assert kept is not None
        backlog.keep(DiskWrite(kept))
    freed = cache.shrink(WRITER)
    assert freed is not None
    cache.shrunk(freed)
    first, second = backlog.next(cache, WRITER), backlog.next(cache, WRITER)
    assert first is not None
    assert second is not None
    assert first.chunk == cache.lookup(key(1))
    assert second.chunk == cache.kept(key(2))
    assert backlog.unkept_chunks == 0


def test_disk_writes_wait_for_a_load_that_needs_all_slots() -> None:
    backlog, cache = DiskBacklog(Shelf()), ChunkCache(2)
    assert cache.reserve("load", 2)
    chunk = commit(cache, 1, owner="load")
    backlog.keep(DiskWrite(chunk))
    assert backlog.next(cache, WRITER) is None  # the load's minimum is all there is
    assert len(backlog) == 1
    cache.end_owner("load", 0)
    assert backlog.next(cache, WRITER) == DiskWrite(chunk)


def test_a_chunk_on_disk_is_rewritten_only_if_unusable() -> None:
    shelf = Shelf(1)
    backlog, cache = DiskBacklog(shelf), ChunkCache(2)
    chunk = commit(cache, 1)
    backlog.keep(DiskWrite(chunk))
    assert len(backlog) == 0
    assert backlog.on_disk(key(1))
    assert shelf.touched == [key(1)]
    backlog.unusable(key(1))
    backlog.unusable(key(2))  # never was there
    assert not backlog.on_disk(key(1))
    backlog.keep(DiskWrite(chunk))
    assert backlog.next_unusable() == key(1)
    shelf.keys.clear()
    backlog.removed(key(1))
    assert backlog.next_unusable() is None
    assert backlog.next(cache, WRITER) == DiskWrite(chunk)


def test_heartbeats_count_chunks_missing_from_disk() -> None:
    shelf, cache = Shelf(), ChunkCache(1)
    ledger = NodeLedger(cache, 10, disk=(backlog := DiskBacklog(shelf)))
    backlog.keep(DiskWrite(commit(cache, 1)))
    assert cache.lease(key(2), RANK, 10) is not None  # evicts the chunk
    assert backlog.next(cache, WRITER) is None
    shelf.unkept_chunks = 4
    assert ledger.beat("node", "host", "0", 0.0, ()).arena.disk_unkept_chunks == 5
