"""Measures one load: seconds, CPU seconds, bytes out of the store, and memory of a process and all its descendants.

    with measured(spec, "warm") as m:  # imports are done, nothing was read yet
        tensors = load_everything()
        m.stop()                       # optional: the rest of the block is not timed
        m.extra["requests"] = 250      # anything worth a place in the line of JSON that is printed

Processor seconds are counted until the processes are idle, so that no work is left out because it is done later. The
CPU seconds of the sampling of memory are subtracted. The bytes are those that the server's log has.
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
_SPARE_BYTES = 1 << 30  # that `fetch_host_pages` leaves for other programs
_IDLE_CPU = 0.1  # of one core: processes that use less have nothing to do
_IDLE_INTERVAL_S = 0.4
_PATIENCE_S = 15.0


@dataclass
class Measured(Run):
    """The run of the block. Times and memory are set when the block has ended."""

    stop: Callable[[], None] = lambda: None  # stops the clock; the tensors stay alive to the end of the block


class _MemoryWatch(threading.Thread):
    """A thread that samples the PSS of the process tree."""

    def __init__(self) -> None:
        super().__init__(name="memory-watch", daemon=True)
        self.highest_bytes = 0
        self.cpu_s = 0.0  # used by this thread
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def tree(self) -> list[int]:
        return [os.getpid(), *(child.pid for child in _descendants())]

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
def measured(spec: Spec, case: str = "", *, fresh: bool = True, watch_memory: bool = True) -> Iterator[Measured]:
    """Measure the block and print one line of JSON. Prints nothing when the block raises.

    `fresh`: the block uses memory for the first time, so the host's free pages are fetched before the clock starts.
    """
    result = Measured(spec.model_bytes, case)
    if fresh:
        fetch_host_pages(spec.model_bytes)
    watch = _MemoryWatch()
    if watch_memory:
        watch.sample()
        result.baseline_bytes = watch.highest_bytes
        watch.start()
    log, idle = str(spec.options.get("access_log", "")), bool(spec.options.get("until_idle"))
    log_from = os.path.getsize(log) if log else 0
    watch_cpu_s, cpu_s, start_s = watch.cpu_s, tree_cpu_s(), time.perf_counter()

    def stop() -> None:
        if not result.wall_s:
            result.wall_s = time.perf_counter() - start_s
            if idle:
                settle()
            result.cpu_s = max(0.0, tree_cpu_s() - cpu_s - (watch.cpu_s - watch_cpu_s))
            if log:
                with open(log) as lines:
                    lines.seek(log_from)
                    result.store_bytes = sum(int(line) for line in lines)

    result.stop = stop
    try:
        yield result
        result.stop()
    finally:
        if watch_memory:
            watch.end()
    if watch_memory:
        watch.sample()
        result.peak_bytes = watch.highest_bytes - result.baseline_bytes
    sys.stdout.flush()
    found = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "stop"}
    os.write(1, f"{json.dumps(found)}\n".encode())


def settle() -> None:
    """Wait until the process tree has nothing to do."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        before_s, since_s = tree_cpu_s(), time.monotonic()
        time.sleep(_IDLE_INTERVAL_S)
        if (tree_cpu_s() - before_s) / (time.monotonic() - since_s) < _IDLE_CPU:
            return


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, the ended ones included.

    A process's CPU counts with its parent once it was waited for. Only differences of two calls mean something.
    """
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for child in _descendants():
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


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


def fetch_host_pages(loaded_bytes: int) -> None:
    """Touch and free memory for a load of that size in another process: half in huge pages, half in small ones.

    Many hosts take free memory away from a virtual machine. The first write to such a page costs a fault in the host,
    about 3 CPU s per GB, and a program that runs right after another has freed its memory does not pay it. This makes
    the cost equal for all contenders. Pages are fresh all the same: the guest's kernel maps and clears each of them.
    """
    size_bytes = min(5 * loaded_bytes // 2, psutil.virtual_memory().available - _SPARE_BYTES)
    if size_bytes > 0:
        subprocess.run([sys.executable, "-S", "-c", _TOUCH, str(size_bytes)], check=False)
