"""Objects read whole, in order, through a few reused buffers: several reads in flight, one consumer each.

run_readers(jobs) -- consumer threads --> work(job, reader)
    reader.read(key, ranges) --> (0, bytes), (1, bytes), ...     views, valid until the next step
        ring of `depth` buffers, filled ahead by shared reading threads; a buffer is filled again only
        after the consumer has stepped on. Memory: consumers x depth x buffer_bytes, allocated once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

from storage.stores.object_store import ByteRange, ObjectStore
from storage.stores.retrying import RetryPolicy, with_retries

CONSUMERS = 4  # objects read at a time: enough to keep several cores hashing
MIN_DEPTH = 2  # one buffer is hashed while the next is filled

J = TypeVar("J")


class Stopped(Exception):
    """Another part of the same work failed; this one ends quietly. Never leaves `run_readers`."""


class RangeReader:
    """A ring of buffers for one consumer thread; used for one object after the other."""

    def __init__(
        self, executor: Executor, depth: int, buffer_bytes: int, policy: RetryPolicy, stop: threading.Event
    ) -> None:
        self._executor = executor
        self._buffers = [memoryview(bytearray(buffer_bytes)) for _ in range(depth)]
        self._policy = policy
        self._stop = stop

    def read(
        self, store: ObjectStore, key: str, ranges: Sequence[ByteRange], *, etag: str | None
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Index and bytes of each range, in order; no range is larger than a buffer.

        Raises what `ObjectStore.read_into` raises, after retries, and Stopped when the work was called off.
        """
        flying: deque[tuple[int, memoryview, Future[None]]] = deque()
        free = deque(self._buffers)
        submitted = 0
        try:
            for _ in ranges:
                while free and submitted < len(ranges):
                    buffer = free.popleft()
                    view = buffer[: ranges[submitted].size_bytes]
                    fill = self._executor.submit(self._fill, store, key, ranges[submitted], view, etag)
                    flying.append((submitted, buffer, fill))
                    submitted += 1
                index, buffer, fill = flying[0]
                fill.result()
                flying.popleft()
                yield index, buffer[: ranges[index].size_bytes]
                free.append(buffer)
        finally:
            # A buffer belongs to its read until that has ended: nobody may reuse the ring before.
            for _, _, fill in flying:
                fill.cancel()
            wait([fill for _, _, fill in flying])

    def _fill(self, store: ObjectStore, key: str, byte_range: ByteRange, view: memoryview, etag: str | None) -> None:
        def read() -> None:
            if self._stop.is_set():
                raise Stopped
            store.read_into(key, byte_range, view, etag=etag)

        with_retries(read, self._policy, sleep=self._stop.wait)


def run_readers(
    jobs: Sequence[J],
    work: Callable[[J, RangeReader], None],
    *,
    concurrency: int,
    buffer_bytes: int,
    policy: RetryPolicy,
) -> None:
    """`work` of every job, several at a time, with about `concurrency` reads in flight in all.

    The first error (or Ctrl-C) stops all others within one read, and is raised when they have ended.
    """
    if not jobs:
        return
    consumers = min(CONSUMERS, concurrency, len(jobs))
    depth = max(MIN_DEPTH, concurrency // consumers)
    stop = threading.Event()
    waiting = deque(jobs)
    with (
        ThreadPoolExecutor(concurrency, thread_name_prefix="longshore-read") as reads,
        ThreadPoolExecutor(consumers, thread_name_prefix="longshore-hash") as consumer_threads,
    ):

        def consume() -> None:
            reader = RangeReader(reads, depth, buffer_bytes, policy, stop)
            while not stop.is_set():
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                work(job, reader)

        running: list[Future[None]] = []
        try:
            # Inside: a Ctrl-C that comes while these start must stop those that have, or all would be read first.
            for _ in range(consumers):
                running.append(consumer_threads.submit(consume))
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            if len(running) < consumers or not all(future.done() and not future.exception() for future in running):
                stop.set()
            wait(running)
    errors = [error for future in running if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error


def ranges_of(ends: Sequence[int]) -> list[ByteRange]:
    """Half-open ranges from their ends: `[10, 30]` is [0, 10) and [10, 30)."""
    return [ByteRange(start, end) for start, end in pairwise((0, *ends))]
