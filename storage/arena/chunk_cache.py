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

With kept slots, a lease can take a second slot, to which its holder copies the verified chunk. Later loads lease a
window slot again and read the kept copy instead of the store:

    lease(keep=True) --> window slot + kept slot --commit(kept=True)--> both committed; the window slot is free again
                                                                        as soon as no rank reads it
    lease of a chunk that is kept --> window slot, and a hold on the kept one until the lease has ended
    shrink --> the least recently used kept slots are leased to the caller, who gives their memory back

Each change of state is written to a SlotJournal before it is returned. So an agent that restarts (`restore`) never
hands out a slot that a process may still touch. It finds the slots as the journal has them, and each committed chunk
is held for every process that may still be reading.
"""

from __future__ import annotations

import heapq
import math
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
    """Return how many of these slots have memory: one that was ever used has, even if `ready_slots` is smaller."""
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
    table.window.free.clear()
    table.kept.free.clear()
    for index, record in enumerate(records):
        table.slots[index].generation = record.generation
        region = table.region(index)
        if record.state is SlotState.COMMITTED and record.key not in region.by_key:
            table.restore_committed(index, record)
            for process in survivors:
                table.hold(index, (process, _SURVIVOR), None)
            table.settle(index)
        elif record.state in (SlotState.LEASED, SlotState.QUARANTINED) and record.holder is not None:
            generation = record.generation
            lease_id = table.lease_id(index, generation)
            lease = Lease(lease_id, index, generation, record.key, record.holder, None, now_s, may_kill=record.may_kill)
            table.to_leased(index, lease)
            table.to_quarantine(index, now_s)
            quarantined.append(lease)
        elif index < ready_slots or not table.in_window(index):
            region.free.append(index)
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

    slot_count: int  # of the window, as every number of slots here
    ready_slots: int
    free_slots: int
    leased_slots: int
    committed_slots: int
    quarantined_slots: int
    in_use_slots: int  # committed slots that cannot be evicted now
    used_bytes: int  # of committed chunks that stay: in kept slots, or in the window of an arena without kept slots
    hits: int
    misses: int
    committed: int
    evicted: int
    expired: int  # leases that ended at their deadline
    duplicates: int  # commits of a chunk that another slot had already
    quarantined: int  # slots that went into quarantine
    kept_in_use_slots: int = 0  # kept slots that are being written or read, or that a load will read


def stats_of(table: SlotTable, counts: CacheCounts, ready_slots: int) -> CacheStats:
    """Return the counts and the state of the slots now, in O(1)."""
    committed_slots = len(table.window.by_key)
    has_kept_slots = len(table.slots) > table.window_slots
    return CacheStats(
        slot_count=table.window_slots,
        ready_slots=ready_slots,
        free_slots=len(table.window.free),
        leased_slots=table.leased_slots,
        committed_slots=committed_slots,
        quarantined_slots=sum(table.in_window(index) for index in table.quarantine),
        in_use_slots=committed_slots - len(table.window.evictable),
        kept_in_use_slots=len(table.slots) - table.window_slots - len(table.kept.free) - len(table.kept.evictable),
        used_bytes=(table.kept if has_kept_slots else table.window).used_bytes,
        hits=counts.hits,
        misses=counts.misses,
        committed=counts.committed,
        evicted=counts.evicted,
        expired=counts.expired,
        duplicates=counts.duplicates,
        quarantined=counts.quarantined,
    )


class ChunkCache:
    """The chunks in the slots of an arena. Operations are O(1) or O(log n), except those that end many things."""

    def __init__(
        self,
        slot_count: int,
        *,
        window_slots: int | None = None,
        journal: SlotJournal | None = None,
        ready_slots: int | None = None,
    ) -> None:
        """Set up the cache.

        Args:
            slot_count: Slots of the arena, kept slots included.
            window_slots: Slots that can be leased to fetch into. Default: all, so none is a kept slot.
            journal: Where records of slots go.
            ready_slots: Slots of the window that have memory. Default: all. `add_ready` adds more.
        """
        self.slot_count = slot_count
        self.window_slots = slot_count if window_slots is None else window_slots
        if not 1 <= self.window_slots <= slot_count:
            raise ValueError("a chunk cache must have at least 1 slot, and no more in its window than in all")
        self.kept_slots = slot_count - self.window_slots
        self.shares = SlotShares(self.window_slots)
        self.may_grow = True  # kept slots may take memory that they do not have yet; set by the caller
        self._journal: SlotJournal = MemoryJournal(slot_count) if journal is None else journal
        self._table = SlotTable(slot_count, self.window_slots, self._journal, self.shares)
        self._table.kept.free.extend(reversed(range(self.window_slots, slot_count)))
        self._touched: set[int] = set()  # kept slots that have memory
        self._deadlines: list[tuple[float, int, int]] = []  # (deadline, slot, generation), a heap
        self._ready_slots = 0
        self._counts = CacheCounts()
        self.add_ready(self.window_slots if ready_slots is None else ready_slots)

    def add_ready(self, ready_slots: int) -> None:
        """Note that slots `[0, ready_slots)` have memory now. A number below the last one changes nothing."""
        ready_slots = min(ready_slots, self.window_slots)
        self._table.window.free.extend(range(self._ready_slots, ready_slots))
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
            leased = slot.state is SlotState.LEASED and self._table.in_window(index)
            if leased and slot.lease is not None and slot.lease.owner == owner:
                revoked.append(slot.lease)
                self._quarantine(index, now_s)
            for pinner in [pinner for pinner, payer in slot.pins.items() if payer == owner]:
                self._table.unpin(index, pinner)
        self.shares.end(owner)
        return revoked

    # --- writing -------------------------------------------------------------------------------------------

    def lease(
        self,
        key: bytes,
        holder: ProcessId,
        deadline_s: float,
        *,
        owner: Hashable = None,
        keep: bool = False,
        may_kill: bool = True,
    ) -> Lease | None:
        """Lease a slot to `holder` to write the chunk into. None when no slot can be had now; try again later.

        Nobody sees the chunk until it is committed. A second lease for the same chunk (a hedge) gets another slot.
        Nothing is evicted until all slots have memory, so a load that fits the window stays in it whole.

        `keep`: lease a kept slot with it, unless the chunk is kept already or no kept slot can be had. `may_kill`: see
        `Lease`.
        """
        table, window = self._table, self._table.window
        may_evict = window.evictable and self._ready_slots == self.window_slots
        if not self.shares.may_claim(owner) or not (window.free or may_evict):
            self.shares.refused(owner)
            return None
        evicted_key = None
        if window.free:
            index = window.free.pop()
        else:
            index, evicted_key = table.evict_oldest(window)
            self._counts.evicted += 1
        generation = table.slots[index].generation + 1
        lease_id = table.lease_id(index, generation)
        read, keeping = self.kept(key), None
        if read is not None:
            self._counts.hits += 1
            table.hold(read.slot, (holder, lease_id), None)
        elif keep:
            keeping = self._lease_kept(key, holder, deadline_s, may_kill)
        lease = Lease(lease_id, index, generation, key, holder, owner, deadline_s, evicted_key, read, keeping, may_kill)
        table.to_leased(index, lease)
        heapq.heappush(self._deadlines, (deadline_s, index, generation))
        self.shares.satisfied(owner)
        return lease

    def in_flight(self, key: bytes) -> tuple[Lease, ...]:
        """Return the running leases for the chunk, of all holders. Expired and revoked leases do not count."""
        slots = self._table.in_flight.get(key, ())
        return tuple(lease for index in slots if (lease := self._table.slots[index].lease) is not None)

    def commit(
        self, lease_id: str, length_bytes: int, pinners: Iterable[Hashable] = (), *, kept: bool = False
    ) -> Answer:
        """Accept a chunk that the holder wrote and verified. From now on `lookup` finds it.

        `kept`: the holder has copied it to the lease's kept slot too. From now on `kept` finds it there.

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
        if slot.key in self._table.window.by_key:
            self._counts.duplicates += 1
            self._free(index)
            return Answer.DUPLICATE
        self._table.to_committed(index, length_bytes)
        self._end_kept(lease, length_bytes if kept else None)
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
        self._free(index)
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
            if slot.state is SlotState.FREE:
                continue  # a kept slot, freed with its lease
            if slot.state is SlotState.LEASED and slot.lease is not None and self._table.in_window(index):
                lost.append(slot.lease)
            self._free(index)
        for index in sorted(self._table.held_by.get(process, ())):
            for reader in [reader for reader in self._table.slots[index].holds if reader[0] == process]:
                self._table.release(index, reader)
        return lost

    # --- reading -------------------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> CachedChunk | None:
        """Return the chunk that is committed in the window, now the most recently used.

        Pin it in the same step, or it may be evicted.
        """
        index = self._table.window.by_key.get(key)
        if index is None:
            self._counts.misses += 1
            return None
        self._counts.hits += 1
        return self._used_now(index)

    def kept(self, key: bytes) -> CachedChunk | None:
        """Return the chunk's kept copy, now the most recently used. Pin it in the same step, or it may be evicted."""
        index = self._table.kept.by_key.get(key)
        return None if index is None else self._used_now(index)

    def in_window(self, key: bytes) -> bool:
        """Return whether `lookup` finds the chunk."""
        return key in self._table.window.by_key

    def has(self, chunk: CachedChunk) -> bool:
        """Return whether this copy of the chunk is still in its slot."""
        return self._table.has(chunk)

    def copy(self, key: bytes) -> CachedChunk | None:
        """Return a copy of the chunk, the kept one if there is one. Changes nothing, and counts nothing."""
        index = self._table.kept.by_key.get(key, self._table.window.by_key.get(key))
        return None if index is None else self._table.chunk(index)

    def __contains__(self, key: object) -> bool:
        return key in self._table.window.by_key or key in self._table.kept.by_key

    def pin(self, chunk: CachedChunk, pinner: Hashable, *, owner: Hashable = None) -> bool:
        """Keep the chunk for `pinner` (one rank of one attempt of a load), counted for the owner. Idempotent.

        False when the chunk was evicted, or the owner may use no more slots now. Then nothing changed.
        """
        if not self._table.has(chunk):
            return False
        if pinner not in self._table.slots[chunk.slot].pins:
            if not self._may_use(owner, chunk.slot):
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
            if not self._may_use(owner, chunk.slot):
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

    # --- the memory of kept slots --------------------------------------------------------------------------

    def shrink(self, holder: ProcessId) -> Lease | None:
        """Lease a kept slot that has memory to the caller, who frees that memory and then calls `shrunk`.

        Free slots come first, then the least recently used. None when no kept slot has memory that can be freed.
        """
        kept = self._table.kept
        index = next((index for index in reversed(kept.free) if index in self._touched), None)
        if index is not None:
            kept.free.remove(index)
        elif kept.evictable:
            index, _ = self._table.evict_oldest(kept)
            self._counts.evicted += 1
        else:
            return None
        return self._lease_at(index, secrets.token_bytes(KEY_BYTES), holder, math.inf)

    @property
    def reclaimable_slots(self) -> int:
        """Return how many kept slots have memory that `shrink` would free."""
        kept = self._table.kept
        return len(kept.evictable) + sum(index in self._touched for index in kept.free)

    def shrunk(self, lease: Lease) -> None:
        """Note that the slot of a lease of `shrink` has no memory any more. It is the last to be used again."""
        self._touched.discard(lease.slot)
        self._table.to_free(lease.slot)
        self._table.kept.free.remove(lease.slot)
        self._table.kept.free.insert(0, lease.slot)

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
        self._ready_slots = slots_with_memory(records[: self.window_slots], self._ready_slots)
        self._touched = {at for at, record in enumerate(records) if record.generation and at >= self.window_slots}
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

    def _used_now(self, index: int) -> CachedChunk:
        evictable = self._table.region(index).evictable
        if index in evictable:
            evictable.move_to_end(index)
        return self._table.chunk(index)

    def _may_use(self, owner: Hashable, slot: int) -> bool:
        return not self._table.in_window(slot) or self.shares.may_use(owner, slot)

    def _lease_kept(self, key: bytes, holder: ProcessId, deadline_s: float, may_kill: bool) -> CachedChunk | None:
        """Lease a kept slot: one that has memory, else a new one where memory may grow, else the least recently used.

        None when there is none.
        """
        kept = self._table.kept
        if kept.free and (self.may_grow or kept.free[-1] in self._touched):
            index = kept.free.pop()
        elif kept.evictable:
            index, _ = self._table.evict_oldest(kept)
            self._counts.evicted += 1
        else:
            return None
        self._touched.add(index)
        self._lease_at(index, key, holder, deadline_s, may_kill)
        return self._table.chunk(index)

    def _lease_at(self, index: int, key: bytes, holder: ProcessId, deadline_s: float, may_kill: bool = True) -> Lease:
        generation = self._table.slots[index].generation + 1
        lease_id = self._table.lease_id(index, generation)
        lease = Lease(lease_id, index, generation, key, holder, None, deadline_s, may_kill=may_kill)
        self._table.to_leased(index, lease)
        return lease

    def _free(self, index: int) -> None:
        """Free a leased or quarantined slot, and what its lease has of the kept slots."""
        lease = self._table.slots[index].lease
        self._table.to_free(index)
        if lease is not None:
            self._end_kept(lease, None)

    def _end_kept(self, lease: Lease, length_bytes: int | None) -> None:
        """End what a lease has of the kept slots: its hold, and its slot, which has `length_bytes` or is free again."""
        slots = self._table.slots
        if lease.read is not None and (lease.holder, lease.lease_id) in slots[lease.read.slot].holds:
            self._table.release(lease.read.slot, (lease.holder, lease.lease_id))
        if lease.keep is None or slots[lease.keep.slot].generation != lease.keep.generation:
            return
        index = lease.keep.slot
        if slots[index].state not in (SlotState.LEASED, SlotState.QUARANTINED):
            return
        if length_bytes is None or lease.key in self._table.kept.by_key:
            self._table.to_free(index)
        else:
            self._table.to_committed(index, length_bytes)
            self._table.settle(index)

    def _quarantine(self, index: int, now_s: float) -> None:
        lease = self._table.slots[index].lease
        self._table.to_quarantine(index, now_s)
        self._counts.quarantined += 1
        if lease is not None and lease.keep is not None:
            self._table.to_quarantine(lease.keep.slot, now_s)
