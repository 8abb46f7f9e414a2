"""What a node agent takes from its host: the arena's shared memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster.config import Config
from storage.arena.arena import Arena
from storage.arena.arena_files import check_room, default_arena_bytes, one_at_a_time, sweep, untouched_bytes
from storage.errors import ArenaCorrupt, ArenaTooSmall
from storage.host.memory import MemoryPool, available_host_bytes, free_bytes, memory_pools

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
