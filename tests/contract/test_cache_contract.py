"""The chunk cache keeps its laws over every journal: records in memory, and the header of a real arena."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, MutableSequence
from typing import overload

import pytest
from hypothesis import settings

from storage.arena.arena import Arena
from storage.arena.arena_files import arena_path, sweep
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Answer, MemoryJournal, SlotRecord, SlotState
from storage.host.processes import ProcessId
from tests.support.cache_machine import CacheMachine

SLOT_BYTES = 4096


class SlotContents(MutableSequence[object]):
    """What slots hold, as the model writes it, in the arena's own memory."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> MutableSequence[object]: ...
    def __getitem__(self, index):
        with self._arena.slot(index) as slot:
            data = bytes(slot)
        # A key fills its slot; anything else is a scribble.
        return data[:32] if data == data[:32] * (SLOT_BYTES // 32) else data

    def __setitem__(self, index, value):
        pattern = value if isinstance(value, bytes) else repr(value).encode()
        with self._arena.slot(index) as slot:
            slot[:] = (pattern * SLOT_BYTES)[:SLOT_BYTES]

    def __delitem__(self, index):
        raise TypeError("slots stay")

    def insert(self, index, value):
        raise TypeError("slots stay")

    def __len__(self) -> int:
        return self._arena.slot_count


class ArenaMachine(CacheMachine):
    """The model with its bytes and its records in shared memory; a restart maps the file anew."""

    folder = ""

    def make_journal(self, slot_count: int) -> Arena:
        self.folder = tempfile.mkdtemp(prefix="longshore-test-", dir="/dev/shm")
        self.path = arena_path("cluster", "node", self.folder)
        self.arena = Arena.create(self.path, slot_count=slot_count, slot_bytes=SLOT_BYTES)
        self.arena.reserve()
        return self.arena

    def reopen_journal(self) -> Arena:
        self.arena.close()
        self.arena = Arena.adopt(self.path)
        self.memory = SlotContents(self.arena)
        return self.arena

    def make_memory(self, slot_count: int) -> SlotContents:
        return SlotContents(self.arena)

    def teardown(self) -> None:
        if not self.folder:
            return
        try:
            super().teardown()
        finally:
            self.arena.close()
            sweep(self.folder)
            left = os.listdir(self.folder)
            shutil.rmtree(self.folder)
        assert left == []


TestArenaLaws = ArenaMachine.TestCase
TestArenaLaws.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# --- what a journal promises ---


@pytest.fixture(params=["memory", "arena"])
def journal(request, shm_dir) -> Iterator[MemoryJournal | Arena]:
    if request.param == "memory":
        yield MemoryJournal(3)
        return
    with Arena.create(arena_path("c", "n", str(shm_dir)), slot_count=3, slot_bytes=SLOT_BYTES) as arena:
        yield arena


KEY = b"k" * 32
ME = ProcessId.current()


def test_the_last_record_of_each_slot_is_kept(journal):
    assert journal.records() == (SlotRecord(),) * 3
    assert journal.epoch
    for generation in range(1, 8):
        journal.write_record(1, SlotRecord(SlotState.LEASED, generation, 0, KEY, ME))
    journal.write_record(2, SlotRecord(SlotState.COMMITTED, 9, 4096, KEY))
    assert journal.records() == (
        SlotRecord(),
        SlotRecord(SlotState.LEASED, 7, 0, KEY, ME),
        SlotRecord(SlotState.COMMITTED, 9, 4096, KEY),
    )


def test_a_crash_before_commit_leaves_nothing_visible(journal):
    cache = ChunkCache(3, journal=journal)
    lease = cache.lease(KEY, ME, 10)
    assert lease is not None
    restarted = ChunkCache(3, journal=journal)
    quarantined = restarted.restore([ME], 0)
    assert [found.lease_id for found in quarantined] == [lease.lease_id]
    assert restarted.lookup(KEY) is None
    assert restarted.commit(lease.lease_id, 5) is Answer.LATE
    assert restarted.lookup(KEY) is None
    assert restarted.process_dead(ME) == []
    assert restarted.stats().free_slots == 3


def test_a_crash_after_commit_loses_nothing_and_survivors_keep_what_they_read(journal):
    cache = ChunkCache(3, journal=journal)
    for number in range(3):
        lease = cache.lease(bytes([number]) * 31 + b"x", ME, 10)
        assert lease is not None
        assert cache.commit(lease.lease_id, 5)
    reading = cache.lookup(b"\1" * 31 + b"x")
    assert reading is not None
    restarted = ChunkCache(3, journal=journal)
    assert restarted.restore([ME], 0) == []
    assert restarted.stats().committed_slots == 3
    assert restarted.commit(lease.lease_id, 5) is Answer.REPEATED
    assert restarted.lease(KEY, ME, 10) is None  # until the survivor has said what it reads
    restarted.settled(ME, [(reading, "rank 0")])
    taken = [restarted.lease(bytes([9, number]) * 16, ME, 10) for number in range(3)]
    assert [lease is not None for lease in taken] == [True, True, False]
    assert restarted.lookup(reading.key) == reading
    assert restarted.release(reading, ME, "rank 0")
    assert restarted.lease(KEY, ME, 10) is not None
