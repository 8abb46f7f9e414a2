"""The slots of a cache after a restart: as the journal left them, and held by whoever may still be reading."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from storage.arena.leases import CachedChunk, Lease
from storage.arena.slot_records import SlotRecord, SlotState
from storage.arena.slot_table import SlotTable
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
