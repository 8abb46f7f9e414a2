"""The slots of an arena: their states, their records, and how many each owner may use.

`storage.arena.chunk_cache` decides which change of state is allowed. Here each change updates the slot, writes its
record, and updates the indexes and shares that depend on it. All changes are O(1).

Regions: the first slots are the *window*, which every process maps and works in. The others are *kept* slots, which
nobody maps: a chunk that stays for later loads is copied there. A chunk may have a slot in each region. A window slot
is free again as soon as nobody uses it and its chunk is kept.

Records: a record is written *before* anybody is notified of the change (write-ahead). So a process that reads the
records after a crash knows at least as much as any worker did.

Shares: an owner is what the caller gives slots to (a load). It *uses* a slot while it has a claim on it, by a lease, a
pin or a reader. A slot that two owners use counts for both. Each owner has a guaranteed minimum. All other slots are
shared, and the oldest owner comes first. One law makes this safe:

    sum over owners of max(minimum, used) <= slot_count

So an owner below its minimum always finds an unused slot, whatever the others do. Shares count window slots only,
because no load needs a kept slot to make progress.
"""

from __future__ import annotations

import enum
import struct
import uuid
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from blake3 import blake3

from storage.errors import ArenaTooSmall
from storage.host.processes import ProcessId
from storage.stores.object_store import ByteRange


@dataclass(slots=True)
class _Share:
    age: int  # order of arrival: smaller is older
    minimum: int = 0  # slots guaranteed to it
    claims: Counter[int] = field(default_factory=Counter)  # slot -> claims on it

    @property
    def used(self) -> int:
        return len(self.claims)

    @property
    def demand(self) -> int:
        return max(self.minimum, len(self.claims))


class SlotShares:
    """Counts who uses which of `slot_count` slots. Operations are O(1), or O(owners) for a slot above the minimum."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self._shares: dict[Hashable, _Share] = {}
        self._queue: dict[Hashable, int] = {}  # owners that wait for their minimum, in order of arrival
        self._hungry: set[Hashable] = set()  # owners that were refused a shared slot and have had none since
        self._demand = 0  # sum of all demands
        self._minima = 0  # sum of all minima
        self._arrivals = 0

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """Return the owners whose `reserve` was not granted yet, in order of arrival."""
        return tuple(self._queue)

    def used(self, owner: Hashable) -> int:
        """Return how many slots the owner uses now."""
        share = self._shares.get(owner)
        return 0 if share is None else share.used

    def minimum(self, owner: Hashable) -> int:
        """Return how many slots are guaranteed to the owner."""
        share = self._shares.get(owner)
        return 0 if share is None else share.minimum

    def demand(self, owner: Hashable) -> int:
        """Return how many slots no other owner can have: those the owner uses, but at least its minimum."""
        share = self._shares.get(owner)
        return 0 if share is None else share.demand

    def reserve(self, owner: Hashable, minimum: int) -> bool:
        """Guarantee the owner `minimum` slots. False: ask again later; owners that asked earlier come first.

        Raises ArenaTooSmall when the arena has fewer slots than that.
        """
        if minimum > self.slot_count:
            raise ArenaTooSmall(
                "the arena has fewer slots than the load needs",
                hint="raise LONGSHORE_ARENA_BYTES and LONGSHORE_WINDOW_BYTES, or let fewer processes share the node",
                slots=self.slot_count,
                needed_slots=minimum,
            )
        if self.minimum(owner) >= minimum:
            return True
        self._queue[owner] = minimum
        if next(iter(self._queue)) != owner:
            return False
        share = self._share(owner)
        demand = self._demand - share.demand + max(minimum, share.used)
        if demand > self.slot_count:
            return False
        del self._queue[owner]
        self._minima += minimum - share.minimum
        self._demand = demand
        share.minimum = minimum
        return True

    def end(self, owner: Hashable) -> None:
        """End the owner's minimum and its wishes. Slots that it still uses count until its last claim is dropped."""
        self._queue.pop(owner, None)
        self._hungry.discard(owner)
        share = self._shares.get(owner)
        if share is None:
            return
        self._demand -= share.demand - share.used
        self._minima -= share.minimum
        share.minimum = 0
        self._forget(owner, share)

    def may_claim(self, owner: Hashable, slot: int | None = None) -> bool:
        """Return whether the owner may use one more slot. A known `slot` that it uses already is always allowed."""
        share = self._shares.get(owner)
        if share is not None and (share.used < share.minimum or (slot is not None and slot in share.claims)):
            return True
        if self._demand + 1 > self.slot_count or self._somebody_shrinks_us():
            return False
        age = self._arrivals if share is None else share.age
        return all(self._shares[other].age >= age for other in self._hungry)

    def may_use(self, owner: Hashable, slot: int) -> bool:
        """Return `may_claim` for that slot, and note a refusal so that younger owners wait."""
        if self.may_claim(owner, slot):
            self.satisfied(owner)
            return True
        self.refused(owner)
        return False

    def refused(self, owner: Hashable) -> None:
        """Note that the owner got no slot. Younger owners get no shared slot before it does.

        Only owners with a minimum are noted, because nothing reports the end of the others.
        """
        if self.minimum(owner):
            self._hungry.add(owner)

    def satisfied(self, owner: Hashable) -> None:
        """Note that the owner has got a slot, or wants none now."""
        self._hungry.discard(owner)

    def claim(self, owner: Hashable, slot: int) -> None:
        """Count one claim of the owner on the slot. Never refuses; ask `may_claim` first."""
        share = self._share(owner)
        before = share.demand
        share.claims[slot] += 1
        self._demand += share.demand - before

    def drop(self, owner: Hashable, slot: int) -> None:
        """Drop one claim of the owner on the slot. Raises KeyError when there is none."""
        share = self._shares[owner]
        if not share.claims[slot]:
            raise KeyError(slot)
        before = share.demand
        share.claims[slot] -= 1
        if not share.claims[slot]:
            del share.claims[slot]
        self._demand += share.demand - before
        self._forget(owner, share)

    def _somebody_shrinks_us(self) -> bool:
        """Return whether the first owner in the queue could get its minimum if the others used only theirs."""
        for owner, minimum in self._queue.items():
            return self._minima - self.minimum(owner) + minimum <= self.slot_count
        return False

    def _share(self, owner: Hashable) -> _Share:
        if owner not in self._shares:
            self._shares[owner] = _Share(self._arrivals)
            self._arrivals += 1
        return self._shares[owner]

    def _forget(self, owner: Hashable, share: _Share) -> None:
        if not share.minimum and not share.claims and owner not in self._queue and owner not in self._hungry:
            del self._shares[owner]


KEY_BYTES = 32


class SlotState(enum.IntEnum):
    """The states of a slot, by who may touch it."""

    FREE = 0  # nobody
    LEASED = 1  # its holder writes
    COMMITTED = 2  # readers read; the bytes were verified
    QUARANTINED = 3  # its lease has ended, but its holder may still be writing


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """The stored record of one slot."""

    state: SlotState = SlotState.FREE
    generation: int = 0  # number of leases this slot has had; never decreases
    length_bytes: int = 0  # of the committed chunk
    key: bytes = b""  # cache key of the chunk, KEY_BYTES long; empty for a free slot
    holder: ProcessId | None = None  # the process that writes or wrote; None for a free or committed slot
    may_kill: bool = True  # see `Lease`


FREE_RECORD = SlotRecord()


class SlotJournal(Protocol):
    """The store of slot records: an Arena's header, or memory in tests."""

    @property
    def epoch(self) -> str:
        """Return the unique name of this set of slots, which makes lease ids unique across restarts."""
        ...

    def write_record(self, slot: int, record: SlotRecord) -> None:
        """Store the record. A crash during the write leaves the previous record."""
        ...

    def records(self) -> Sequence[SlotRecord]:
        """Return the last record of each slot, in slot order."""
        ...


class MemoryJournal:
    """A journal in a list, for tests. Like an arena's file, it survives the cache that wrote it."""

    def __init__(self, slot_count: int) -> None:
        self.epoch = uuid.uuid4().hex[:12]
        self._records = [FREE_RECORD] * slot_count

    def write_record(self, slot: int, record: SlotRecord) -> None:
        self._records[slot] = record

    def records(self) -> Sequence[SlotRecord]:
        return tuple(self._records)


def digest_key(hash_name: str, digest: bytes, size_bytes: int) -> bytes:
    """Return the cache key of a chunk with a collision-resistant digest: equal bytes are one chunk in every model."""
    return _key("digest", hash_name, digest.hex(), str(size_bytes))


def location_key(store: str, object_key: str, version: str, byte_range: ByteRange) -> bytes:
    """Return the cache key of a chunk without such a digest, made from where it is stored.

    `store` names endpoint, bucket and prefix. `version` is the object's ETag, with its digest if it has one. For an
    object with neither, pass a value that no other load shares. Otherwise stale bytes could be taken for new ones.
    """
    return _key("location", store, object_key, version, str(byte_range.start), str(byte_range.end))


def _key(*parts: str) -> bytes:
    hasher = blake3()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(struct.pack("<Q", len(data)))  # otherwise ("ab", "c") and ("a", "bc") would give one key
        hasher.update(data)
    return hasher.digest()


# --- the stored form ---------------------------------------------------------------------------------------
# A slot has two copies of its record, and each write goes to the older one. A process killed during a write leaves
# one copy whose checksum fails, and the other one whole.

_COPY = struct.Struct("<QQQqQ32sB?2x")  # sequence, generation, length, pid, start time, key, state, spared
_CHECKSUM = struct.Struct("<I")
COPY_BYTES = 128
RECORD_BYTES = 2 * COPY_BYTES


def pack_copy(sequence: int, record: SlotRecord) -> bytes:
    """Return one copy as bytes, COPY_BYTES long. `sequence` counts the writes of this slot and begins at 1."""
    if record.key and len(record.key) != KEY_BYTES:
        raise ValueError(f"a cache key has {KEY_BYTES} bytes, this one {len(record.key)}")
    holder = record.holder or ProcessId(0, 0)
    body = _COPY.pack(
        sequence,
        record.generation,
        record.length_bytes,
        holder.pid,
        holder.start_time,
        record.key,
        record.state,
        not record.may_kill,
    )
    return (body + _CHECKSUM.pack(zlib.crc32(body))).ljust(COPY_BYTES, b"\0")


def unpack_copy(data: bytes | memoryview) -> tuple[int, SlotRecord] | None:
    """Return (sequence, record) of one copy. None when it was torn; sequence 0 when it was never written."""
    body = bytes(data[: _COPY.size])
    sequence, generation, length_bytes, pid, start_time, key, state, spared = _COPY.unpack(body)
    if not any(data):
        return 0, FREE_RECORD
    (checksum,) = _CHECKSUM.unpack(data[_COPY.size : _COPY.size + _CHECKSUM.size])
    if checksum != zlib.crc32(body) or sequence == 0 or state not in SlotState.__members__.values():
        return None
    holder = ProcessId(pid, start_time) if pid else None
    key = key if any(key) else b""
    return sequence, SlotRecord(SlotState(state), generation, length_bytes, key, holder, not spared)


class Answer(enum.Enum):
    """The result of a report about a lease."""

    DONE = "done"  # accepted
    REPEATED = "repeated"  # accepted before; nothing changed
    DUPLICATE = "duplicate"  # for a commit only: another slot has the chunk, so this slot is free again
    LATE = "late"  # the lease had already ended in another way; nothing changed
    UNKNOWN = "unknown"  # no such lease was ever granted; nothing changed

    def __bool__(self) -> bool:
        return self is Answer.DONE


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """A committed chunk and its slot. It may be read only while a pin or a hold protects it."""

    key: bytes
    slot: int
    generation: int  # rejects late messages: the slot may have had other chunks before and after
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one process to write one chunk into one slot, until a deadline."""

    lease_id: str  # unique over all leases of the arena, also across restarts
    slot: int
    generation: int  # number of leases the slot has had, this one included
    key: bytes  # the chunk's cache key
    holder: ProcessId  # the process that writes
    owner: Hashable  # the load that the slot counts for; None after a restart
    deadline_s: float  # on the caller's clock
    evicted_key: bytes | None = None  # key of the chunk that was evicted to free the slot
    read: CachedChunk | None = None  # the kept copy of the chunk, held for this lease
    keep: CachedChunk | None = None  # the kept slot to copy the chunk to, leased with this lease
    may_kill: bool = True  # the holder, if it does not let go of the slot; False for a program of a user


_Name = TypeVar("_Name")

Reader = tuple[ProcessId, Hashable]  # a process, and a name for the reader inside it


@dataclass(slots=True)
class Slot:
    """The state of one slot in the agent's memory."""

    state: SlotState = SlotState.FREE
    generation: int = 0  # number of leases it has had
    key: bytes = b""  # cache key of its chunk; empty when free
    length_bytes: int = 0  # of the committed chunk
    lease: Lease | None = None  # set while LEASED or QUARANTINED
    quarantined_at_s: float = 0.0
    pins: dict[Hashable, Hashable] = field(default_factory=dict)  # pinner -> owner that it counts for
    holds: dict[Reader, Hashable] = field(default_factory=dict)  # reader -> owner that it counts for

    @property
    def in_use(self) -> bool:
        """Return whether a committed chunk must stay because it is pinned or held."""
        return bool(self.pins or self.holds)


@dataclass(slots=True)
class Region:
    """The slots of one region, by state and key."""

    free: list[int] = field(default_factory=list)  # a stack: the slot freed last is reused first, its memory is warm
    by_key: dict[bytes, int] = field(default_factory=dict)  # committed chunks only
    evictable: OrderedDict[int, None] = field(default_factory=OrderedDict)  # committed, not in use, oldest first
    used_bytes: int = 0  # of committed chunks


class SlotTable:
    """All slots, indexed by state, key, process and pinner."""

    def __init__(self, slot_count: int, window_slots: int, journal: SlotJournal, shares: SlotShares) -> None:
        self.slots = [Slot() for _ in range(slot_count)]
        self.window_slots = window_slots
        self.window = Region()
        self.kept = Region()
        self.in_flight: defaultdict[bytes, set[int]] = defaultdict(set)  # key -> window slots LEASED for it
        self.leased_by: defaultdict[ProcessId, set[int]] = defaultdict(set)  # LEASED or QUARANTINED
        self.held_by: defaultdict[ProcessId, set[int]] = defaultdict(set)
        self.quarantine: set[int] = set()
        self.leased_slots = 0  # of the window
        self._journal = journal
        self._shares = shares

    # --- finding -------------------------------------------------------------------------------------------

    def in_window(self, index: int) -> bool:
        """Return whether the slot is part of the window."""
        return index < self.window_slots

    def region(self, index: int) -> Region:
        """Return the region of the slot."""
        return self.window if index < self.window_slots else self.kept

    def lease_id(self, index: int, generation: int) -> str:
        """Return the name of the lease that has this number on the slot."""
        return f"{self._journal.epoch}.{index}.{generation}"

    def find(self, lease_id: str) -> tuple[int | None, Answer]:
        """Return (slot, DONE) if this is the slot's last lease, else None and the reason."""
        epoch, _, rest = lease_id.partition(".")
        index_text, _, generation_text = rest.partition(".")
        if epoch != self._journal.epoch or not (index_text.isdecimal() and generation_text.isdecimal()):
            return None, Answer.UNKNOWN
        index, generation = int(index_text), int(generation_text)
        if index >= len(self.slots) or not 1 <= generation <= self.slots[index].generation:
            return None, Answer.UNKNOWN
        if generation < self.slots[index].generation:
            return None, Answer.LATE
        return index, Answer.DONE

    def chunk(self, index: int) -> CachedChunk:
        """Return the chunk in the slot, as it is named while this lease or this commit lasts."""
        slot = self.slots[index]
        return CachedChunk(slot.key, index, slot.generation, slot.length_bytes)

    def has(self, chunk: CachedChunk) -> bool:
        """Return whether exactly that chunk is still in that slot."""
        if not 0 <= chunk.slot < len(self.slots):
            return False
        slot = self.slots[chunk.slot]
        return slot.state is SlotState.COMMITTED and slot.generation == chunk.generation

    # --- moves between states ------------------------------------------------------------------------------

    def to_leased(self, index: int, lease: Lease) -> None:
        """Move the slot from FREE, or from an eviction, to LEASED. The record is written before the caller learns."""
        slot = self.slots[index]
        slot.state, slot.generation = SlotState.LEASED, lease.generation
        slot.key, slot.lease = lease.key, lease
        self._write(index)
        self.leased_by[lease.holder].add(index)
        if self.in_window(index):
            self.leased_slots += 1
            self.in_flight[lease.key].add(index)
            self._shares.claim(lease.owner, index)

    def to_committed(self, index: int, length_bytes: int) -> None:
        """Move the slot from LEASED to COMMITTED. The caller drops the lease's claim once the pins have theirs."""
        slot = self.slots[index]
        if slot.lease is not None:
            self._unindex_lease(index, slot.lease)
        slot.state, slot.length_bytes, slot.lease = SlotState.COMMITTED, length_bytes, None
        self._write(index)
        self.leased_slots -= self.in_window(index)
        self._index_committed(index)

    def to_quarantine(self, index: int, now_s: float) -> None:
        """Move the slot from LEASED to QUARANTINED: others may lease the chunk, and the slot waits for its holder."""
        slot = self.slots[index]
        slot.state, slot.quarantined_at_s = SlotState.QUARANTINED, now_s
        self._write(index)
        self.leased_slots -= self.in_window(index)
        self.quarantine.add(index)
        _discard(self.in_flight, slot.key, index)

    def to_free(self, index: int) -> None:
        """Move the slot from LEASED or QUARANTINED to FREE. Its holder must have stopped writing."""
        slot = self.slots[index]
        if slot.state is SlotState.LEASED:
            self.leased_slots -= self.in_window(index)
        self.quarantine.discard(index)
        lease, slot.state, slot.key, slot.lease = slot.lease, SlotState.FREE, b"", None
        self._write(index)
        if lease is not None:
            self._unindex_lease(index, lease)
            if self.in_window(index):
                self._shares.drop(lease.owner, index)
        self.region(index).free.append(index)

    def evict_oldest(self, region: Region) -> tuple[int, bytes]:
        """Hide the least recently used chunk and return its (slot, key). Lease the slot in the same step."""
        index, _ = region.evictable.popitem(last=False)
        return index, self._hide(index)

    def rename(self, key: bytes, new_key: bytes) -> None:
        """Give the copies committed under `key`, if any, another key. They stay while in use and are evicted first."""
        for region in (self.kept, self.window):
            if key not in region.by_key:
                continue
            index = region.by_key.pop(key)
            self.slots[index].key = new_key
            self._write(index)
            region.by_key[new_key] = index
            if index in region.evictable:
                region.evictable.move_to_end(index, last=False)

    def restore_committed(self, index: int, record: SlotRecord) -> None:
        """Restore a committed chunk from its record in the journal."""
        slot = self.slots[index]
        slot.state, slot.key, slot.length_bytes = SlotState.COMMITTED, record.key, record.length_bytes
        self._index_committed(index)

    # --- users of committed chunks -------------------------------------------------------------------------

    def pin(self, index: int, pinner: Hashable, owner: Hashable) -> None:
        """Pin the slot's chunk for `pinner`, counted for `owner`. Idempotent."""
        pins = self.slots[index].pins
        if pinner not in pins:
            pins[pinner] = owner
            self._claim(owner, index)
            self.settle(index)

    def unpin(self, index: int, pinner: Hashable) -> None:
        """Drop a pin, which must exist."""
        self._drop(self.slots[index].pins.pop(pinner), index)
        self.settle(index)

    def hold(self, index: int, reader: Reader, owner: Hashable) -> None:
        """Hold the slot for `reader`, counted for `owner`. Idempotent."""
        holds = self.slots[index].holds
        if reader not in holds:
            holds[reader] = owner
            self.held_by[reader[0]].add(index)
            self._claim(owner, index)
            self.settle(index)

    def release(self, index: int, reader: Reader) -> None:
        """Drop a hold, which must exist."""
        holds = self.slots[index].holds
        self._drop(holds.pop(reader), index)
        if not any(process == reader[0] for process, _ in holds):
            _discard(self.held_by, reader[0], index)
        self.settle(index)

    def settle(self, index: int) -> None:
        """Update whether a committed slot can be reused, after its users changed.

        A window slot whose chunk is kept is free at once, the next to be used. Another slot becomes the most recently
        used of those that can be evicted.
        """
        region = self.region(index)
        if self.slots[index].in_use:
            region.evictable.pop(index, None)
        elif region is self.window and self.slots[index].key in self.kept.by_key:
            region.evictable.pop(index, None)
            self._hide(index)
            self.slots[index].state, self.slots[index].key = SlotState.FREE, b""
            self._write(index)
            region.free.append(index)
        else:
            region.evictable[index] = None

    # --- inside --------------------------------------------------------------------------------------------

    def _write(self, index: int) -> None:
        slot = self.slots[index]
        holder, may_kill = (None, True) if slot.lease is None else (slot.lease.holder, slot.lease.may_kill)
        record = SlotRecord(slot.state, slot.generation, slot.length_bytes, slot.key, holder, may_kill)
        self._journal.write_record(index, record)

    def _index_committed(self, index: int) -> None:
        slot, region = self.slots[index], self.region(index)
        region.by_key[slot.key] = index
        region.used_bytes += slot.length_bytes

    def _hide(self, index: int) -> bytes:
        """Take a committed chunk out of the index, and return its key."""
        slot, region = self.slots[index], self.region(index)
        del region.by_key[slot.key]
        region.used_bytes -= slot.length_bytes
        slot.length_bytes = 0
        return slot.key

    def _claim(self, owner: Hashable, index: int) -> None:
        if self.in_window(index):
            self._shares.claim(owner, index)

    def _drop(self, owner: Hashable, index: int) -> None:
        if self.in_window(index):
            self._shares.drop(owner, index)

    def _unindex_lease(self, index: int, lease: Lease) -> None:
        _discard(self.in_flight, lease.key, index)
        _discard(self.leased_by, lease.holder, index)


def _discard(table: dict[_Name, set[int]], name: _Name, index: int) -> None:
    """Remove `index` from the set under `name`, and remove the set from the table when it is empty."""
    if name in table:
        table[name].discard(index)
        if not table[name]:
            del table[name]
