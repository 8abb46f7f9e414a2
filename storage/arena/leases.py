"""Leases, committed chunks and answers: the words in which agent and workers talk of slots."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

from storage.host.processes import ProcessId


class Answer(enum.Enum):
    """What became of a report about a lease."""

    DONE = "done"  # it was accepted
    REPEATED = "repeated"  # it had been accepted before; nothing changed
    DUPLICATE = "duplicate"  # commit only: the chunk was there already, the slot is free again
    LATE = "late"  # the lease had ended otherwise; nothing changed
    UNKNOWN = "unknown"  # no such lease was ever given; nothing changed

    def __bool__(self) -> bool:
        return self is Answer.DONE


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one process to write one chunk into one slot, until a deadline."""

    lease_id: str  # unique over all leases of the arena, restarts included
    slot: int
    generation: int  # how many leases the slot has had, this one included
    key: bytes  # the chunk's cache key
    holder: ProcessId  # who writes
    owner: Hashable  # for whom: the load; None after a restart
    deadline_s: float  # on the caller's clock
    evicted_key: bytes | None = None  # the chunk that had to make room


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """A committed chunk and where it is. Good for reading only while a pin or a hold protects it."""

    key: bytes
    slot: int
    generation: int  # fences late messages: the slot may have had other chunks before and after
    length_bytes: int
