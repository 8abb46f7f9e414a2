"""Which chunk is in which slot, who may touch it, which slot may be reused: LRU with leases and fences.

After a restart the slots are as the journal left them, and held for whoever may still be reading.

              lease                      commit                      pin, hold
      FREE ----------> LEASED ---------------------> COMMITTED <-----------------> in use
       ^ ^   abandon,    |                              |  ^        unpin, release
       | +---------------+ holder dead                  |  |
       |                 | deadline passed, revoked     +--+ evicted by a lease, when nobody uses it
       |                 v
       +---------- QUARANTINED                a deadline returns the chunk, never the slot: the holder may
        abandoned, holder dead                be writing until it says that it is not, or is dead

Pure: no clock, no I/O; the caller passes the time and does what the answers say. One thread at a time. State
changes are written to a SlotJournal before they are returned, so an agent that restarts (`restore`) never
hands out a slot that somebody may still touch.
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
    """How many slots have memory: one that was ever used has, whatever the last count (`ready_slots`) said."""
    used = [index for index, record in enumerate(records) if record.generation]
    return max([ready_slots, *(index + 1 for index in used)])


def restore_slots(
    table: SlotTable,
    records: Sequence[SlotRecord],
    ready_slots: int,
    survivors: Sequence[ProcessId],
    now_s: float,
) -> list[Lease]:
    """Fill a table that was never used; the leases of slots that are quarantined now.

    Committed chunks are back, each held for every survivor until `settle_survivor` or its death.
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
    """The survivor reads these (chunk, reader) and nothing else."""
    for chunk, reader in still_reading:
        if table.has(chunk):
            table.hold(chunk.slot, (process, reader), None)
    for index in sorted(table.held_by.get(process, ())):
        if (process, _SURVIVOR) in table.slots[index].holds:
            table.release(index, (process, _SURVIVOR))


@dataclass(slots=True)
class CacheCounts:
    """What has happened since the cache was made; see CacheStats."""

    hits: int = 0
    misses: int = 0
    committed: int = 0
    evicted: int = 0
    expired: int = 0
    duplicates: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made; `*_slots` and `used_bytes` are now."""

    slot_count: int
    ready_slots: int
    free_slots: int
    leased_slots: int
    committed_slots: int
    quarantined_slots: int
    in_use_slots: int  # committed ones that cannot be evicted now
    used_bytes: int  # of committed chunks
    hits: int
    misses: int
    committed: int
    evicted: int
    expired: int  # leases taken back after their deadline
    duplicates: int  # committed although another slot had the chunk
    quarantined: int  # slots that went into quarantine


def stats_of(table: SlotTable, counts: CacheCounts, ready_slots: int) -> CacheStats:
    """The numbers now, in O(1)."""
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
    """Chunks in `slot_count` slots. Operations are O(1) or O(log n), but for those that end many things."""

    def __init__(self, slot_count: int, *, journal: SlotJournal | None = None, ready_slots: int | None = None) -> None:
        """`ready_slots`: slots that have memory by now, all when not given; `add_ready` brings more."""
        if slot_count < 1:
            raise ValueError("a cache has at least one slot")
        self.slot_count, self.shares = slot_count, SlotShares(slot_count)
        self._journal: SlotJournal = MemoryJournal(slot_count) if journal is None else journal
        self._table = SlotTable(slot_count, self._journal, self.shares)
        self._deadlines: list[tuple[float, int, int]] = []  # (deadline, slot, generation), a heap
        self._ready_slots = 0
        self._counts = CacheCounts()
        self.add_ready(slot_count if ready_slots is None else ready_slots)

    def add_ready(self, ready_slots: int) -> None:
        """Slots `[0, ready_slots)` have memory now. A number below the last one changes nothing."""
        ready_slots = min(ready_slots, self.slot_count)
        self._table.free.extend(range(self._ready_slots, ready_slots))
        self._ready_slots = max(self._ready_slots, ready_slots)

    # --- shares --------------------------------------------------------------------------------------------

    def reserve(self, owner: Hashable, min_slots: int) -> bool:
        """Guarantee the owner that many slots at once. False: not yet, ask again. Raises ArenaTooSmall."""
        return self.shares.reserve(owner, min_slots)

    def end_owner(self, owner: Hashable, now_s: float) -> list[Lease]:
        """The owner is done: its pins dropped, its leases revoked (and returned), its minimum given back.

        Its readers and writers keep their slots until they let go or are dead.
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
        """A slot for `holder` to write the chunk into. None: none can be had now; try again when one is free.

        The chunk is invisible until committed. A second lease for the same chunk (a hedge) gets another slot. Nothing
        is evicted while slots are still to get their memory: a load that fits the arena stays in it whole.
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
        """Leases now running for the chunk, whoever has them; those taken back do not count."""
        slots = self._table.in_flight.get(key, ())
        return tuple(lease for index in slots if (lease := self._table.slots[index].lease) is not None)

    def commit(self, lease_id: str, length_bytes: int, pinners: Iterable[Hashable] = ()) -> Answer:
        """The holder wrote and verified the chunk: from now on `lookup` finds it.

        `pinners` pin it in the same step, on the account of the lease's owner. A lease that expired, was
        abandoned or is not known changes nothing. DUPLICATE: another lease had committed the chunk; this slot
        is free again and `pinners` have no pin.
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
        """The holder will not write to the slot again (its socket is closed): free, also from quarantine."""
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
        """Take back each lease whose deadline has passed: the chunk is anybody's, the slot quarantined."""
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
        """Take one lease back before its deadline. Its slot is quarantined."""
        index, answer = self._table.find(lease_id)
        if index is None:
            return answer
        if self._table.slots[index].state is not SlotState.LEASED:
            return Answer.LATE
        self._quarantine(index, now_s)
        return Answer.DONE

    def overdue(self, now_s: float, grace_s: float) -> list[Lease]:
        """Leases taken back `grace_s` ago or longer, and not let go: their holders are to be killed."""
        slots = self._table.slots
        return [
            lease
            for index in sorted(self._table.quarantine)
            if (lease := slots[index].lease) is not None and now_s - slots[index].quarantined_at_s >= grace_s
        ]

    def process_dead(self, process: ProcessId) -> list[Lease]:
        """The process is dead for certain: its slots are free of it. Returns the leases that still ran."""
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
        """The committed chunk, now the one used last. Pin it in the same step, or it may be evicted."""
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
        """Keep the chunk for `pinner` (one rank of one attempt of a load), on the owner's account.

        False when the chunk has been evicted since, or the owner may use no more slots now: then nothing
        changed. Pinning twice is pinning once.
        """
        if not self._table.has(chunk):
            return False
        if pinner not in self._table.slots[chunk.slot].pins:
            if not self.shares.may_use(owner, chunk.slot):
                return False
            self._table.pin(chunk.slot, pinner, owner)
        return True

    def unpin(self, chunk: CachedChunk, pinner: Hashable) -> bool:
        """The pinner needs the chunk no more. False when it had no pin: nothing changed."""
        if not self._table.has(chunk) or pinner not in self._table.slots[chunk.slot].pins:
            return False
        self._table.unpin(chunk.slot, pinner)
        return True

    def hold(self, chunk: CachedChunk, process: ProcessId, reader: Hashable, *, owner: Hashable = None) -> bool:
        """`reader` in `process` is about to be told that it may read: no reuse of the slot before `release`.

        False as for `pin`. Holding twice is holding once.
        """
        if not self._table.has(chunk):
            return False
        if (process, reader) not in self._table.slots[chunk.slot].holds:
            if not self.shares.may_use(owner, chunk.slot):
                return False
            self._table.hold(chunk.slot, (process, reader), owner)
        return True

    def release(self, chunk: CachedChunk, process: ProcessId, reader: Hashable) -> bool:
        """The reader is done with the slot, copies to the device included. False when it had no hold."""
        if not self._table.has(chunk) or (process, reader) not in self._table.slots[chunk.slot].holds:
            return False
        self._table.release(chunk.slot, (process, reader))
        return True

    def forget(self, key: bytes) -> None:
        """What is committed under `key` turned out to be wrong: nobody finds it any more."""
        self._table.rename(key, secrets.token_bytes(KEY_BYTES))

    # --- restart -------------------------------------------------------------------------------------------

    def restore(self, survivors: Iterable[ProcessId], now_s: float) -> list[Lease]:
        """Take over what an earlier cache wrote in the journal; on a cache that was never used.

        Committed chunks are back. Slots that were leased or quarantined are quarantined: their leases are
        returned; call `process_dead` for those whose holders are. `survivors` are the processes that map the
        arena now: each may be reading any chunk, so none is evicted before each is `settled` or dead.
        """
        if any(slot.generation for slot in self._table.slots):
            raise ValueError("only a fresh cache can be restored")
        records = self._journal.records()
        self._ready_slots = slots_with_memory(records, self._ready_slots)
        quarantined = restore_slots(self._table, records, self._ready_slots, list(survivors), now_s)
        self._counts.quarantined += len(quarantined)
        return quarantined

    def settled(self, process: ProcessId, still_reading: Iterable[tuple[CachedChunk, Hashable]] = ()) -> None:
        """A survivor of a restart has said what it still reads, as (chunk, reader); it reads nothing else."""
        settle_survivor(self._table, process, still_reading)

    def processes(self) -> set[ProcessId]:
        """Processes that write or read some slot: their deaths must be told to `process_dead`."""
        return {*self._table.leased_by, *self._table.held_by}

    # --- looking -------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Counts and the state of the slots, in O(1)."""
        return stats_of(self._table, self._counts, self._ready_slots)

    # --- inside --------------------------------------------------------------------------------------------

    def _quarantine(self, index: int, now_s: float) -> None:
        self._table.to_quarantine(index, now_s)
        self._counts.quarantined += 1
