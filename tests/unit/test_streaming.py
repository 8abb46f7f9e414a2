"""Whole objects through a ring of buffers: every byte, in order, in bounded memory, stopped by the first error."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import ObjectNotFound, StoreUnavailable
from storage.stores import object_store
from storage.stores.object_store import (
    CONSUMERS,
    ByteRange,
    MemoryStore,
    ObjectStore,
    RangeReader,
    ranges_of,
    run_readers,
)
from storage.stores.requests import RetryPolicy
from tests.support.faulty_stores import FailingStore, WrappedStore

FAST = RetryPolicy(attempts=3, base_s=0.0)


def run(
    store: ObjectStore,
    jobs: list[tuple[str, list[int]]],
    seen: Callable[[str, int, bytes], None],
    concurrency: int = 4,
) -> None:
    def work(job: tuple[str, list[int]], reader: RangeReader) -> None:
        with closing(reader.read(store, job[0], ranges_of(job[1]), etag=None)) as views:
            for index, view in views:
                seen(job[0], index, bytes(view))

    run_readers(jobs, work, concurrency=concurrency, buffer_bytes=64, policy=FAST)


objects = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.integers(1, 64), max_size=12).map(lambda sizes: [sum(sizes[: i + 1]) for i in range(len(sizes))]),
)


@settings(max_examples=60)
@given(objects, st.integers(1, 9))
def test_every_byte_comes_once_and_in_order(ends: dict[str, list[int]], concurrency: int) -> None:
    data = {key: bytes(i % 251 for i in range(e[-1] if e else 0)) for key, e in ends.items()}
    read: dict[str, bytes] = {key: b"" for key in ends}
    order: dict[str, list[int]] = {key: [] for key in ends}

    def seen(key: str, index: int, view: bytes) -> None:
        read[key] += view
        order[key].append(index)

    run(MemoryStore(data), list(ends.items()), seen, concurrency)
    assert read == data
    assert all(numbers == list(range(len(ends[key]))) for key, numbers in order.items())


def test_passing_faults_do_not_reach_the_consumer() -> None:
    failed: set[ByteRange] = set()

    def first_time(key: str, byte_range: ByteRange, number: int) -> bool:
        fresh = byte_range not in failed
        failed.add(byte_range)
        return fresh

    store = FailingStore(MemoryStore({"a": bytes(range(200))}), first_time)
    read: list[bytes] = []
    run(store, [("a", [64, 128, 192, 200])], lambda key, index, view: read.append(view))
    assert b"".join(read) == bytes(range(200))


def test_the_first_error_ends_all_readers() -> None:
    inner = MemoryStore({key: bytes(64) * 1000 for key in "abcdefgh"})
    store = FailingStore(inner, lambda key, r, number: key == "a")
    jobs = [(key, [64 * (i + 1) for i in range(1000)]) for key in "abcdefgh"]
    with pytest.raises(StoreUnavailable):
        run(store, jobs, lambda key, index, view: None)
    assert len(store.reads) < 7000
    assert not [t for t in threading.enumerate() if t.name.startswith("longshore-")]


@pytest.mark.parametrize("at", [1, 2, CONSUMERS])
def test_ctrl_c_while_the_readers_start_ends_them(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    class Interrupted(ThreadPoolExecutor):
        submitted = 0

        def submit(self, *args: Any, **kwargs: Any) -> Any:
            future = super().submit(*args, **kwargs)
            if self._thread_name_prefix.endswith("hash"):
                self.submitted += 1
                if self.submitted == at:
                    raise KeyboardInterrupt
            return future

    monkeypatch.setattr(object_store, "ThreadPoolExecutor", Interrupted)
    store = WrappedStore(MemoryStore({key: bytes(64) * 1000 for key in "abcdefgh"}))
    jobs = [(key, [64 * (i + 1) for i in range(1000)]) for key in "abcdefgh"]
    with pytest.raises(KeyboardInterrupt):
        run(store, jobs, lambda key, index, view: None)
    assert len(store.reads) < 7000
    assert not [t for t in threading.enumerate() if t.name.startswith("longshore-")]


def test_a_missing_object_is_not_asked_for_again() -> None:
    store = WrappedStore(MemoryStore({}))
    with pytest.raises(ObjectNotFound):
        run(store, [("a", [10])], lambda key, index, view: None)
    assert len(store.reads) == 1


def test_the_consumers_error_comes_through() -> None:
    def seen(key: str, index: int, view: bytes) -> None:
        raise ValueError("consumer")

    with pytest.raises(ValueError, match="consumer"):
        run(MemoryStore({"a": bytes(100)}), [("a", [50, 100])], seen)


def test_reads_in_flight_are_bounded() -> None:
    class Gauge(WrappedStore):
        now = highest = 0

        def read_into(
            self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None
        ) -> str | None:
            with self.lock:
                self.now += 1
                self.highest = max(self.highest, self.now)
            try:
                return super().read_into(key, byte_range, buffer, etag=etag)
            finally:
                with self.lock:
                    self.now -= 1

    buffers: set[int] = set()

    def work(key: str, reader: RangeReader) -> None:
        for _, view in reader.read(store, key, ranges_of([64 * (i + 1) for i in range(100)]), etag=None):
            buffers.add(id(view.obj))

    store = Gauge(MemoryStore({str(i): bytes(6400) for i in range(20)}))
    run_readers([str(i) for i in range(20)], work, concurrency=6, buffer_bytes=64, policy=FAST)
    assert store.highest <= 6
    assert len(buffers) <= CONSUMERS * 2


def test_an_empty_list_is_read_without_error() -> None:
    run(MemoryStore(), [], lambda key, index, view: None)


def test_ranges_from_ends() -> None:
    assert ranges_of([10, 30]) == [ByteRange(0, 10), ByteRange(10, 30)]
    assert ranges_of([]) == []
