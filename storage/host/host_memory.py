"""How much memory this host, its containers and a folder's file system can still give.

What a process takes comes out of several pools at once: the host's memory, and that of each control group around it
that has a limit (a container, a pod, a batch job, a service), of version 1 and 2, also where `memory.high` would only
throttle. Processes that share a pool know it by the same id, whatever namespace they look from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory that several processes share."""

    pool_id: str
    free_bytes: int  # that can be taken without swapping
    total_bytes: int
    reserve_bytes: int = 0  # of the free ones, to be left by whoever asked: above that it would be ended


def memory_pools(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> tuple[MemoryPool, ...]:
    """The host's memory, then that of each control group around this process that has a limit.

    Raises OSError when the kernel does not tell.
    """
    found = {}
    for line in Path(proc, "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemAvailable", "MemTotal"):
            found[name] = int(rest.split()[0]) * 1024
    if "MemAvailable" not in found:
        raise OSError(f"{proc}/meminfo has no MemAvailable")
    total_bytes = found.get("MemTotal", found["MemAvailable"])
    boot = _text(Path(proc, "sys/kernel/random/boot_id"))
    pools = {f"host {boot}": MemoryPool(f"host {boot}", found["MemAvailable"], total_bytes)}
    for folder, version in _groups(Path(proc), Path(cgroup)):
        pool = _limited(folder, version, boot)
        if pool is not None and pool.total_bytes < total_bytes:
            pools[pool.pool_id] = pool
    return tuple(pools.values())


def available_host_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Memory that can be taken without swapping: what the host has, or the tightest limit leaves.

    Raises OSError when the kernel does not tell.
    """
    return min(pool.free_bytes for pool in memory_pools(proc, cgroup))


def _groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's control group and of each around it, as far as they can be seen."""
    own = {}  # version -> path
    for line in _text(proc / "self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for root, version in ((cgroup, 2), (cgroup / "unified", 2), (cgroup / "memory", 1)):
        parts = [part for part in own.get(version, "").split("/") if part]
        # In a namespace of its own, or where only its own part is mounted, the path leads nowhere: the root is it.
        if ".." in parts or not root.joinpath(*parts).is_dir():
            parts = []
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth]), version


def _limited(folder: Path, version: int, boot: str) -> MemoryPool | None:
    """What the control group's limits leave, page cache counted as free; None without a limit."""
    names = {
        1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
        2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    }
    limit_names, used_name, cache_name = names[version]
    limits = [int(text) for name in limit_names if (text := _text(folder / name)).isdigit()]  # else "max": none
    used = _text(folder / used_name)
    if not limits or not used.isdigit():
        return None
    stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    # Of groups around it that cannot be seen from here.
    limits += [int(stat[name]) for name in ("hierarchical_memory_limit",) if stat.get(name, "").isdigit()]
    limit = min(limits)
    free = limit - int(used) + int(stat.get(cache_name, 0))
    return MemoryPool(f"cgroup{version} {boot} {folder.stat().st_ino}", max(0, min(limit, free)), limit)


def _text(path: Path) -> str:
    """What a file of the kernel says; empty where there is none. Names of folders in it may be any bytes."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


def free_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes an ordinary user can still write in the file system of `directory`."""
    info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize


def is_memory_backed(directory: str | os.PathLike[str]) -> bool:
    """Whether files in `directory` live in memory (tmpfs) and so count against the host's, too."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]:  # names of folders may be any bytes
        left, _, right = line.partition(b" - ")
        if left.split()[2].decode() == wanted:
            return right.split()[0] in (b"tmpfs", b"ramfs", b"devtmpfs")
    return False
