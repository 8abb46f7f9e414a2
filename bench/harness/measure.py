"""Measures one load: seconds, CPU seconds and memory of a process and all its descendants.

    with measured(spec) as m:      # imports are done, nothing was read yet
        tensors = load_everything()
        m.stop()                   # optional: the rest of the block is not timed
        m.extra["requests"] = 250  # anything worth a place in the line of JSON that is printed

Tensors stay alive inside the block: memory is sampled a last time when the block ends, after the clock has stopped. The
CPU seconds of the sampling itself are subtracted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from bench.harness.contender import Spec
from bench.harness.results import Run

_INTERVAL_S = 0.05
_MAX_DUTY = 0.04  # of one core: sampling large memory is slow, so it happens less often then
_TREE_INTERVAL_S = 0.5
_SPARE_BYTES = 1 << 30  # that `_fetch_host_pages` leaves for other programs
# Ray's own processes, apart from the workers that it starts for us
_RAY_DAEMONS = ("raylet", "gcs_server", "dashboard", "monitor.py", "log_monitor.py", "agent.py", "runtime_env")


@dataclass
class Measured(Run):
    """The run of the block. Times and memory are set when the block has ended."""

    stop: Callable[[], None] = lambda: None  # stops the clock; the tensors stay alive to the end of the block


class _MemoryWatch(threading.Thread):
    """A thread that samples the PSS of the process tree."""

    def __init__(self, apart: Callable[[int], bool]) -> None:
        super().__init__(name="memory-watch", daemon=True)
        self._apart = apart
        self.highest_bytes = 0
        self.cpu_s = 0.0  # used by this thread
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def tree(self) -> list[int]:
        return [os.getpid(), *(child.pid for child in _descendants() if not self._apart(child.pid))]

    def sample(self, pids: Iterable[int] | None = None) -> None:
        self.highest_bytes = max(self.highest_bytes, _pss_bytes(self.tree() if pids is None else pids))

    def run(self) -> None:
        pids: list[int] = []
        tree_read_s = -1.0
        wait_s = _INTERVAL_S
        while not self._ended.wait(wait_s):
            begun_s, now_s = time.thread_time(), time.monotonic()
            if now_s - tree_read_s > _TREE_INTERVAL_S:
                pids, tree_read_s = self.tree(), now_s
            self.sample(pids)
            self.cpu_s = time.thread_time()
            wait_s = max(_INTERVAL_S, (self.cpu_s - begun_s) / _MAX_DUTY)


@contextlib.contextmanager
def measured(
    spec: Spec, *, touched_before_bytes: int = 0, memory_apart: Callable[[int], bool] = lambda _: False
) -> Iterator[Measured]:
    """Measure the block and print one line of JSON. Prints nothing when the block raises.

    `touched_before_bytes`: destination memory that was touched before the block (recycled).
    `memory_apart(pid)`: excludes a process from the memory. Its CPU always counts.
    """
    result = Measured(spec.model_bytes, touched_before_bytes=touched_before_bytes)
    if not touched_before_bytes:
        _fetch_host_pages(5 * spec.model_bytes // 2)
    watch = _MemoryWatch(memory_apart)
    watch.sample()
    result.baseline_bytes = watch.highest_bytes
    watch.start()
    watch_cpu_s, cpu_s, start_s = watch.cpu_s, tree_cpu_s(), time.perf_counter()

    def stop() -> None:
        if not result.wall_s:
            result.wall_s = time.perf_counter() - start_s
            result.cpu_s = max(0.0, tree_cpu_s() - cpu_s - (watch.cpu_s - watch_cpu_s))

    result.stop = stop
    try:
        yield result
        result.stop()
    finally:
        watch.end()
    watch.sample()
    result.peak_bytes = watch.highest_bytes - result.baseline_bytes
    sys.stdout.flush()
    found = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "stop"}
    os.write(1, f"{json.dumps(found)}\n".encode())


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, the ended ones included.

    A process's CPU counts with its parent once it was waited for. Only differences of two calls mean something.
    """
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for child in _descendants():
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


def is_ray_daemon(pid: int) -> bool:
    """Tell the processes that Ray runs for itself from its workers."""
    try:
        words = psutil.Process(pid).cmdline()[:4]
    except psutil.Error:
        return False
    return any(os.path.basename(word).startswith(_RAY_DAEMONS) for word in words if word)


def _descendants() -> list[Any]:
    children: list[Any] = psutil.Process().children(recursive=True)
    return children


def _pss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes together, each shared page counted once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            total += next((int(line.split()[1]) << 10 for line in rollup if line.startswith(b"Pss:")), 0)
    return total


_TOUCH = """
import mmap, sys
kept = []
for huge in (True, False):  # the kernel keeps freed pages of either size apart for a while
    memory = mmap.mmap(-1, int(sys.argv[1]) // 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1
    kept.append(memory)
"""


def _fetch_host_pages(size_bytes: int) -> None:
    """Touch and free `size_bytes` in another process: half in huge pages, half in small ones.

    Many hosts take free memory away from a virtual machine. The first write to such a page costs a fault in the host,
    about 3 CPU s per GB, and a program that runs right after another has freed its memory does not pay it. This makes
    the cost equal for all contenders. Pages are fresh all the same: the guest's kernel maps and clears each of them.
    """
    size_bytes = min(size_bytes, psutil.virtual_memory().available - _SPARE_BYTES)
    if size_bytes > 0:
        subprocess.run([sys.executable, "-S", "-c", _TOUCH, str(size_bytes)], check=False)
