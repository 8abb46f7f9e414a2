"""The host's resources that a node agent uses: the arena's shared memory, the memory pools, and the GPUs' memory.

Opens the arena, fills its window, gives memory of kept chunks back, and measures the memory that a plan and the
heartbeat need to know.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from actors.node.disk_backlog import DiskWriter
from actors.node.node_ledger import NodeLedger
from cluster.config import Config
from cluster.messages import AgentBeat, RankBeat
from cluster.telemetry.stats import NodeMemory
from storage.arena.arena import Arena
from storage.arena.arena_files import (
    check_room,
    default_arena_bytes,
    one_at_a_time,
    sweep,
    untouched_bytes,
    window_slots,
)
from storage.arena.chunk_cache import ChunkCache
from storage.errors import ArenaCorrupt, ArenaError, ArenaTooSmall, LongshoreError
from storage.host.memory import (
    GpuMemory,
    MemoryPool,
    available_host_bytes,
    free_bytes,
    gpu_memory,
    memory_pools,
    own_bytes,
)
from storage.host.processes import ProcessId

# The most that an arena must leave free. The settings may ask for a larger reserve than the host has.
LEFT_BYTES = 512 << 20
LOOK_EVERY_SLOTS = 8
RAY_KILLS_ABOVE = 0.95  # Ray's default: above this share of memory in use it kills workers


def open_arena(config: Config, path: str, directory: str) -> tuple[Arena, bool]:
    """Open the arena that an earlier process of this agent left, or create one.

    Returns (the arena, whether it was there before).
    """
    try:
        return Arena.adopt(path), True
    except ArenaCorrupt:
        pass  # there is none, or it is not usable: create one
    with one_at_a_time(directory):
        sweep(directory)
        with contextlib.suppress(OSError):  # a process still maps it, and keeps its memory without the name
            if os.stat(path, follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(path)
        return _new_arena(config, path, directory), False


def _new_arena(config: Config, path: str, directory: str) -> Arena:
    promised = untouched_bytes(directory)
    size_bytes = config.arena_bytes or default_arena_bytes(
        free_bytes(directory) - promised,
        slot_bytes=config.slot_bytes,
        available_bytes=available_host_bytes() - promised,
    )
    slot_count = size_bytes // config.slot_bytes
    window = window_slots(slot_count * config.slot_bytes, config.window_bytes, slot_bytes=config.slot_bytes)
    if slot_count < 1:
        raise ArenaTooSmall(
            "the arena would not have a single slot",
            hint="raise LONGSHORE_ARENA_BYTES, or enlarge /dev/shm (docker --shm-size; emptyDir in memory)",
            arena_bytes=size_bytes,
            slot_bytes=config.slot_bytes,
        )
    reserve = min(config.host_reserve_bytes, LEFT_BYTES)
    check_room(directory, window * config.slot_bytes, promised_bytes=promised, reserve_bytes=reserve)
    info = os.statvfs(directory)
    # A limit beyond the file system would only make the header larger.
    slot_count = max(window, min(slot_count, info.f_blocks * info.f_frsize // config.slot_bytes))
    return Arena.create(path, slot_count=slot_count, slot_bytes=config.slot_bytes, window_slots=window)


def room_for_slots(config: Config) -> Callable[[], bool]:
    """Return a function that reports whether the host has memory for one more slot.

    The function is called before each slot and measures only once every LOOK_EVERY_SLOTS calls.
    """
    left_bytes = min(config.host_reserve_bytes, LEFT_BYTES) // 2 + LOOK_EVERY_SLOTS * config.slot_bytes
    asked = itertools.count()
    return lambda: bool(next(asked) % LOOK_EVERY_SLOTS) or available_host_bytes() > left_bytes


def host_pools(
    directory: str, environ: Mapping[str, str] = os.environ, reclaimable_bytes: int = 0
) -> tuple[MemoryPool, ...]:
    """Return the memory pools that this node's memory comes from.

    Memory that windows of arenas have yet to take is not counted as free. `reclaimable_bytes` is: kept chunks give it
    back when a load needs it. Memory above Ray's kill threshold is a reserve.
    Arenas abandoned since this agent began are swept. They belong to a node that was declared dead and came back under
    another id.
    """
    sweep(directory)
    promised, share = untouched_bytes(directory), ray_kills_above(environ)
    return tuple(
        replace(
            pool,
            free_bytes=max(0, pool.free_bytes - promised + reclaimable_bytes),
            reserve_bytes=pool.total_bytes - int(pool.total_bytes * share),
        )
        for pool in memory_pools()
    )


def ray_kills_above(environ: Mapping[str, str]) -> float:
    """Return the share of a host's memory in use above which Ray's monitor kills workers. 1.0: it kills none."""
    if environ.get("RAY_memory_monitor_refresh_ms", "").strip() == "0":
        return 1.0
    try:
        share = float(environ.get("RAY_memory_usage_threshold", RAY_KILLS_ABOVE))
    except ValueError:
        return RAY_KILLS_ABOVE
    return share if 0 < share <= 1 else RAY_KILLS_ABOVE


GPU_EVERY_S = 10.0  # on some hosts each measurement starts a process, the driver's command


class NodeMeter:
    """Measures the node's memory for each heartbeat. A thread measures the GPUs, because a driver may be slow."""

    def __init__(self, directory: str, disk: DiskWriter, stopped: threading.Event) -> None:
        """`directory` is the arena's."""
        self._directory = directory
        self._disk = disk
        self._stopped = stopped
        self._gpus: tuple[GpuMemory, ...] = ()
        self._numbers = itertools.count(1)

    def watch_gpus(self) -> None:
        """Measure the GPUs' memory until the agent stops. Return at once on a node without GPUs."""
        self._gpus = gpu_memory()
        while self._gpus and not self._stopped.wait(GPU_EVERY_S):
            self._gpus = gpu_memory() or self._gpus  # a driver may fail to answer once, and answer later

    def complete(self, beat: AgentBeat) -> AgentBeat:
        """Return the heartbeat with its number and the memory stats, which the ledger lacks. Not thread-safe."""
        beat = replace(beat, number=next(self._numbers))
        if beat.stats is None:
            return beat
        stats = replace(beat.stats, disk=self._disk.stats(), memory=self._memory())
        return replace(beat, stats=stats, ranks=tuple(_with_memory(rank) for rank in beat.ranks))

    def _memory(self) -> NodeMemory:
        memory = NodeMemory(agent_bytes=own_bytes(), gpus=self._gpus)
        with contextlib.suppress(OSError):
            pool = min(memory_pools(), key=lambda pool: pool.free_bytes)
            memory = replace(memory, host_free_bytes=pool.free_bytes, host_total_bytes=pool.total_bytes)
        with contextlib.suppress(OSError):
            info = os.statvfs(self._directory)
            total_bytes = info.f_blocks * info.f_frsize
            memory = replace(memory, shm_free_bytes=free_bytes(self._directory), shm_total_bytes=total_bytes)
        return memory


def _with_memory(rank: RankBeat) -> RankBeat:
    """Return the rank's beat with its process's memory, which is 0 when the process is gone."""
    return replace(rank, own_bytes=own_bytes(rank.pid)) if rank.pid else rank


_LOG = logging.getLogger("longshore.agent")
ROOM_EVERY_S = 0.05  # measuring takes about 0.1 ms
ROOM_MARGIN_BYTES = 64 << 20  # kept chunks take memory down to this above the floor, and give it back below the floor
LEFT_IN_SHM = 1 / 32  # of its file system: others would get a SIGBUS for a page that they cannot have


class KeptMemory:
    """The memory of kept chunks: it grows while the host has some to spare, and is given back when it has not."""

    def __init__(
        self, config: Config, arena: Arena, cache: ChunkCache, ledger: NodeLedger, lock: threading.Condition
    ) -> None:
        """`lock` is the agent's, around cache and ledger."""
        self._config = config
        self._arena = arena
        self._cache = cache
        self._ledger = ledger
        self._lock = lock
        self._promised_bytes = 0  # as the ledger said last
        self._directory = os.path.dirname(arena.path)
        self._left_above = ray_kills_above(os.environ)
        info = os.statvfs(self._directory)
        self._left_in_shm_bytes = int(info.f_blocks * info.f_frsize * LEFT_IN_SHM)
        self._margin_bytes = min(ROOM_MARGIN_BYTES, self._left_in_shm_bytes)
        self._measured_s = -math.inf
        self._used = (0, 0)
        self._used_s = time.monotonic()

    @property
    def reclaimable_bytes(self) -> int:
        """Return the memory that can be given back now. Call it under the lock."""
        kept_bytes = self._arena.taken_bytes - self._arena.window_slots * self._arena.slot_bytes
        return max(0, min(kept_bytes, self._cache.reclaimable_slots * self._arena.slot_bytes))

    def look(self) -> None:
        """Set whether kept chunks may take more memory. Call it under the lock, as often as you like."""
        now_s = time.monotonic()
        if now_s - self._measured_s >= ROOM_EVERY_S:
            self._measured_s = now_s
            self._promised_bytes = self._ledger.promised_bytes
            self._cache.may_grow = self._spare_bytes() > self._margin_bytes

    def give_back(self) -> None:
        """Give memory back if the host lacks some, or nobody used a kept chunk for `cache_idle_s`. Takes the lock."""
        with self._lock:
            stats, self._promised_bytes = self._cache.stats(), self._ledger.promised_bytes
        if self._spare_bytes() < 0:
            self._shrink(lambda: self._spare_bytes() > self._margin_bytes)
        used, now_s = (stats.hits, stats.committed), time.monotonic()
        if used != self._used:
            self._used, self._used_s = used, now_s
        elif self._config.cache_idle_s and now_s - self._used_s > self._config.cache_idle_s:
            self._shrink(lambda: False)

    def make_room(self, host_bytes: int) -> None:
        """Give back so much that `host_bytes` of tensors find memory beside those of other loads. Takes the lock."""
        if host_bytes:
            with self._lock:
                self._promised_bytes = self._ledger.promised_bytes
            try:
                self._shrink(lambda: self._host_spare_bytes() >= host_bytes)
            except ArenaError as error:  # it may fit all the same
                _LOG.warning("%s", error)

    def _shrink(self, enough: Callable[[], bool]) -> None:
        while not enough():
            with self._lock:
                self._promised_bytes = self._ledger.promised_bytes  # loads go on meanwhile
                lease = self._cache.shrink(ProcessId.current())
            if lease is None:
                return
            try:
                self._arena.give_back(lease.slot)  # without the lock: it takes a millisecond
            except ArenaError:
                with self._lock:
                    self._cache.abandon(lease.lease_id)  # it keeps its memory
                raise
            with self._lock:
                self._cache.shrunk(lease)

    def _spare_bytes(self) -> int:
        """Return the memory that kept chunks can take before a floor is reached: the host's or the file system's."""
        try:
            return min(self._host_spare_bytes(), free_bytes(self._directory) - self._left_in_shm_bytes)
        except OSError:
            return 0

    def _host_spare_bytes(self) -> int:
        """Return the memory that can be taken before the host's floor, or Ray's threshold, is reached.

        What loads here have still to take for tensors is not theirs to take.
        """
        floor_bytes = min(self._config.host_reserve_bytes, LEFT_BYTES)
        try:
            return (
                min(
                    pool.free_bytes - max(floor_bytes, int(pool.total_bytes * (1 - self._left_above)))
                    for pool in memory_pools()
                )
                - self._promised_bytes
            )
        except OSError:
            return 0  # nobody knows: keep nothing more, and give nothing back


LOOK_S = 0.01


class ArenaFilling:
    """The threads that give each slot of the window its memory.

    They end when all have it, or with `error` when the host runs out.
    """

    def __init__(
        self, config: Config, arena: Arena, ledger: NodeLedger, lock: threading.Condition, stopped: threading.Event
    ) -> None:
        """`lock` is the agent's, around the ledger. It is notified when slots are ready, and when filling fails."""
        self.error: LongshoreError | None = None
        self._config = config
        self._arena = arena
        self._ledger = ledger
        self._lock = lock
        self._stopped = stopped

    def touch(self) -> None:
        """Give memory to slot after slot. Each is usable once it is ready. The thread has this method's name."""
        try:
            self._arena.reserve(self._stopped.is_set, room_for_slots(self._config))
        except LongshoreError as error:
            self.error = error
            with self._lock:
                self._ledger.fail_all(error)
                self._lock.notify_all()

    def announce_ready(self) -> None:
        """Notify the ledger of slots as they get their memory. The thread has this method's name."""
        announced = -1
        while not self._stopped.is_set() and announced < self._arena.window_slots and self.error is None:
            ready = self._arena.ready_slots
            if ready != announced:
                announced = ready
                with self._lock:
                    self._ledger.add_ready(ready)
                    self._lock.notify_all()
            self._stopped.wait(LOOK_S)
