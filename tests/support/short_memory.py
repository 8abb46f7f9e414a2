"""A process tree with little memory: a small /dev/shm of its own, and a control group with a limit.

with short_memory(shm_bytes=..., memory_bytes=...) as short:
    subprocess.Popen([*short.command, sys.executable, ...])
    short.killed_processes()        how often the kernel has ended one of them for want of memory
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ray_clusters import eventually

CGROUPS = Path("/sys/fs/cgroup")
ENTER = 'echo $$ > "$1" && mount -t tmpfs -o "size=$2" tmpfs /dev/shm && shift 2 && exec "$@"'


@dataclass(frozen=True)
class ShortMemory:
    """See above."""

    command: tuple[str, ...]  # what to put before a command
    group: Path

    def killed_processes(self) -> int:
        """By the kernel, for the limit."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                words = dict(line.split() for line in (self.group / name).read_text().splitlines())
                return int(words["oom_kill"])
        raise LookupError("the kernel does not count")

    def kill(self) -> None:
        """Every process in it."""
        eventually(lambda: not _killed(self.group), f"{self.group} has processes in it")

    def used_bytes(self) -> int:
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError):
                return int((self.group / name).read_text())
        raise LookupError("the kernel does not count")


@contextlib.contextmanager
def short_memory(*, shm_bytes: int, memory_bytes: int) -> Iterator[ShortMemory]:
    """What is still in it at its end is killed. Skips the test where this user may not make such a thing."""
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    if os.geteuid() or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("a /dev/shm of one's own takes root and mount namespaces")
    group = _make_group(memory_bytes)
    enter = ("unshare", "--mount", "sh", "-c", ENTER, "sh", str(group / "cgroup.procs"), str(shm_bytes))
    try:
        yield ShortMemory(enter, group)
    finally:
        eventually(lambda: _removed(group), f"{group} cannot be removed")


def _make_group(memory_bytes: int) -> Path:
    name = f"longshore-test-{secrets.token_hex(4)}"
    for parent, limit in ((CGROUPS, "memory.max"), (CGROUPS / "memory", "memory.limit_in_bytes")):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        with contextlib.suppress(OSError):
            if (group / limit).exists():  # else not a control group, or not one that counts memory
                (group / limit).write_text(str(memory_bytes))
                return group
        group.rmdir()
    pytest.skip("control groups with a limit cannot be made here")


def _killed(group: Path) -> int:
    """How many processes were sent SIGKILL."""
    pids = (group / "cgroup.procs").read_text().split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return len(pids)


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        _killed(group)
        group.rmdir()
    return not group.exists()
