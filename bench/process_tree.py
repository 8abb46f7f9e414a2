"""What a process and all its descendants cost: CPU seconds and memory, from /proc."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Collection, Iterator

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Ray's own processes, apart from the workers that it starts for us
RAY_DAEMONS = ("raylet", "gcs_server", "dashboard", "monitor.py", "log_monitor.py", "agent.py", "runtime_env")


def descendants(root: int) -> list[int]:
    """Process ids of all living descendants of `root`, without itself."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields is not None:
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def tree_cpu_s() -> float:
    """CPU seconds, user and system, that this process and its descendants have used, the ended ones too.

    What a process has used counts with its parent once it was waited for; only differences of two calls mean
    something.
    """
    total = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
    for pid in descendants(os.getpid()):
        fields = _stat(pid)
        if fields is not None:
            total += sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S
    return total


def pss_bytes(pids: Collection[int]) -> tuple[int, int]:
    """(memory of these processes together, each page they share counted once; what of that is shared memory)."""
    total = shared = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss:"):
                    total += int(line.split()[1]) << 10
                elif line.startswith(b"Pss_Shmem:"):
                    shared += int(line.split()[1]) << 10
                    break
    return total, shared


def is_ray_daemon(pid: int) -> bool:
    """Whether that is one of the processes that Ray runs for itself."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        words = cmdline.read(4096).decode("utf-8", "replace").split("\0")
        return any(os.path.basename(word).startswith(RAY_DAEMONS) for word in words[:4] if word)
    return False


def own_tree(apart: Callable[[int], bool] | None = None) -> Iterator[int]:
    """This process and its living descendants, without those that `apart` names."""
    yield os.getpid()
    yield from (pid for pid in descendants(os.getpid()) if apart is None or not apart(pid))


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command: state, parent...; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read(1024).rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return None
