"""What a node agent takes from its host: the arena's shared memory; and what the host's GPUs have."""

from __future__ import annotations

import functools
import subprocess

from cluster.config import Config
from storage.arena import Arena
from storage.arena_files import check_room, default_arena_bytes, sweep
from storage.errors import ArenaCorrupt, ArenaTooSmall
from storage.host_memory import available_host_bytes, free_bytes


def open_arena(config: Config, path: str, directory: str) -> tuple[Arena, bool]:
    """(the arena, whether it is the one an earlier process of this agent left)."""
    try:
        return Arena.adopt(path), True
    except ArenaCorrupt:
        pass  # none there, or not usable: a new one
    sweep(directory)
    available = available_host_bytes()
    size_bytes = config.arena_bytes or default_arena_bytes(
        free_bytes(directory), slot_bytes=config.slot_bytes, available_bytes=available
    )
    slot_count = size_bytes // config.slot_bytes
    if slot_count < 1:
        raise ArenaTooSmall(
            "the arena would not have a single slot",
            hint="raise LONGSHORE_ARENA_BYTES, or enlarge /dev/shm (docker --shm-size; emptyDir in memory)",
            arena_bytes=size_bytes,
            slot_bytes=config.slot_bytes,
        )
    check_room(directory, slot_count * config.slot_bytes)
    return Arena.create(path, slot_count=slot_count, slot_bytes=config.slot_bytes), False


@functools.cache
def gpu_memory_bytes() -> tuple[int, ...]:
    """Memory of each GPU of the node, asked of the driver's own tool: this process must not open a CUDA context.

    Asked once in a process: it takes a good part of a second, and GPUs do not grow.
    """
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return tuple(int(line) * (1 << 20) for line in answer.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
