"""The names, sizes and removal of arena files, without mapping them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from storage.arena.arena import KEPT, TOO_LARGE_HINT, is_at, promised_bytes
from storage.errors import ArenaTooLarge
from storage.host.memory import available_host_bytes, free_bytes, is_memory_backed

SHM_DIRECTORY = "/dev/shm"
ARENA_PREFIX = "longshore-arena-"
DEFAULT_MAX_BYTES = 8 << 30
DEFAULT_WINDOW_BYTES = 512 << 20  # 64 slots: enough for 31 ranks on a node, and small beside what a model takes
LOCK_PATIENCE_S = 10.0  # creating an arena is quick, and a stopped process must not stop us


def arena_path(cluster_id: str, node_id: str, directory: str = SHM_DIRECTORY) -> str:
    """Return the path of the arena of one node of one cluster. Two different pairs never share a path."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (cluster_id, node_id):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    readable = "-".join(re.sub(r"[^A-Za-z0-9_.]", "_", part)[:24] for part in (cluster_id, node_id))
    return os.path.join(directory, f"{ARENA_PREFIX}{readable}-{digest.hexdigest()}")


def default_arena_bytes(
    free_shm_bytes: int,
    *,
    slot_bytes: int,
    available_bytes: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> int:
    """Return the arena size when none is configured: a quarter of what is free, at most `max_bytes`, in whole slots.

    `available_bytes` is the host's free memory if /dev/shm takes from it, else None. Returns 0 when no slot fits.
    """
    free = free_shm_bytes if available_bytes is None else min(free_shm_bytes, available_bytes)
    return max(0, min(free // 4, max_bytes)) // slot_bytes * slot_bytes


def window_slots(arena_bytes: int, window_bytes: int, *, slot_bytes: int) -> int:
    """Return how many slots of an arena are its window.

    `window_bytes` is the configured size; 0: all of an arena of up to 1 GiB, else 512 MiB.
    """
    wanted = window_bytes or (DEFAULT_WINDOW_BYTES if arena_bytes > 2 * DEFAULT_WINDOW_BYTES else arena_bytes)
    return max(1, min(wanted, arena_bytes) // slot_bytes)


@contextlib.contextmanager
def one_at_a_time(directory: str) -> Iterator[None]:
    """Lock `directory` while the caller measures and takes room in it. Agents of several nodes may share a host."""
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # the caller's own check of the room reports the problem
        return
    try:
        deadline_s = time.monotonic() + LOCK_PATIENCE_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        yield
    finally:
        os.close(folder)


def untouched_bytes(directory: str = SHM_DIRECTORY) -> int:
    """Return the bytes that the windows of arenas in `directory` will still take.

    Their kept slots are not counted: they take memory only while there is some to spare.
    """
    total = 0
    for name in arena_names(directory):
        with contextlib.suppress(OSError), _opened(os.path.join(directory, name)) as descriptor:
            total += promised_bytes(descriptor)
    return total


def arena_names(directory: str = SHM_DIRECTORY) -> list[str]:
    """Return the names of arenas in `directory`, sorted; also of one of which only kept slots are left."""
    return sorted({name.partition(KEPT)[0] for name in _file_names(directory)})


def taken_bytes(directory: str = SHM_DIRECTORY) -> int:
    """Return the memory that the arenas in `directory` take now."""
    total = 0
    for name in _file_names(directory):
        with contextlib.suppress(OSError):
            total += os.stat(os.path.join(directory, name), follow_symlinks=False).st_blocks * 512
    return total


def _file_names(directory: str) -> list[str]:
    """Return the names of all files of arenas, sorted. Empty when the directory cannot be listed."""
    try:
        return sorted(name for name in os.listdir(directory) if name.startswith(ARENA_PREFIX))
    except OSError:
        return []


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a regular file for reading, whatever its name may lead to. Raises OSError."""
    # NONBLOCK: opening a pipe in this directory must not hang.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        yield descriptor
    finally:
        os.close(descriptor)


def check_room(directory: str, size_bytes: int, *, promised_bytes: int = 0, reserve_bytes: int = 0) -> None:
    """Raise ArenaTooLarge when an arena of `size_bytes` cannot fit in `directory` or in the host's memory.

    `promised_bytes` is what other arenas in the directory will still take. `reserve_bytes` is memory that must stay
    free on the host.
    """
    try:
        free = free_bytes(directory) - promised_bytes
        available = available_host_bytes() - promised_bytes if is_memory_backed(directory) else None
    except OSError as exc:
        raise ArenaTooLarge(
            f"cannot measure the room in {directory}: {exc.strerror or exc}", hint=TOO_LARGE_HINT
        ) from exc
    if size_bytes > free:
        raise ArenaTooLarge(
            f"{directory} has no room for the arena",
            hint=TOO_LARGE_HINT,
            wanted_bytes=size_bytes,
            free_bytes=max(0, free),
        )
    if available is not None and size_bytes + reserve_bytes > available:
        raise ArenaTooLarge(
            "the host has too little free memory for the arena",
            hint="set LONGSHORE_ARENA_BYTES to less, or give the host or container more memory",
            wanted_bytes=size_bytes,
            reserve_bytes=reserve_bytes,
            available_bytes=max(0, available),
        )


@dataclass(frozen=True, slots=True)
class SweptArena:
    """An arena that a sweep removed."""

    path: str
    freed_bytes: int  # memory it used; pages that were never touched do not count


def sweep(directory: str = SHM_DIRECTORY) -> list[SweptArena]:
    """Remove every arena in `directory` that no process has mapped, and return the removed ones in name order.

    Files in use are locked (`storage.arena.arena`). A new one is unlocked only for an instant, and its creator
    notices if it was removed. Files of other users, links and special files are left alone.
    """
    freed_bytes: dict[str, int] = {}
    for name in _file_names(directory):
        path = os.path.join(directory, name)
        freed = _remove_if_unlocked(path)
        if freed is not None:
            arena = path.partition(KEPT)[0]
            freed_bytes[arena] = freed_bytes.get(arena, 0) + freed
    return [SweptArena(path, freed) for path, freed in freed_bytes.items()]


def _remove_if_unlocked(path: str) -> int | None:
    """Remove the file if no process has locked it, and return the bytes freed. None when it was left alone."""
    with contextlib.suppress(OSError), _opened(path) as descriptor:
        info = os.fstat(descriptor)
        if info.st_uid != os.geteuid():
            return None
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another sweep and a new arena may have come in between, so check under the lock that the name still
        # means this file.
        if is_at(path, descriptor):
            os.unlink(path)
            return info.st_blocks * 512
    return None
