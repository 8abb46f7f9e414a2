"""The chunk cache keeps its laws over every journal: records in memory, and the header of a real arena."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass
from typing import overload

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from storage.arena.arena import Arena
from storage.arena.arena_files import arena_path, sweep
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import Answer, CachedChunk, Lease, MemoryJournal, SlotJournal, SlotRecord, SlotState
from storage.errors import ArenaTooSmall
from storage.host.processes import ProcessId

pytestmark = pytest.mark.slow

OWNERS = ("first", "second", "third")
KEYS = tuple(bytes([number]) * 32 for number in range(1, 8))

owners = st.sampled_from(OWNERS)
keys = st.sampled_from(KEYS)
workers = st.integers(0, 3)
LENGTH_BYTES = 10


@dataclass(frozen=True)
class Reading:
    """A reader that has received its orders."""

    chunk: CachedChunk
    process: ProcessId
    reader: str
    owner: str


class CacheMachine(RuleBasedStateMachine):
    """A model of agent and workers: slots with contents, writers that may be late, readers that trust.

    Every rule is one message or one event of a node's life; subclasses choose the journal. `memory` is what the slots
    hold. A writer may write into its slot until it has acknowledged or is dead, whatever became of its lease. The cache
    is right when a reader sees nothing but the chunk that it was given.
    """

    leases = Bundle("leases")
    chunks = Bundle("chunks")

    def make_journal(self) -> SlotJournal:
        return MemoryJournal(self.slot_count + self.kept_slots)

    def reopen_journal(self) -> SlotJournal:
        """Return the journal as a restarted agent finds it."""
        return self.journal

    def make_memory(self) -> MutableSequence[object]:
        """The slots' contents."""
        return [None] * (self.slot_count + self.kept_slots)

    def new_cache(self) -> ChunkCache:
        return ChunkCache(
            self.slot_count + self.kept_slots,
            window_slots=self.slot_count,
            journal=self.journal,
            ready_slots=self.ready_slots,
        )

    @initialize(slot_count=st.integers(1, 5), ready_slots=st.integers(0, 5), kept_slots=st.integers(0, 3))
    def start(self, slot_count: int, ready_slots: int, kept_slots: int) -> None:
        self.slot_count, self.kept_slots = slot_count, kept_slots
        self.journal = self.make_journal()
        self.ready_slots = min(ready_slots, slot_count)
        self.cache = self.new_cache()
        self.now_s = 0.0
        self.memory = self.make_memory()
        self.reads: dict[str, CachedChunk] = {}  # lease -> kept chunk that its holder reads
        self.old_reads: dict[str, CachedChunk] = {}  # of them: those that a restarted agent has not settled
        self.workers = [ProcessId(100 + number, 1) for number in range(4)]
        self.unnoticed: list[ProcessId] = []  # dead, and the agent does not know
        self.open: dict[str, Lease] = {}  # leases whose end was not reported to the agent
        self.running: dict[str, Lease] = {}  # those of them that were not taken back
        self.readings: set[Reading] = set()
        self.forgotten: set[Reading] = set()  # of them: those of which a restarted agent knows nothing yet
        self.pins: dict[tuple[str, int], set[int]] = {}  # pinner -> slots

    @property
    def writers(self) -> dict[str, Lease]:
        """Leases whose holder may still write, whatever the agent thinks of them."""
        return {name: lease for name, lease in self.open.items() if lease.holder in self.workers}

    @property
    def written(self) -> set[int]:
        """Slots that writers may write."""
        slots = {lease.slot for lease in self.writers.values()}
        return slots | {lease.keep.slot for lease in self.writers.values() if lease.keep is not None}

    @property
    def read(self) -> dict[str, CachedChunk]:
        """Kept chunks that living holders of leases may read."""
        return {name: self.reads[name] for name in self.writers if name in self.reads}

    # --- loads come and go ---

    @rule(owner=owners, minimum=st.integers(0, 6))
    def reserve(self, owner: str, minimum: int) -> None:
        before = self.cache.shares.minimum(owner)
        try:
            granted = self.cache.reserve(owner, minimum)
        except ArenaTooSmall:
            assert minimum > self.slot_count
            return
        assert minimum <= self.slot_count
        assert self.cache.shares.minimum(owner) == (max(before, minimum) if granted else before)
        assert granted == (owner not in self.cache.shares.waiting or before >= minimum)

    @rule(owner=owners)
    def end_owner(self, owner: str) -> None:
        revoked = self.cache.end_owner(owner, self.now_s)
        assert {lease.lease_id for lease in revoked} == {
            lease.lease_id for lease in self.running.values() if lease.owner == owner
        }
        for lease in revoked:
            del self.running[lease.lease_id]
        for pinner in [pinner for pinner in self.pins if pinner[0] == owner]:
            del self.pins[pinner]
        assert self.cache.shares.minimum(owner) == 0
        assert owner not in self.cache.shares.waiting

    @rule(ready_slots=st.integers(0, 6))
    def more_slots_are_ready(self, ready_slots: int) -> None:
        self.cache.add_ready(ready_slots)
        self.ready_slots = max(self.ready_slots, min(ready_slots, self.slot_count))

    @rule(key=keys)
    def forget(self, key: bytes) -> None:
        """Drop a chunk whose bytes are wrong. Its readers go on; no new reader gets it."""
        stats = self.cache.stats()
        self.cache.forget(key)
        assert key not in self.cache
        assert self.cache.lookup(key) is self.cache.kept(key) is None
        assert self.cache.stats().used_bytes == stats.used_bytes

    # --- writing ---

    @rule(
        target=leases, key=keys, worker=workers, owner=owners, seconds=st.integers(1, 5), keep=st.booleans(),
        may_grow=st.booleans(),
    )  # fmt: skip
    def lease(self, key: bytes, worker: int, owner: str, seconds: int, keep: bool, may_grow: bool) -> object:
        used, minimum = self.cache.shares.used(owner), self.cache.shares.minimum(owner)
        touched = self._touched()
        visible = {key for key in KEYS if self.cache.in_window(key)}
        kept = {key for key in KEYS if self.cache.kept(key)}
        self.cache.may_grow = may_grow
        lease = self.cache.lease(key, self.workers[worker], self.now_s + seconds, owner=owner, keep=keep)
        if lease is None:
            assert {key for key in KEYS if self.cache.in_window(key)} == visible
            assert {key for key in KEYS if self.cache.kept(key)} == kept
            # A load below its minimum is never refused, once there is memory behind the slots.
            assert used >= minimum or self.ready_slots < self.slot_count
            return multiple()
        assert lease.slot < self.ready_slots
        assert lease.slot not in touched
        assert lease.lease_id not in self.open
        assert {key for key in KEYS if self.cache.in_window(key)} == visible - {lease.evicted_key}
        assert {key for key in KEYS if self.cache.kept(key)} <= kept
        if lease.read is not None:
            assert key in kept
            assert lease.keep is None
            assert self.memory[lease.read.slot] == key
            self.reads[lease.lease_id] = lease.read
        if lease.keep is not None:
            assert keep
            assert lease.keep.slot not in touched
            self.memory[lease.keep.slot] = None
        assert lease.evicted_key is None or lease.evicted_key in visible or lease.evicted_key not in KEYS
        assert lease in self.cache.in_flight(key)
        self.open[lease.lease_id] = self.running[lease.lease_id] = lease
        self.memory[lease.slot] = None
        return lease

    @rule(lease=leases)
    def write(self, lease: Lease) -> None:
        """Write into the holder's slot, in time or late, as long as nothing stops it."""
        if lease.lease_id in self.writers:
            self.memory[lease.slot] = ("half of", lease.lease_id)
            if lease.keep is not None:
                self.memory[lease.keep.slot] = ("half of", lease.lease_id)

    @rule(lease=leases, pinners=st.sets(st.integers(0, 2)), kept=st.booleans())
    def commit(self, lease: Lease, pinners: set[int], kept: bool) -> None:
        """A report that may come twice, too late, or after its sender has died; the bytes were whole before."""
        in_time = lease.lease_id in self.running
        if in_time:
            self.memory[lease.slot] = lease.key
            if lease.keep is not None and kept:
                self.memory[lease.keep.slot] = lease.key
        elif lease.lease_id in self.writers:
            self.memory[lease.slot] = ("late", lease.lease_id)
        there, was_kept = self.cache.in_window(lease.key), self.cache.kept(lease.key) is not None
        wanted = [(str(lease.owner), rank) for rank in sorted(pinners)]
        answer = self.cache.commit(lease.lease_id, LENGTH_BYTES, wanted, kept=kept)
        if not in_time:
            assert answer in (Answer.LATE, Answer.REPEATED)
            return
        assert answer is (Answer.DUPLICATE if there else Answer.DONE)
        del self.running[lease.lease_id], self.open[lease.lease_id]
        now_kept = was_kept or (answer is Answer.DONE and kept and lease.keep is not None)
        assert (self.cache.kept(lease.key) is not None) == now_kept
        if answer is Answer.DONE:
            for pinner in wanted:
                self.pins.setdefault(pinner, set()).add(lease.slot)

    @rule(key=keys, worker=workers, owner=owners, kept=st.sampled_from([True, True, False]))
    def fetch(self, key: bytes, worker: int, owner: str, kept: bool) -> None:
        """Lease and commit at once, which single rules seldom do to the same chunk."""
        lease = self.lease(key, worker, owner, 5, keep=True, may_grow=True)
        if isinstance(lease, Lease):
            self.commit(lease, set(), kept)

    @rule(target=leases, key=keys, worker=workers, owner=owners)
    def read_again(self, key: bytes, worker: int, owner: str) -> object:
        """Lease a chunk that is kept, if any is, to read it from there."""
        found = [known for known in KEYS if self.cache.kept(known)]
        return self.lease(found[0] if found else key, worker, owner, 5, keep=False, may_grow=True)

    @rule(lease=leases)
    def abandon(self, lease: Lease) -> None:
        """The holder's socket is closed, and it says so: perhaps twice, perhaps after the deadline."""
        answer = self.cache.abandon(lease.lease_id)
        assert bool(answer) == (lease.lease_id in self.open)
        self.open.pop(lease.lease_id, None)
        self.running.pop(lease.lease_id, None)

    @rule(lease=leases)
    def revoke(self, lease: Lease) -> None:
        answer = self.cache.revoke(lease.lease_id, self.now_s)
        assert bool(answer) == (lease.lease_id in self.running)
        self.running.pop(lease.lease_id, None)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        expired = self.cache.expire(self.now_s)
        due = {name for name, lease in self.running.items() if lease.deadline_s <= self.now_s}
        assert {lease.lease_id for lease in expired} == due
        for name in due:
            del self.running[name]
        stuck = {lease.lease_id for lease in self.cache.overdue(self.now_s, 0) if lease.slot < self.slot_count}
        assert stuck == set(self.open) - set(self.running)
        assert self.cache.overdue(self.now_s, 1e9) == []

    @rule(lease_id=st.sampled_from(["", "x", "x.0.1", "..", "x.0.1.2"]), slot=st.integers(0, 9))
    def unknown_leases(self, lease_id: str, slot: int) -> None:
        for name in (lease_id, f"{self.journal.epoch}.{slot}.999", f"{self.journal.epoch}.{slot}.0"):
            for answer in (
                self.cache.commit(name, LENGTH_BYTES),
                self.cache.abandon(name),
                self.cache.revoke(name, self.now_s),
            ):
                assert answer is Answer.UNKNOWN

    # --- reading ---

    @rule(target=chunks, key=keys)
    def lookup(self, key: bytes) -> object:
        chunk = self.cache.lookup(key)
        if chunk is None:
            return multiple()
        assert (chunk.key, chunk.length_bytes) == (key, LENGTH_BYTES)
        assert self.memory[chunk.slot] == key
        return chunk

    @rule(target=chunks, key=keys)
    def look_for_kept(self, key: bytes) -> object:
        chunk = self.cache.kept(key)
        if chunk is None:
            return multiple()
        assert (chunk.key, chunk.length_bytes) == (key, LENGTH_BYTES)
        assert self.memory[chunk.slot] == key
        return chunk

    @rule()
    def shrink(self) -> None:
        """Give the memory of a kept slot back."""
        touched = self._touched()
        agent = ProcessId(1, 1)
        if (lease := self.cache.shrink(agent)) is not None:
            assert lease.slot >= self.slot_count
            assert lease.slot not in touched
            self.memory[lease.slot] = None
            self.cache.shrunk(lease)

    @rule(chunk=chunks, owner=owners, rank=st.integers(0, 2))
    def pin(self, chunk: CachedChunk, owner: str, rank: int) -> None:
        if self.cache.pin(chunk, (owner, rank), owner=owner):
            assert self.memory[chunk.slot] == chunk.key
            self.pins.setdefault((owner, rank), set()).add(chunk.slot)

    @rule(chunk=chunks, owner=owners, rank=st.integers(0, 2))
    def unpin(self, chunk: CachedChunk, owner: str, rank: int) -> None:
        if self.cache.unpin(chunk, (owner, rank)):
            self.pins[(owner, rank)].remove(chunk.slot)

    @rule(chunk=chunks, worker=workers, reader=st.sampled_from("ab"), owner=owners)
    def tell_to_read(self, chunk: CachedChunk, worker: int, reader: str, owner: str) -> None:
        process = self.workers[worker]
        if self.cache.hold(chunk, process, reader, owner=owner):
            self.readings.add(Reading(chunk, process, reader, owner))
            self.forgotten.discard(Reading(chunk, process, reader, owner))

    @rule(chunk=chunks, worker=workers, reader=st.sampled_from("ab"))
    def done_reading(self, chunk: CachedChunk, worker: int, reader: str) -> None:
        process = self.workers[worker]
        mine = {r for r in self.readings if (r.chunk, r.process, r.reader) == (chunk, process, reader)}
        assert self.cache.release(chunk, process, reader) == bool(mine - self.forgotten)
        self.readings -= mine

    # --- failures ---

    @rule(worker=workers)
    def kill(self, worker: int) -> None:
        """A worker dies; the pid it had is used again by its successor."""
        dead = self.workers[worker]
        self.workers[worker] = ProcessId(dead.pid, dead.start_time + 1)
        self.unnoticed.append(dead)
        self.readings = {reading for reading in self.readings if reading.process != dead}
        if len(self.unnoticed) > 2:
            self.notice_deaths()

    @rule()
    def notice_deaths(self) -> None:
        for dead in self.unnoticed:
            lost = self.cache.process_dead(dead)
            gone = {name for name, lease in self.running.items() if lease.holder == dead}
            assert {lease.lease_id for lease in lost} == gone
            self._forget_leases(dead)
            assert self.cache.process_dead(dead) == []
        self.unnoticed = []

    @rule(settle_first=st.booleans())
    def agent_restarts(self, settle_first: bool) -> None:
        """The agent is killed anywhere between two messages; its successor has the journal and the living."""
        visible = {key for key in KEYS if key in self.cache}
        self.journal = self.reopen_journal()
        self.cache = self.new_cache()
        quarantined = self.cache.restore(self.workers, self.now_s)
        assert {key for key in KEYS if key in self.cache} == visible
        known = {lease.lease_id for lease in quarantined if lease.slot < self.slot_count}
        assert known == set(self.open)
        self.old_reads = dict(self.reads)
        self.running = {}
        self.pins = {}
        self.forgotten = set(self.readings)
        for lease in quarantined:
            if lease.holder not in self.workers:
                self.cache.process_dead(lease.holder)
                self._forget_leases(lease.holder)
        self.unnoticed = []
        if settle_first:
            for worker in range(4):
                self.settle(worker)

    @rule(worker=workers)
    def settle(self, worker: int) -> None:
        process = self.workers[worker]
        mine = [(r.chunk, r.reader) for r in sorted(self.readings, key=repr) if r.process == process]
        self.cache.settled(process, mine)
        for name in [name for name in self.old_reads if name in self.open and self.open[name].holder == process]:
            del self.old_reads[name], self.reads[name]
        self.forgotten = {reading for reading in self.forgotten if reading.process != process}

    def _forget_leases(self, dead: ProcessId) -> None:
        for table in (self.open, self.running):
            for name in [name for name, lease in table.items() if lease.holder == dead]:
                del table[name]

    # --- laws ---

    def _touched(self) -> set[int]:
        """Slots that a writer, late or not, or a reader may touch, or that a rank still needs."""
        writing = self.written
        reading = {reading.chunk.slot for reading in self.readings} | {chunk.slot for chunk in self.read.values()}
        return writing.union(reading, *self.pins.values())

    @invariant()
    def readers_see_what_they_were_told(self) -> None:
        for reading in self.readings:
            assert self.memory[reading.chunk.slot] == reading.chunk.key
        for chunk in self.read.values():
            assert self.memory[chunk.slot] == chunk.key
        for slots in self.pins.values():
            for slot in slots:
                assert self.memory[slot] in KEYS

    @invariant()
    def what_is_visible_is_whole_and_nobody_writes_to_it(self) -> None:
        late = self.written
        records = self.journal.records()
        for slot, record in enumerate(records):
            # Judged by the records, so it holds for an agent that would restart right now.
            if record.state is SlotState.COMMITTED:
                assert self.memory[slot] == record.key or record.key not in KEYS  # forgotten: nobody asks for it
                assert slot not in late
        for lease in self.open.values():
            assert records[lease.slot].state in (SlotState.LEASED, SlotState.QUARANTINED)
            assert records[lease.slot].holder == lease.holder

    @invariant()
    def only_running_leases_are_in_flight(self) -> None:
        """A reader of a chunk in flight must not wait for a revoked lease."""
        found = {lease.lease_id for key in KEYS for lease in self.cache.in_flight(key)}
        assert found == set(self.running)

    @invariant()
    def the_books_are_right(self) -> None:
        stats, shares = self.cache.stats(), self.cache.shares
        states = stats.free_slots + stats.leased_slots + stats.committed_slots + stats.quarantined_slots
        assert states == stats.ready_slots == self.ready_slots
        assert stats.leased_slots == len(self.running)
        states_of_kept = [record.state for record in self.journal.records()[self.slot_count :]]
        committed = states_of_kept.count(SlotState.COMMITTED) if self.kept_slots else stats.committed_slots
        assert stats.used_bytes == LENGTH_BYTES * committed
        demand = sum(max(shares.minimum(owner), shares.used(owner)) for owner in (*OWNERS, None))
        assert demand <= self.slot_count or shares.used(None)
        assert stats.in_use_slots + stats.leased_slots + stats.quarantined_slots <= sum(
            shares.used(owner) for owner in (*OWNERS, None)
        )

    def teardown(self) -> None:
        """Check that the whole arena is free once all processes are dead and all loads have ended."""
        if not hasattr(self, "cache"):
            return
        self.cache.add_ready(self.slot_count)
        for owner in OWNERS:
            self.cache.end_owner(owner, self.now_s)
        for process in (*self.workers, *self.unnoticed):
            self.cache.process_dead(process)
        assert self.cache.reserve("last", self.slot_count)
        for number in range(self.slot_count):
            assert self.cache.lease(bytes([99, number]) * 16, self.workers[0], 1e9, owner="last")
        assert self.cache.lease(KEYS[0], self.workers[0], 1e9, owner="last") is None
        assert self.cache.stats().kept_in_use_slots == 0


SLOT_BYTES = 4096


class SlotContents(MutableSequence[object]):
    """The contents of slots, as the model writes them, in the arena's own memory."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> MutableSequence[object]: ...
    def __getitem__(self, index):
        with self._arena.view(index, SLOT_BYTES) as slot:
            data = bytes(slot)
        # A key fills its slot; anything else is a scribble.
        return data[:32] if data == data[:32] * (SLOT_BYTES // 32) else data

    def __setitem__(self, index, value):
        pattern = value if isinstance(value, bytes) else repr(value).encode()
        content = (pattern * SLOT_BYTES)[:SLOT_BYTES]
        if index < self._arena.window_slots:
            with self._arena.slot(index) as slot:
                slot[:] = content
        elif value is None:
            self._arena.give_back(index)
        else:
            assert self._arena.keep(index, memoryview(content))

    def __delitem__(self, index):
        raise TypeError("slots stay")

    def insert(self, index, value):
        raise TypeError("slots stay")

    def __len__(self) -> int:
        return self._arena.slot_count


class ArenaMachine(CacheMachine):
    """The model with its bytes and its records in shared memory; a restart maps the file anew."""

    folder = ""

    def make_journal(self) -> Arena:
        self.folder = tempfile.mkdtemp(prefix="longshore-test-", dir="/dev/shm")
        self.path = arena_path("cluster", "node", self.folder)
        slots = self.slot_count + self.kept_slots
        self.arena = Arena.create(self.path, slot_count=slots, slot_bytes=SLOT_BYTES, window_slots=self.slot_count)
        self.arena.reserve()
        return self.arena

    def reopen_journal(self) -> Arena:
        self.arena.close()
        self.arena = Arena.adopt(self.path)
        self.memory = SlotContents(self.arena)
        return self.arena

    def make_memory(self) -> SlotContents:
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


TestMemoryLaws = CacheMachine.TestCase
TestMemoryLaws.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
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


def test_a_crash_after_commit_keeps_chunks_and_live_reads(journal):
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
    assert restarted.lease(KEY, ME, 10) is None  # until the survivor has reported its reads
    restarted.settled(ME, [(reading, "rank 0")])
    taken = [restarted.lease(bytes([9, number]) * 16, ME, 10) for number in range(3)]
    assert [lease is not None for lease in taken] == [True, True, False]
    assert restarted.lookup(reading.key) == reading
    assert restarted.release(reading, ME, "rank 0")
    assert restarted.lease(KEY, ME, 10) is not None
