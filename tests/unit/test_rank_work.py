"""Threads of a rank wait for what its state allows, and are woken when it does."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from actors.rank.chunk_fetcher import ChunkFetcher
from actors.rank.loader import RankWork
from actors.rank.state import FetchedChunk, Next, RankIdentity, RankState
from cluster.errors import LoadCancelled
from cluster.messages import Commit, JoinReply, LeaseOrder, Orders
from cluster.planning.packed_plan import pack_shared, unpack_shared
from cluster.scheduling.concurrency import START
from storage.host.processes import ProcessId
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import safetensors_bytes
from tests.support.local_node import plan_of

CHUNKS = 40
PATIENCE_S = 20.0


@pytest.fixture
def work() -> Iterator[RankWork]:
    objects = {"model.safetensors": safetensors_bytes([("a", "F32", (64,))], 1)}
    fetcher = ChunkFetcher(MemoryStore(objects), unpack_shared(pack_shared(plan_of(objects))), attempts=2)
    identity = RankIdentity("load", 1, 0, 0, ProcessId.current())
    made = RankWork(RankState(identity, CHUNKS, 8, itertools.count(1), heartbeat_s=60.0), fetcher)
    made.welcomed(made.hello(()), JoinReply("", batch=8))
    yield made
    made.stop(LoadCancelled("the test is over"))


def lease(chunk: int) -> LeaseOrder:
    return LeaseOrder(f"lease-{chunk}", chunk, chunk, 60.0)


def leases(*chunks: int) -> tuple[LeaseOrder, ...]:
    return tuple(lease(chunk) for chunk in chunks)


def take(work: RankWork, orders: Orders) -> None:
    update = work.update(leaving=False, others=(), stats=None)
    assert work.answered(update, orders) is Next.GO_ON


def committed(order: LeaseOrder) -> FetchedChunk:
    return FetchedChunk(order.lease_id, Commit(order.lease_id, order.chunk))


def eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


class Fetchers:
    """Threads that take leases and hold each until the test lets them go on."""

    def __init__(self, work: RankWork, count: int) -> None:
        self.work = work
        self.lock = threading.Lock()
        self.holding: list[LeaseOrder] = []
        self.go = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        while (order := self.work.next_lease()) is not None:
            with self.lock:
                self.holding.append(order)
            self.go.acquire()
            with self.lock:
                self.holding.remove(order)
            self.work.fetched(committed(order), 100, 0.01)

    def finish(self, count: int) -> None:
        for _ in range(count):
            self.go.release()

    def join(self) -> None:
        self.finish(1000)
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_as_many_threads_fetch_as_the_agent_allows(work: RankWork):
    fetchers = Fetchers(work, 8)
    take(work, Orders(leases=leases(*range(20))))
    eventually(lambda: len(fetchers.holding) == START)
    assert work.fetch_threads() == START
    take(work, Orders(requests=6))
    eventually(lambda: len(fetchers.holding) == 6)
    take(work, Orders(requests=2))
    fetchers.finish(4)
    eventually(lambda: len(fetchers.holding) == 2)
    fetchers.finish(1)  # one goes on with the next lease, and no more than one
    eventually(lambda: work.state.in_hand == 15)
    eventually(lambda: len(fetchers.holding) == 2)
    take(work, Orders(requests=64))
    eventually(lambda: len(fetchers.holding) == 8)
    assert (work.state.requests, work.state.peak_requests) == (8, 8)  # `most`
    work.stop(LoadCancelled("enough"))
    fetchers.join()


def test_a_chunk_makes_the_next_update_due(work: RankWork):
    """The fixture's heartbeat is far longer than a test waits."""
    take(work, Orders(leases=leases(0, 1, 2)))
    waiting = threading.Thread(target=lambda: work.wait_for_update(), daemon=True)
    order = work.next_lease()
    waiting.start()
    eventually(lambda: work._due_s > time.monotonic() + PATIENCE_S)
    assert order is not None
    work.fetched(committed(order), 100, 0.01)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_a_thread_that_waits_to_retry_frees_its_place(work: RankWork):
    take(work, Orders(leases=leases(0, 1), requests=1))
    assert work.next_lease() is not None
    thread = threading.Thread(target=work._fetcher.pause, args=("unavailable", 60.0, False), daemon=True)
    thread.start()
    assert work.next_lease() is not None  # the place is free
    assert thread.is_alive()
    work.stop(LoadCancelled("enough"))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_thread_waits_for_a_free_place_after_its_retry_delay(work: RankWork):
    take(work, Orders(leases=leases(0, 1), requests=2))
    first, second = work.next_lease(), work.next_lease()
    assert first is not None
    assert second is not None
    take(work, Orders(requests=1))
    returned = threading.Event()

    def pause() -> None:
        work._fetcher.pause("throttled", 0.01, False)
        returned.set()

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    assert not returned.wait(0.1)  # its wait is over, but somebody works in its place
    work.fetched(committed(second), 100, 0.01)
    assert returned.wait(PATIENCE_S)
    assert not work.wait_for_update()  # a throttled answer is reported at once
    assert work.update(leaving=False, others=(), stats=None).throttled == 1
    work.fetched(FetchedChunk(first.lease_id), 0, 0.1)
    thread.join(PATIENCE_S)


def test_a_drain_ends_pauses(work: RankWork):
    take(work, Orders(leases=leases(0, 1, 2), requests=1))
    begun = work.next_lease()
    assert begun is not None

    def fetch() -> None:
        work._fetcher.pause("unavailable", 60.0, False)
        work.fetched(FetchedChunk(begun.lease_id), 0, 0.1)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    eventually(lambda: work.state.pausing == 1)
    work.drain()
    thread.join(PATIENCE_S)
    assert len(work.state.results.fetched) == 3


def test_a_wait_for_held_chunks_ends_when_another_comes(work: RankWork):
    work.state._choose = lambda chunks, most: [chunk for chunk in chunks if chunk == 1]
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work.next_chunks(4)), daemon=True)
    thread.start()
    take(work, Orders(readable=((3, 0),)))
    eventually(lambda: work.state.held_until_s is not None)
    take(work, Orders(readable=((1, 2),)))
    thread.join(PATIENCE_S)
    assert found == [[(1, 2)]]


def test_stop_ends_every_wait(work: RankWork):
    waits: list[Callable[[], object]] = [
        work.next_lease,
        lambda: work.next_chunks(4),
        work.wait_for_update,
        lambda: work.sleep(60.0),
    ]
    take(work, Orders(leases=leases(0, 1), requests=2))
    assert work.next_lease() is not None  # so that the exchange loop has something to wait for,
    assert work.next_lease() is not None
    take(work, Orders())  # and nothing to report
    ended: list[object] = []

    def run(wait: Callable[[], object]) -> None:
        try:
            ended.append(wait())
        except LoadCancelled as error:
            ended.append(str(error))

    threads = [threading.Thread(target=run, args=(wait,), daemon=True) for wait in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    work.stop(LoadCancelled("now"))
    work.stop(LoadCancelled("later"))
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(map(str, ended)) == ["None", "[]", "now", "now"]
