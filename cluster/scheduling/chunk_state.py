"""Where one chunk of a load is, on one node. `cluster.scheduling.lease_queue` moves it."""

from __future__ import annotations

import enum


class ChunkState(enum.Enum):
    """Where one needed chunk is."""

    PENDING = "pending"  # to be fetched, or taken from the cache
    WAITING = "waiting"  # somebody else is fetching the same bytes
    LEASED = "leased"  # being fetched, perhaps by more than one rank
    COMMITTED = "committed"  # in the arena; some rank has not placed it
    DONE = "done"  # no present rank needs it
