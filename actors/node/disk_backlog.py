"""What of the arena is still to be written to disk, and what on disk is no good. Pure; used under the agent's lock.

keep ---> waits ---next---> held in its slot, written by the agent's thread ---done---> on disk
            |
            +- evicted before its turn: not kept. A load never waits for the disk.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk
from storage.host.processes import ProcessId

_OWNER = "disk"  # in the cache's books: without a minimum, so it takes no slot that a load is waiting for


class DiskShelf(Protocol):
    """What is on disk (`storage.disk.tier.DiskTier`). Nothing here waits for the disk."""

    @property
    def unkept_chunks(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def touch(self, key: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """A committed chunk that the disk shall have."""

    chunk: CachedChunk
    hash_name: str = ""  # of its published digest; empty: it has none, and gets one of its own
    digest: bytes = b""


class DiskBacklog:
    """See above. Without a shelf the tier is off, and nothing is remembered."""

    def __init__(self, shelf: DiskShelf | None = None) -> None:
        self.evicted_chunks = 0  # gone from the arena before their turn
        self._shelf = shelf
        self._waiting: OrderedDict[bytes, DiskWrite] = OrderedDict()
        self._unusable: set[bytes] = set()

    @property
    def on(self) -> bool:
        return self._shelf is not None

    @property
    def unkept_chunks(self) -> int:
        """Chunks that should be on disk and are not: evicted too soon, refused by the disk or by the budget."""
        return self.evicted_chunks + (0 if self._shelf is None else self._shelf.unkept_chunks)

    def __len__(self) -> int:
        return len(self._waiting)

    def on_disk(self, key: bytes) -> bool:
        """Whether to read the chunk from there; it counts as used then."""
        if self._shelf is None or not self.has(key):
            return False
        self._shelf.touch(key)
        return True

    def has(self, key: bytes) -> bool:
        """Whether the chunk could be read from there."""
        return self._shelf is not None and key in self._shelf and key not in self._unusable

    def keep(self, write: DiskWrite) -> None:
        """The chunk is in the arena, verified."""
        key = write.chunk.key
        if self._shelf is not None and not self.has(key):
            self._waiting[key] = write

    def unusable(self, key: bytes) -> None:
        """A rank could not read it from there."""
        if self._shelf is not None and key in self._shelf:
            self._unusable.add(key)

    def forget(self, key: bytes) -> None:
        """The bytes that are kept under `key`, waiting, being written or on disk, turned out to be wrong."""
        if self._shelf is not None:
            self._waiting.pop(key, None)
            self._unusable.add(key)

    # -- the writing thread ------------------------------------------------------------------------------------

    def next_unusable(self) -> bytes | None:
        """A key whose file is to be removed; `removed` then."""
        return next(iter(self._unusable), None)

    def removed(self, key: bytes) -> None:
        self._unusable.discard(key)

    def next(self, cache: ChunkCache, writer: ProcessId) -> DiskWrite | None:
        """The next one, its slot held for `writer`; None when there is none, or loads need all slots now."""
        for key, write in list(self._waiting.items()):
            if cache.hold(write.chunk, writer, (_OWNER, key), owner=_OWNER):
                del self._waiting[key]
                return write
            if key in cache:
                return None
            self.evicted_chunks += 1
            del self._waiting[key]
        return None

    def done(self, write: DiskWrite, cache: ChunkCache, writer: ProcessId) -> None:
        """Its slot is not read any more."""
        cache.release(write.chunk, writer, (_OWNER, write.chunk.key))
