"""The clock, the CPU meter and the memory watch round the timed part of a contender.

    with measured(spec) as m:      # imports are done, nothing was read yet
        tensors = load_everything()
        m.stop()                   # optional: what follows in the block is not timed
        m.extra["requests"] = 250  # whatever is worth a place in the JSON
    # one line of JSON on stdout

Inside the block everything that was loaded stays alive: memory is looked at a last time when the block ends, after
the clock was stopped. What the watch itself costs is taken off the CPU seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.host_pages import fetch_host_pages
from bench.process_tree import own_tree, pss_bytes, tree_cpu_s
from bench.spec import Spec

_INTERVAL_S = 0.05
_MAX_DUTY = 0.04  # of one core: looking at large memory is slow, so it is looked at less often then
_TREE_LOOKED_UP_EVERY_S = 0.5


@dataclass(slots=True)
class Measured:
    """The stats of one run. Times and memory are set when the block has ended."""

    bytes: int  # of the model that was read; the model's size unless the contender says otherwise
    touched_before_bytes: int = 0  # destination memory that was there before: part of the baseline, named apart
    wall_s: float = 0.0
    cpu_s: float = 0.0
    baseline_bytes: int = 0  # PSS of the process tree just before
    peak_bytes: int = 0  # highest PSS of the process tree over that
    peak_shared_bytes: int = 0  # what of it is shared memory: slots of an arena that were mapped meanwhile
    extra: dict[str, Any] = field(default_factory=dict)
    _clock: _Clock | None = None

    def stop(self) -> None:
        """Stop the clock. What is alive now must stay alive to the end of the block all the same."""
        if self._clock is not None:
            self.wall_s, self.cpu_s = self._clock.read()
            self._clock = None

    def as_json(self) -> str:
        """One line."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__ if name != "_clock"})


class _Clock:
    """Wall and CPU seconds of the process tree since it was made, without those of the watch."""

    def __init__(self, watch: _MemoryWatch) -> None:
        self._watch = watch
        self._watch_cpu_s = watch.cpu_s
        self._cpu_s, self._start_s = tree_cpu_s(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        wall_s = time.perf_counter() - self._start_s
        watch_cpu_s = self._watch.cpu_s - self._watch_cpu_s
        return wall_s, max(0.0, tree_cpu_s() - self._cpu_s - watch_cpu_s)


class _MemoryWatch:
    """Samples the PSS of the process tree on a thread of its own."""

    def __init__(self, apart: Callable[[int], bool] | None) -> None:
        self._apart = apart
        self.highest_bytes = 0
        self.shared_bytes = 0  # of the highest
        self.cpu_s = 0.0  # used by the watch
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def look(self, pids: list[int] | None = None) -> None:
        found, shared = pss_bytes(pids if pids is not None else list(own_tree(self._apart)))
        if found > self.highest_bytes:
            self.highest_bytes, self.shared_bytes = found, shared

    def _run(self) -> None:
        pids: list[int] = []
        looked_up_s = -1.0
        wait_s = _INTERVAL_S
        while not self._ended.wait(wait_s):
            began_s, now_s = time.thread_time(), time.monotonic()
            if now_s - looked_up_s > _TREE_LOOKED_UP_EVERY_S:
                pids, looked_up_s = list(own_tree(self._apart)), now_s
            self.look(pids)
            self.cpu_s = time.thread_time()
            wait_s = max(_INTERVAL_S, (self.cpu_s - began_s) / _MAX_DUTY)


@contextlib.contextmanager
def measured(
    spec: Spec, *, touched_before_bytes: int = 0, memory_apart: Callable[[int], bool] | None = None
) -> Iterator[Measured]:
    """Measure the block and print the stats as one line of JSON. Nothing is printed when the block raises.

    `touched_before_bytes`: memory that the bytes go to and that was touched before the block (recycled).
    `memory_apart(pid)`: processes whose memory is not counted (CPU always is).
    """
    result = Measured(spec.model_bytes, touched_before_bytes)
    if not touched_before_bytes:
        fetch_host_pages(5 * spec.model_bytes // 2)
    watch = _MemoryWatch(memory_apart)
    watch.look()
    result.baseline_bytes, baseline_shared = watch.highest_bytes, watch.shared_bytes
    watch.start()

    result._clock = _Clock(watch)
    try:
        yield result
        result.stop()
    finally:
        watch.end()
    watch.look()
    result.peak_bytes = watch.highest_bytes - result.baseline_bytes
    result.peak_shared_bytes = watch.shared_bytes - baseline_shared
    sys.stdout.flush()
    os.write(1, f"{result.as_json()}\n".encode())
