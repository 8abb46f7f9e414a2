"""How a chunk cache stands and what it has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from storage.arena.slot_table import SlotTable


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
