"""The queue of chunks from the arena to the disk tier, and the agent's thread that writes them.

keep ---> waits ---next---> held in its slot, written by the agent's thread ---done---> on disk
            |
            +- evicted before its turn: not kept. A load never waits for the disk.

`DiskBacklog` is the queue. It is pure and used under the agent's lock. `DiskWriter` is the thread's work.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.config import Config
from cluster.telemetry.logs import RepeatedWork
from storage.arena.arena import Arena
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk
from storage.checksum import digest_of
from storage.disk.tier import DiskStats, DiskTier, Written
from storage.errors import DiskTierError
from storage.host.processes import ProcessId

_OWNER = "disk"  # an owner of slots without a minimum, so it takes no slot that a load is waiting for


class DiskShelf(Protocol):
    """The index of chunks on disk (`storage.disk.tier.DiskTier`). No method waits for the disk."""

    @property
    def unkept_chunks(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def touch(self, key: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """A committed chunk to be written to disk."""

    chunk: CachedChunk
    hash_name: str = ""  # of its published digest; empty when it has none, and the writer computes one
    digest: bytes = b""


class DiskBacklog:
    """The chunks that wait to be written, and the files to be removed. Without a shelf the tier is off."""

    def __init__(self, shelf: DiskShelf | None = None) -> None:
        self.evicted_chunks = 0  # left the arena before their turn
        self.failed_chunks = 0  # could not be written, and not for a reason of the disk's
        self._shelf = shelf
        self._waiting: OrderedDict[bytes, DiskWrite] = OrderedDict()
        self._unusable: set[bytes] = set()

    @property
    def on(self) -> bool:
        """True when the disk tier is on."""
        return self._shelf is not None

    @property
    def unkept_chunks(self) -> int:
        """Chunks that should be on disk and are not: evicted too soon, refused by the disk or by the budget."""
        return self.evicted_chunks + self.failed_chunks + (0 if self._shelf is None else self._shelf.unkept_chunks)

    def __len__(self) -> int:
        return len(self._waiting)

    def on_disk(self, key: bytes) -> bool:
        """Return whether the disk has the chunk. If it has, mark it as used, because it will be read from there."""
        if self._shelf is None or not self.has(key):
            return False
        self._shelf.touch(key)
        return True

    def has(self, key: bytes) -> bool:
        """Return whether the disk has a usable copy of the chunk."""
        return self._shelf is not None and key in self._shelf and key not in self._unusable

    def keep(self, write: DiskWrite) -> None:
        """Queue a chunk that is verified in the arena, unless the disk already has it."""
        key = write.chunk.key
        if self._shelf is not None and not self.has(key):
            self._waiting[key] = write

    def unusable(self, key: bytes) -> None:
        """Mark a chunk's file for removal after a rank could not read it."""
        if self._shelf is not None and key in self._shelf:
            self._unusable.add(key)

    def forget(self, key: bytes) -> None:
        """Drop the bytes under `key` because they are wrong: queued, being written, or on disk."""
        if self._shelf is not None:
            self._waiting.pop(key, None)
            self._unusable.add(key)

    # -- the writing thread ------------------------------------------------------------------------------------

    def next_unusable(self) -> bytes | None:
        """Return a key whose file is to be removed, or None. Call `removed` afterwards."""
        return next(iter(self._unusable), None)

    def removed(self, key: bytes) -> None:
        """Note that the key's file is gone."""
        self._unusable.discard(key)

    def next(self, cache: ChunkCache, writer: ProcessId) -> DiskWrite | None:
        """Return the next write, with its slot held for `writer`. None when none waits, or loads need all slots."""
        for key, write in list(self._waiting.items()):
            chunk = write.chunk if cache.has(write.chunk) else cache.copy(key)  # the other copy may be left
            if chunk is None:
                self.evicted_chunks += 1
                del self._waiting[key]
                continue
            if cache.hold(chunk, writer, (_OWNER, key), owner=_OWNER):
                del self._waiting[key]
                return replace(write, chunk=chunk)
            if chunk == write.chunk:
                return None
        return None

    def done(self, write: DiskWrite, cache: ChunkCache, writer: ProcessId) -> None:
        """Release the slot of a write that has ended."""
        cache.release(write.chunk, writer, (_OWNER, write.chunk.key))


OWN_HASH = "blake3"  # for chunks that were published without a digest
_LOG = logging.getLogger("longshore.disk")


class DiskWriter:
    """The agent's thread that writes chunks to disk.

    It is off when the settings name no folder, or an unusable one. The latter is logged, and no load fails because of
    it.
    """

    def __init__(
        self, config: Config, arena: Arena, cache: ChunkCache, lock: threading.Condition, stopped: threading.Event
    ) -> None:
        """`lock` is the agent's, around cache and backlog. It is notified when there may be something to write."""
        self._arena = arena
        self._cache = cache
        self._lock = lock
        self._stopped = stopped
        self._me = ProcessId.current()
        self._warned = False
        self._work = RepeatedWork(_LOG)
        self._tier: DiskTier | None = None
        if config.disk_folder is not None:
            try:
                self._tier = DiskTier(config.disk_folder, config.disk_cache_bytes)
            except DiskTierError as error:
                _LOG.warning("chunks are not kept on disk: %s", error)
        self.backlog = DiskBacklog(self._tier)

    @property
    def path(self) -> str:
        """The folder that ranks read from; empty when the tier is off."""
        return "" if self._tier is None else self._tier.path

    def stats(self) -> DiskStats | None:
        """Return the tier's stats, or None when it is off. Thread-safe; the lock is not needed."""
        if self._tier is None:
            return None
        stats = self._tier.stats()
        return replace(stats, unkept_chunks=self.backlog.unkept_chunks)

    def disk_write(self) -> None:
        """Write queued chunks until the agent stops. The thread has this method's name."""
        tier = self._tier
        if tier is None:
            return
        try:
            tier.trim()
            while not self._stopped.is_set():
                with self._lock:
                    unusable = self.backlog.next_unusable()
                    write = None if unusable is not None else self.backlog.next(self._cache, self._me)
                    if unusable is None and write is None:
                        if not self._stopped.is_set():  # checked under the lock, or the notification could be missed
                            self._lock.wait()
                        continue
                with self._work.turn("the write of a chunk to disk"):
                    if unusable is not None:
                        self._remove(tier, unusable)
                    elif write is not None:
                        self._write(tier, write)
        finally:
            tier.close()

    def _remove(self, tier: DiskTier, key: bytes) -> None:
        try:
            tier.discard(key)
        finally:
            with self._lock:
                self.backlog.removed(key)

    def _write(self, tier: DiskTier, write: DiskWrite) -> None:
        try:
            with self._arena.view(write.chunk.slot, write.chunk.length_bytes) as data:
                hash_name = write.hash_name or OWN_HASH
                written = tier.write(write.chunk.key, hash_name, write.digest or digest_of(hash_name, data), data)
        except Exception:
            with self._lock:
                self.backlog.failed_chunks += 1
            raise
        finally:
            with self._lock:
                self.backlog.done(write, self._cache, self._me)
                self._lock.notify_all()  # a load may wait for the slot
        if written in (Written.FULL, Written.FAILED) and not self._warned:
            self._warned = True
            _LOG.warning("a chunk was not kept on disk in %s: %s (reported once)", tier.path, tier.last_error)
