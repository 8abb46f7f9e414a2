"""The agent's thread that writes committed chunks to disk, behind the loads, and removes what cannot be read there."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from actors.node.disk_backlog import DiskBacklog, DiskWrite
from cluster.config import Config
from storage.arena.arena import Arena
from storage.arena.chunk_cache import ChunkCache
from storage.checksum import digest_of
from storage.disk.tier import DiskStats, DiskTier, Written
from storage.errors import DiskTierError
from storage.host.processes import ProcessId

OWN_HASH = "blake3"  # of chunks that were published without a digest
_LOG = logging.getLogger("longshore.disk")


class DiskWriter:
    """Off when the settings name no folder, or one that cannot be used: that is logged, and no load fails for it."""

    def __init__(
        self, config: Config, arena: Arena, cache: ChunkCache, lock: threading.Condition, stopped: threading.Event
    ) -> None:
        """`lock`: the agent's, around cache and backlog; notified when there may be something to write."""
        self._arena = arena
        self._cache = cache
        self._lock = lock
        self._stopped = stopped
        self._me = ProcessId.current()
        self._warned = False
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
        """None when the tier is off. Thread-safe; the lock is not needed."""
        if self._tier is None:
            return None
        stats = self._tier.stats()
        return replace(stats, unkept_chunks=self.backlog.unkept_chunks)

    def disk_write(self) -> None:
        """The thread's work, until the agent stops; named as the thread is."""
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
                        if not self._stopped.is_set():  # (asked under the lock, or its notification could be missed)
                            self._lock.wait()
                        continue
                if unusable is not None:
                    tier.discard(unusable)
                    with self._lock:
                        self.backlog.removed(unusable)
                elif write is not None:
                    self._write(tier, write)
        finally:
            tier.close()

    def _write(self, tier: DiskTier, write: DiskWrite) -> None:
        try:
            with self._arena.slot(write.chunk.slot)[: write.chunk.length_bytes] as data:
                hash_name = write.hash_name or OWN_HASH
                written = tier.write(write.chunk.key, hash_name, write.digest or digest_of(hash_name, data), data)
        finally:
            with self._lock:
                self.backlog.done(write, self._cache, self._me)
                self._lock.notify_all()  # a load may wait for the slot
        if written in (Written.FULL, Written.FAILED) and not self._warned:
            self._warned = True
            _LOG.warning("a chunk was not kept on disk in %s: %s (said once)", tier.path, tier.last_error)
