"""How much memory this host, its container and a folder's file system can still give."""

from __future__ import annotations

import os
from pathlib import Path


def available_host_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int:
    """Memory that can be taken without swapping: MemAvailable, or what the container's limit leaves.

    Raises OSError when the kernel does not tell.
    """
    available = None
    for line in Path(proc, "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if available is None:
        raise OSError(f"{proc}/meminfo has no MemAvailable")
    left = _container_bytes_left(Path(cgroup))
    return available if left is None else min(available, left)


def _container_bytes_left(cgroup: Path) -> int | None:
    """What the control group's limit leaves, page cache counted as free; None without a limit."""
    for limit_name, used_name, cache_name, folder in (
        ("memory.max", "memory.current", "inactive_file", cgroup),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", cgroup / "memory"),
    ):
        try:
            limit = int((folder / limit_name).read_text())  # "max" when unlimited: ValueError
            used = int((folder / used_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        return max(0, limit - used + int(stat.get(cache_name, 0)))
    return None


def free_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes an ordinary user can still write in the file system of `directory`."""
    info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize


def is_memory_backed(directory: str | os.PathLike[str]) -> bool:
    """Whether files in `directory` live in memory (tmpfs) and so count against the host's, too."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0] in ("tmpfs", "ramfs", "devtmpfs")
    return False
