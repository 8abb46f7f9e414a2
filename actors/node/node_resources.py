"""What a node agent takes from its host: the arena's shared memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from actors.node.disk_backlog import DiskWriter
from actors.node.node_ledger import NodeLedger
from cluster.config import Config
from cluster.messages import AgentBeat, RankBeat
from cluster.telemetry.stats import NodeMemory
from storage.arena.arena import Arena
from storage.arena.arena_files import check_room, default_arena_bytes, one_at_a_time, sweep, untouched_bytes
from storage.errors import ArenaCorrupt, ArenaTooSmall, LongshoreError
from storage.host.memory import (
    GpuMemory,
    MemoryPool,
    available_host_bytes,
    free_bytes,
    gpu_memory,
    memory_pools,
    own_bytes,
)

LEFT_BYTES = 512 << 20  # that an arena leaves, at most: the settings may ask for a larger reserve than a host has
LOOK_EVERY_SLOTS = 8
RAY_KILLS_ABOVE = 0.95  # share of the memory in use from which on Ray kills workers, unless it is told otherwise


def open_arena(config: Config, path: str, directory: str) -> tuple[Arena, bool]:
    """(the arena, whether it is the one an earlier process of this agent left)."""
    try:
        return Arena.adopt(path), True
    except ArenaCorrupt:
        pass  # none there, or not usable: a new one
    with one_at_a_time(directory):
        sweep(directory)
        return _new_arena(config, path, directory), False


def _new_arena(config: Config, path: str, directory: str) -> Arena:
    promised = untouched_bytes(directory)
    size_bytes = config.arena_bytes or default_arena_bytes(
        free_bytes(directory) - promised,
        slot_bytes=config.slot_bytes,
        available_bytes=available_host_bytes() - promised,
    )
    slot_count = size_bytes // config.slot_bytes
    if slot_count < 1:
        raise ArenaTooSmall(
            "the arena would not have a single slot",
            hint="raise LONGSHORE_ARENA_BYTES, or enlarge /dev/shm (docker --shm-size; emptyDir in memory)",
            arena_bytes=size_bytes,
            slot_bytes=config.slot_bytes,
        )
    reserve = min(config.host_reserve_bytes, LEFT_BYTES)
    check_room(directory, slot_count * config.slot_bytes, promised_bytes=promised, reserve_bytes=reserve)
    return Arena.create(path, slot_count=slot_count, slot_bytes=config.slot_bytes)


def room_for_slots(config: Config) -> Callable[[], bool]:
    """Asked before each slot gets its memory: whether the host can give it. It looks once in a while."""
    left_bytes = min(config.host_reserve_bytes, LEFT_BYTES) // 2 + LOOK_EVERY_SLOTS * config.slot_bytes
    asked = itertools.count()
    return lambda: bool(next(asked) % LOOK_EVERY_SLOTS) or available_host_bytes() > left_bytes


def host_pools(directory: str, environ: Mapping[str, str] = os.environ) -> tuple[MemoryPool, ...]:
    """What this node's memory comes out of. What its arenas are still to take is not free any more, and what Ray
    would kill workers for is a reserve. Arenas that were left since this agent began are swept: those of a node that
    was given up and came back under another id.
    """
    sweep(directory)
    promised, share = untouched_bytes(directory), ray_kills_above(environ)
    return tuple(
        replace(
            pool,
            free_bytes=max(0, pool.free_bytes - promised),
            reserve_bytes=pool.total_bytes - int(pool.total_bytes * share),
        )
        for pool in memory_pools()
    )


def ray_kills_above(environ: Mapping[str, str]) -> float:
    """Share of a host's memory in use from which on Ray's monitor kills workers; 1.0: it does not."""
    if environ.get("RAY_memory_monitor_refresh_ms", "").strip() == "0":
        return 1.0
    try:
        share = float(environ.get("RAY_memory_usage_threshold", RAY_KILLS_ABOVE))
    except ValueError:
        return RAY_KILLS_ABOVE
    return share if 0 < share <= 1 else RAY_KILLS_ABOVE


GPU_EVERY_S = 10.0  # where only the driver's command answers, each look is a process


class NodeMeter:
    """Looks when `complete` is called; at GPUs in a thread, because a driver may take its time."""

    def __init__(self, directory: str, disk: DiskWriter, stopped: threading.Event) -> None:
        """`directory` is the arena's."""
        self._directory = directory
        self._disk = disk
        self._stopped = stopped
        self._gpus: tuple[GpuMemory, ...] = ()
        self._numbers = itertools.count(1)

    def watch_gpus(self) -> None:
        """The thread's work, until the agent stops; ends at once on a node that has none."""
        self._gpus = gpu_memory()
        while self._gpus and not self._stopped.wait(GPU_EVERY_S):
            self._gpus = gpu_memory() or self._gpus  # a driver that does not answer once does so later

    def complete(self, beat: AgentBeat) -> AgentBeat:
        """With what the agent's ledger does not know. One at a time."""
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
    """0 when its process is gone, or was never there."""
    return replace(rank, own_bytes=own_bytes(rank.pid)) if rank.pid else rank


LOOK_S = 0.01


class ArenaFilling:
    """Ends when every slot has its memory, or with `error` when the host has no more to give."""

    def __init__(
        self, config: Config, arena: Arena, ledger: NodeLedger, lock: threading.Condition, stopped: threading.Event
    ) -> None:
        """`lock`: the agent's, around the ledger; notified when slots are ready, and when there will be no more."""
        self.error: LongshoreError | None = None
        self._config = config
        self._arena = arena
        self._ledger = ledger
        self._lock = lock
        self._stopped = stopped

    def touch(self) -> None:
        """A thread's work, named as the thread is: memory for slot after slot. They are usable as they are ready."""
        try:
            self._arena.reserve(self._stopped.is_set, room_for_slots(self._config))
        except LongshoreError as error:
            self.error = error
            with self._lock:
                self._ledger.fail_all(error)
                self._lock.notify_all()

    def announce_ready(self) -> None:
        """A thread's work, named as the thread is: the ledger hears of slots as they get their memory."""
        announced = -1
        while not self._stopped.is_set() and announced < self._arena.slot_count and self.error is None:
            ready = self._arena.ready_slots
            if ready != announced:
                announced = ready
                with self._lock:
                    self._ledger.add_ready(ready)
                    self._lock.notify_all()
            self._stopped.wait(LOOK_S)
