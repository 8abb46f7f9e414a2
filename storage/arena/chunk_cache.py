"""The chunk cache of one node: which chunk is in which slot, who may touch it, and which slot may be reused.

              lease                      commit                      pin, hold
      FREE ----------> LEASED ---------------------> COMMITTED <-----------------> in use
       ^ ^   abandon,    |                              |  ^        unpin, release
       | +---------------+ holder dead                  |  |
       |                 | deadline passed, revoked     +--+ evicted by a lease, when nobody uses it
       |                 v
       +---------- QUARANTINED                a deadline returns the chunk, never the slot: the holder may
        abandoned, holder dead                be writing until it reports that it is not, or is dead

The least recently used chunk is evicted first. Pure: no clock and no I/O. The caller passes the time and acts on the
answers, one thread at a time.

Each change of state is written to a SlotJournal before it is returned. So an agent that restarts (`restore`) never
hands out a slot that a process may still touch. It finds the slots as the journal has them, and each committed chunk
is held for every process that may still be reading.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from storage.arena.slots import (
    KEY_BYTES,
    Answer,
    CachedChunk,
    Lease,
    MemoryJournal,
    SlotJournal,
    SlotRecord,
    SlotShares,
    SlotState,
    SlotTable,
)
from storage.host.processes import ProcessId

_SURVIVOR = "may have been reading when the agent restarted"


def slots_with_memory(records: Sequence[SlotRecord], ready_slots: int) -> int:
    """Return how many slots have memory: a slot that was ever used has some, even if `ready_slots` is smaller."""
    used = [index for index, record in enumerate(records) if record.generation]
    return max([ready_slots, *(index + 1 for index in used)])


def restore_slots(
    table: SlotTable,
    records: Sequence[SlotRecord],
    ready_slots: int,
    survivors: Sequence[ProcessId],
    now_s: float,
) -> list[Lease]:
    """Fill a table that was never used, and return the leases of the slots that are quarantined now.

    Each committed chunk is held for every survivor until `settle_survivor` or the survivor's death.
    """
    quarantined = []
    table.free.clear()
    for index, record in enumerate(records):
        table.slots[index].generation = record.generation
        if record.state is SlotState.COMMITTED and record.key not in table.by_key:
            table.restore_committed(index, record)
            for process in survivors:
                table.hold(index, (process, _SURVIVOR), None)
            table.settle(index)
        elif record.state in (SlotState.LEASED, SlotState.QUARANTINED) and record.holder is not None:
            generation = record.generation
            lease_id = table.lease_id(index, generation)
            lease = Lease(lease_id, index, generation, record.key, record.holder, None, now_s)
            table.to_leased(index, lease)
            table.to_quarantine(index, now_s)
            quarantined.append(lease)
        elif index < ready_slots:
            table.free.append(index)
    return quarantined


def settle_survivor(
    table: SlotTable, process: ProcessId, still_reading: Iterable[tuple[CachedChunk, Hashable]]
) -> None:
    """Replace the survivor's holds on all chunks by holds on what it still reads, given as (chunk, reader)."""
    for chunk, reader in still_reading:
        if table.has(chunk):
            table.hold(chunk.slot, (process, reader), None)
    for index in sorted(table.held_by.get(process, ())):
        if (process, _SURVIVOR) in table.slots[index].holds:
            table.release(index, (process, _SURVIVOR))


@dataclass(slots=True)
class CacheCounts:
    """Counters since the cache was created. CacheStats explains them."""

    hits: int = 0
    misses: int = 0
    committed: int = 0
    evicted: int = 0
    expired: int = 0
    duplicates: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was created. `*_slots` and `used_bytes` are the state now."""

    slot_count: int
    ready_slots: int
    free_slots: int
    leased_slots: int
    committed_slots: int
    quarantined_slots: int
    in_use_slots: int  # committed slots that cannot be evicted now
    used_bytes: int  # of committed chunks
    hits: int
    misses: int
    committed: int
    evicted: int
    expired: int  # leases that ended at their deadline
    duplicates: int  # commits of a chunk that another slot had already
    quarantined: int  # slots that went into quarantine


def stats_of(table: SlotTable, counts: CacheCounts, ready_slots: int) -> CacheStats:
    """Return the counts and the state of the slots now, in O(1)."""
    committed_slots = len(table.by_key)
    return CacheStats(
        slot_count=len(table.slots),
        ready_slots=ready_slots,
        free_slots=len(table.free),
        leased_slots=table.leased_slots,
        committed_slots=committed_slots,
        quarantined_slots=len(table.quarantine),
        in_use_slots=committed_slots - len(table.evictable),
        used_bytes=table.used_bytes,
        hits=counts.hits,
        misses=counts.misses,
        committed=counts.committed,
        evicted=counts.evicted,
        expired=counts.expired,
        duplicates=counts.duplicates,
        quarantined=counts.quarantined,
    )


class ChunkCache:
    """The chunks in `slot_count` slots. Operations are O(1) or O(log n), except those that end many things."""

    def __init__(self, slot_count: int, *, journal: SlotJournal | None = None, ready_slots: int | None = None) -> None:
        """Set up the cache. `ready_slots` is how many slots have memory (default: all); `add_ready` adds more."""
        if slot_count < 1:
            raise ValueError("slot_count of a chunk cache must be at least 1")
        self.slot_count, self.shares = slot_count, SlotShares(slot_count)
        self._journal: SlotJournal = MemoryJournal(slot_count) if journal is None else journal
        self._table = SlotTable(slot_count, self._journal, self.shares)
        self._deadlines: list[tuple[float, int, int]] = []  # (deadline, slot, generation), a heap
        self._ready_slots = 0
        self._counts = CacheCounts()
        self.add_ready(slot_count if ready_slots is None else ready_slots)

    def add_ready(self, ready_slots: int) -> None:
        """Note that slots `[0, ready_slots)` have memory now. A number below the last one changes nothing."""
        ready_slots = min(ready_slots, self.slot_count)
        self._table.free.extend(range(self._ready_slots, ready_slots))
        self._ready_slots = max(self._ready_slots, ready_slots)

    # --- shares --------------------------------------------------------------------------------------------

    def reserve(self, owner: Hashable, min_slots: int) -> bool:
        """Guarantee the owner that many slots together. False: not yet, ask again. Raises ArenaTooSmall."""
        return self.shares.reserve(owner, min_slots)

    def end_owner(self, owner: Hashable, now_s: float) -> list[Lease]:
        """Drop the owner's pins, revoke its leases and end its minimum. Returns the revoked leases.

        The owner's readers and writers keep their slots until they release them or die.
        """
        revoked = []
        for index, slot in enumerate(self._table.slots):
            if slot.state is SlotState.LEASED and slot.lease is not None and slot.lease.owner == owner:
                revoked.append(slot.lease)
                self._quarantine(index, now_s)
            for pinner in [pinner for pinner, payer in slot.pins.items() if payer == owner]:
                self._table.unpin(index, pinner)
        self.shares.end(owner)
        return revoked

    # --- writing -------------------------------------------------------------------------------------------

    def lease(self, key: bytes, holder: ProcessId, deadline_s: float, *, owner: Hashable = None) -> Lease | None:
        """Lease a slot to `holder` to write the chunk into. None when no slot can be had now; try again later.

        Nobody sees the chunk until it is committed. A second lease for the same chunk (a hedge) gets another slot.
        Nothing is evicted until all slots have memory, so a load that fits the arena stays in it whole.
        """
        table = self._table
        may_evict = table.evictable and self._ready_slots == self.slot_count
        if not self.shares.may_claim(owner) or not (table.free or may_evict):
            self.shares.refused(owner)
            return None
        evicted_key = None
        if table.free:
            index = table.free.pop()
        else:
            index, evicted_key = table.evict_oldest()
            self._counts.evicted += 1
        generation = table.slots[index].generation + 1
        lease_id = table.lease_id(index, generation)
        lease = Lease(lease_id, index, generation, key, holder, owner, deadline_s, evicted_key)
        table.to_leased(index, lease)
        heapq.heappush(self._deadlines, (deadline_s, index, generation))
        self.shares.satisfied(owner)
        return lease

    def in_flight(self, key: bytes) -> tuple[Lease, ...]:
        """Return the running leases for the chunk, of all holders. Expired and revoked leases do not count."""
        slots = self._table.in_flight.get(key, ())
        return tuple(lease for index in slots if (lease := self._table.slots[index].lease) is not None)

    def commit(self, lease_id: str, length_bytes: int, pinners: Iterable[Hashable] = ()) -> Answer:
        """Accept a chunk that the holder wrote and verified. From now on `lookup` finds it.

        `pinners` pin it in the same step, counted for the lease's owner. A lease that expired, was abandoned or is
        unknown changes nothing. DUPLICATE means that another lease had committed the chunk: this slot is free again
        and `pinners` have no pin.
        """
        index, answer = self._table.find(lease_id)
        if index is None:
            return answer
        slot = self._table.slots[index]
        if slot.state is SlotState.COMMITTED:
            return Answer.REPEATED
        if slot.state is not SlotState.LEASED or (lease := slot.lease) is None:
            return Answer.LATE
        if slot.key in self._table.by_key:
            self._counts.duplicates += 1
            self._table.to_free(index)
            return Answer.DUPLICATE
        self._table.to_committed(index, length_bytes)
        self._counts.committed += 1
        for pinner in pinners:
            self._table.pin(index, pinner, lease.owner)
        self.shares.drop(lease.owner, index)
        self._table.settle(index)
        return Answer.DONE

    def abandon(self, lease_id: str) -> Answer:
        """Free the slot, also from quarantine: the holder will not write to it again (its socket is closed)."""
        index, answer = self._table.find(lease_id)
        if index is None:
            return answer
        state = self._table.slots[index].state
        if state is SlotState.COMMITTED:
            return Answer.LATE
        if state is SlotState.FREE:
            return Answer.REPEATED
        self._table.to_free(index)
        return Answer.DONE

    def expire(self, now_s: float) -> list[Lease]:
        """End each lease whose deadline has passed: anybody may lease the chunk, and the slot is quarantined."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, index, generation = heapq.heappop(self._deadlines)
            slot = self._table.slots[index]
            if slot.generation == generation and slot.state is SlotState.LEASED and slot.lease is not None:
                expired.append(slot.lease)
                self._quarantine(index, now_s)
        self._counts.expired += len(expired)
        return expired

    def revoke(self, lease_id: str, now_s: float) -> Answer:
        """End one lease before its deadline. Its slot is quarantined."""
        index, answer = self._table.find(lease_id)
        if index is None:
            return answer
        if self._table.slots[index].state is not SlotState.LEASED:
            return Answer.LATE
        self._quarantine(index, now_s)
        return Answer.DONE

    def overdue(self, now_s: float, grace_s: float) -> list[Lease]:
        """Return the leases quarantined for `grace_s` or longer and not abandoned: their holders must be killed."""
        slots = self._table.slots
        return [
            lease
            for index in sorted(self._table.quarantine)
            if (lease := slots[index].lease) is not None and now_s - slots[index].quarantined_at_s >= grace_s
        ]

    def process_dead(self, process: ProcessId) -> list[Lease]:
        """Free the slots of a process that is certainly dead. Returns its leases that were still running."""
        lost = []
        for index in sorted(self._table.leased_by.get(process, ())):
            slot = self._table.slots[index]
            if slot.state is SlotState.LEASED and slot.lease is not None:
                lost.append(slot.lease)
            self._table.to_free(index)
        for index in sorted(self._table.held_by.get(process, ())):
            for reader in [reader for reader in self._table.slots[index].holds if reader[0] == process]:
                self._table.release(index, reader)
        return lost

    # --- reading -------------------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> CachedChunk | None:
        """Return the committed chunk, now the most recently used. Pin it in the same step, or it may be evicted."""
        index = self._table.by_key.get(key)
        if index is None:
            self._counts.misses += 1
            return None
        self._counts.hits += 1
        if index in self._table.evictable:
            self._table.evictable.move_to_end(index)
        return self._table.chunk(index)

    def __contains__(self, key: object) -> bool:
        return key in self._table.by_key

    def pin(self, chunk: CachedChunk, pinner: Hashable, *, owner: Hashable = None) -> bool:
        """Keep the chunk for `pinner` (one rank of one attempt of a load), counted for the owner. Idempotent.

        False when the chunk was evicted, or the owner may use no more slots now. Then nothing changed.
        """
        if not self._table.has(chunk):
            return False
        if pinner not in self._table.slots[chunk.slot].pins:
            if not self.shares.may_use(owner, chunk.slot):
                return False
            self._table.pin(chunk.slot, pinner, owner)
        return True

    def unpin(self, chunk: CachedChunk, pinner: Hashable) -> bool:
        """Drop the pin: the pinner no longer needs the chunk. False when it had no pin; then nothing changed."""
        if not self._table.has(chunk) or pinner not in self._table.slots[chunk.slot].pins:
            return False
        self._table.unpin(chunk.slot, pinner)
        return True

    def hold(self, chunk: CachedChunk, process: ProcessId, reader: Hashable, *, owner: Hashable = None) -> bool:
        """Keep the slot from reuse until `release`. Call before `reader` in `process` learns that it may read.

        Idempotent. Returns False for the same reasons as `pin`.
        """
        if not self._table.has(chunk):
            return False
        if (process, reader) not in self._table.slots[chunk.slot].holds:
            if not self.shares.may_use(owner, chunk.slot):
                return False
            self._table.hold(chunk.slot, (process, reader), owner)
        return True

    def release(self, chunk: CachedChunk, process: ProcessId, reader: Hashable) -> bool:
        """Drop the reader's hold: it is done with the slot, copies to the device included. False when it had none."""
        if not self._table.has(chunk) or (process, reader) not in self._table.slots[chunk.slot].holds:
            return False
        self._table.release(chunk.slot, (process, reader))
        return True

    def forget(self, key: bytes) -> None:
        """Hide the chunk committed under `key`, because its bytes turned out to be wrong."""
        self._table.rename(key, secrets.token_bytes(KEY_BYTES))

    # --- restart -------------------------------------------------------------------------------------------

    def restore(self, survivors: Iterable[ProcessId], now_s: float) -> list[Lease]:
        """Take over what an earlier cache wrote in the journal. The cache must not have been used yet.

        Slots that were leased or quarantined are quarantined, and their leases are returned. Call `process_dead` for
        holders that are dead. `survivors` are the processes that map the arena now. Each may be reading any chunk,
        so no chunk is evicted before each survivor is `settled` or dead.
        """
        if any(slot.generation for slot in self._table.slots):
            raise ValueError("restore must be called before any slot of the cache is used")
        records = self._journal.records()
        self._ready_slots = slots_with_memory(records, self._ready_slots)
        quarantined = restore_slots(self._table, records, self._ready_slots, list(survivors), now_s)
        self._counts.quarantined += len(quarantined)
        return quarantined

    def settled(self, process: ProcessId, still_reading: Iterable[tuple[CachedChunk, Hashable]] = ()) -> None:
        """Note what a survivor of a restart still reads, as (chunk, reader). It reads nothing else."""
        settle_survivor(self._table, process, still_reading)

    def processes(self) -> set[ProcessId]:
        """Return the processes that write or read a slot. When one dies, call `process_dead`."""
        return {*self._table.leased_by, *self._table.held_by}

    # --- looking -------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return the counts and the state of the slots, in O(1)."""
        return stats_of(self._table, self._counts, self._ready_slots)

    # --- inside --------------------------------------------------------------------------------------------

    def _quarantine(self, index: int, now_s: float) -> None:
        self._table.to_quarantine(index, now_s)
        self._counts.quarantined += 1
