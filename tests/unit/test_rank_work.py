"""What the threads of a rank share: who may work, who waits for what, what is worth telling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from actors.rank.chunk_fetcher import ChunkFetcher, FetchedChunk
from actors.rank.rank_work import RankWork
from cluster.errors import LoadCancelled
from cluster.messages import Commit, LeaseOrder, Orders
from cluster.planning.packed_plan import pack_shared, unpack_shared
from cluster.scheduling.concurrency import START
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import safetensors_bytes
from tests.support.local_node import plan_of

CHUNKS = 40
PATIENCE_S = 20.0


@pytest.fixture
def work() -> Iterator[RankWork]:
    objects = {"model.safetensors": safetensors_bytes([("a", "F32", (64,))], 1)}
    fetcher = ChunkFetcher(MemoryStore(objects), unpack_shared(pack_shared(plan_of(objects))), attempts=2)
    made = RankWork(fetcher, CHUNKS, most=8)
    made.batch = 8
    yield made
    made.stop(LoadCancelled("the test is over"))


def lease(chunk: int) -> LeaseOrder:
    return LeaseOrder(f"lease-{chunk}", chunk, chunk, 60.0)


def leases(*chunks: int) -> tuple[LeaseOrder, ...]:
    return tuple(lease(chunk) for chunk in chunks)


def committed(order: LeaseOrder) -> FetchedChunk:
    return FetchedChunk(order.lease_id, Commit(order.lease_id, order.chunk))


def eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


class Fetchers:
    """Threads that take leases and hold each until they are told to go on."""

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


def test_so_many_work_as_the_agent_says(work: RankWork):
    fetchers = Fetchers(work, 8)
    work.take(Orders(leases=leases(*range(20))))
    eventually(lambda: len(fetchers.holding) == START)
    assert work.fetch_threads() == START
    work.take(Orders(requests=6))
    eventually(lambda: len(fetchers.holding) == 6)
    work.take(Orders(requests=2))
    fetchers.finish(4)
    eventually(lambda: len(fetchers.holding) == 2)
    fetchers.finish(1)  # one goes on with the next lease, and no more than one
    eventually(lambda: len(work._results.fetched) == 5)
    eventually(lambda: len(fetchers.holding) == 2)
    work.take(Orders(requests=64))
    eventually(lambda: len(fetchers.holding) == 8)
    assert (work.requests, work.peak_requests) == (8, 8)  # `most`
    work.stop(LoadCancelled("enough"))
    fetchers.join()


def test_a_thread_that_waits_for_another_try_lets_others_work(work: RankWork):
    work.take(Orders(leases=leases(0, 1), requests=1))
    assert work.next_lease() is not None
    thread = threading.Thread(target=work._fetcher.pause, args=("unavailable", 60.0), daemon=True)
    thread.start()
    assert work.next_lease() is not None  # the place is free
    assert thread.is_alive()
    work.stop(LoadCancelled("enough"))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_thread_that_waited_for_another_try_comes_back_for_its_place(work: RankWork):
    work.take(Orders(leases=leases(0, 1), requests=2))
    first, second = work.next_lease(), work.next_lease()
    assert first is not None
    assert second is not None
    work.take(Orders(requests=1))
    returned = threading.Event()

    def pause() -> None:
        work._fetcher.pause("throttled", 0.01)
        returned.set()

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    assert not returned.wait(0.1)  # its wait is over, but somebody works in its place
    work.fetched(committed(second), 100, 0.01)
    assert returned.wait(PATIENCE_S)
    work.wait(PATIENCE_S)  # a throttled answer is told at once
    results = work.take_results()
    assert (results.throttled, work.throttles, len(results.requests)) == (1, 1, 1)
    work.fetched(FetchedChunk(first.lease_id), 0, 0.1)
    assert work.idle is False  # the lease that came back is not told yet
    work.take_results()
    assert work.idle
    thread.join(PATIENCE_S)


def test_enough_leases_to_go_on_with_while_the_agent_is_asked(work: RankWork):
    assert work.want_leases() == START + work.batch
    work.take(Orders(leases=leases(*range(5)), requests=8))
    assert work.want_leases() == 8 + 8 - 5
    work.placed(dict.fromkeys(range(CHUNKS), 0))
    assert work.want_leases() == 0


def test_a_result_is_told_at_once_only_while_a_place_is_free(work: RankWork):
    work.take(Orders(leases=leases(*range(START + 2))))
    assert work.want_leases() > 0
    taken = [work.next_lease() for _ in range(START)]
    work.fetched(committed(taken[0]), 100, 0.01)  # type: ignore[arg-type]
    begun_s = time.monotonic()
    work.wait(0.05)  # two leases are queued: nobody is short of work
    assert time.monotonic() - begun_s >= 0.05
    work.next_lease()
    work.fetched(committed(taken[1]), 100, 0.01)  # type: ignore[arg-type]
    work.next_lease()
    work.fetched(committed(taken[2]), 100, 0.01)  # type: ignore[arg-type]
    work.wait(PATIENCE_S)
    assert len(work.take_results().fetched) == 3


def test_drain_gives_back_what_was_not_begun_and_ends_the_waits(work: RankWork):
    work.take(Orders(leases=leases(0, 1, 2), requests=1))
    begun = work.next_lease()
    assert begun is not None

    def fetch() -> None:
        work._fetcher.pause("unavailable", 60.0)
        work.fetched(FetchedChunk(begun.lease_id), 0, 0.1)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    eventually(lambda: work._pausing == 1)
    work.drain()
    thread.join(PATIENCE_S)
    results = work.take_results()
    assert {result.lease_id for result in results.fetched} == {"lease-0", "lease-1", "lease-2"}
    assert all(result.commit is None and result.failure is None for result in results.fetched)
    assert results.throttled == 0


def test_who_leaves_finishes_what_has_begun_to_arrive_unless_nobody_wants_it(work: RankWork):
    work.take(Orders(leases=leases(0), requests=1))
    assert work.next_lease() is not None
    returned = threading.Event()

    def fetch() -> None:
        work._fetcher.pause("short_read", 60.0, True)
        returned.set()

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    eventually(lambda: work._pausing == 1)
    assert not work.drain(0.05, finish=True)
    assert not returned.wait(0.05)
    work.abandon()
    assert returned.wait(PATIENCE_S)
    thread.join(PATIENCE_S)


def test_stop_ends_every_wait(work: RankWork):
    waits: list[Callable[[], object]] = [
        work.next_lease,
        lambda: work.next_chunks(4),
        lambda: work.wait(60.0),
        lambda: work.sleep(60.0),
    ]
    work.take(Orders(leases=leases(0), requests=1))
    assert work.next_lease() is not None  # so that `wait` has something to wait for,
    work.want_leases()  # and nothing to tell
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
