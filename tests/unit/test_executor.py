"""Ranks in threads over a real agent and arena: a bit-exact result or one typed error, and nothing left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.rank.executor import RankLoader
from cluster.errors import AgentEnded, ChunkFailed, ClusterLost, DoesNotFit, LoadCancelled, RankLost
from cluster.fit.needs import min_slots
from cluster.planning.plan import LoadPlan
from cluster.telemetry.report import RankReport
from storage.errors import (
    IntegrityError,
    LongshoreError,
    ObjectChanged,
    ObjectNotFound,
    ShortRead,
    StoreUnavailable,
    Throttled,
)
from storage.stores.object_store import ByteRange, MemoryStore
from tests.support.checkpoints import flat_objects, odd_objects, read_objects, write_tiny_llama
from tests.support.faulty_stores import FailingStore, FlipByteStore, WrappedStore
from tests.support.local_node import Belongings, LocalNode, Rank, SwitchedLink, local_node, plan_of, run_all, start_all
from tests.support.reference_slices import check_exact, expected


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder, shards=2)
    return read_objects(folder)


# --- layouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]
)
def test_each_chunk_leaves_the_store_once_and_fills_every_rank(
    shm_dir: Path, llama: dict[str, bytes], sizes: tuple[int, int, int]
):
    plan = plan_of(llama, sizes, chunk_bytes=65536)
    store = WrappedStore(MemoryStore(llama))
    with local_node(shm_dir, slots=len(plan.chunks) + min_slots(len(plan.ranks))) as node:
        ranks, report = node.load(plan, store)
        check_exact(ranks, llama, sizes[0], sizes[1])
        assert len(store.reads) == len(set(store.reads)) == report.store_chunks == report.needed_chunks
        assert store.read_bytes == report.store_bytes == report.needed_bytes
        assert (report.cached_chunks, report.refetched_chunks, report.retries) == (0, 0, {})
        # A second load of the same bytes takes them from the arena, whatever its layout.
        again, second = node.load(plan_of(llama, (1, 1, 1), chunk_bytes=65536), store)
        check_exact(again, llama)
        assert (second.store_chunks, second.cached_chunks) == (0, second.needed_chunks)
        assert len(store.reads) == report.store_chunks


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2)])
@pytest.mark.parametrize("chunk_bytes", [64, 4096])
def test_odd_checkpoints_load_bit_exact(shm_dir: Path, sizes: tuple[int, int, int], chunk_bytes: int):
    """Every dtype, 0-d and zero-size tensors, Unicode names, and ranks without any slice."""
    objects = odd_objects()
    if sizes[1] == 4:  # one row of 6 six-bit numbers is no whole number of bytes
        objects = {key: data for key, data in objects.items() if key.endswith("2-of-00002.safetensors")}
        objects = {"model.safetensors": next(iter(objects.values()))}
    plan = plan_of(objects, sizes, chunk_bytes)
    with local_node(shm_dir, slots=9) as node:
        ranks, _ = node.load(plan, MemoryStore(objects))
        check_exact(ranks, objects, fsdp=sizes[1])


def test_models_without_digests_load_and_are_kept_apart(shm_dir: Path):
    objects, others = flat_objects(seed=1), flat_objects(seed=2)
    with local_node(shm_dir, slots=64) as node:
        for version in (objects, others, objects):
            ranks, _ = node.load(plan_of(version, (1, 2, 1), 1024, digests=False), MemoryStore(version))
            check_exact(ranks, version, fsdp=2)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 1), (1, 1, 3)])
def test_a_model_ten_times_the_arena_loads(shm_dir: Path, sizes: tuple[int, int, int]):
    objects = flat_objects(tensors=100)
    plan = plan_of(objects, sizes, 1024)
    slots = min_slots(len(plan.ranks))
    assert len(plan.chunks) >= 10 * slots
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots) as node:
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects, fsdp=sizes[1])
        assert len(store.reads) == report.needed_chunks


def test_two_concurrent_loads_share_an_arena(shm_dir: Path):
    objects = flat_objects(tensors=60)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=2 * min_slots(2) + 2) as node:
        first, second = (node.ranks(plan, store, node.begin(plan)) for _ in range(2))
        run_all([*first, *second])
        check_exact(first, objects)
        check_exact(second, objects)


def test_a_rank_that_finishes_early_returns_its_leases(shm_dir: Path):
    """The other ranks would wait for the deadline of its leases."""
    objects = flat_objects(tensors=24, rows=64)
    plan = plan_of(objects, (1, 4, 1), 1024)

    def stall(key: str, byte_range: ByteRange, number: int) -> bool:
        time.sleep(0.02)
        return False

    with local_node(shm_dir, slots=40, lease_deadline_s=60.0, fetch_threads=4) as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, FailingStore(MemoryStore(objects), stall), load_id)
        run_all(ranks)
        check_exact(ranks, objects, fsdp=4)
        assert node.agent.report(load_id).retries == {}
        assert in_use(node) == (0, 0)


def in_use(node: LocalNode) -> tuple[int, int]:
    """Return the numbers of leased and quarantined slots."""
    stats = node.agent._ledger._cache.stats()
    return stats.leased_slots, stats.quarantined_slots


# --- stores on a bad day ----------------------------------------------------------------------------------------


def test_a_byte_that_stays_wrong_ends_the_load(shm_dir: Path):
    objects = flat_objects(tensors=8)
    plan = plan_of(objects, (1, 2, 1), 1024)
    offset = len(objects["model.safetensors"]) - 3
    store = FlipByteStore(MemoryStore(objects), "model.safetensors", offset, lambda reading: True)
    with local_node(shm_dir, slots=12, fetch_attempts=2, chunk_attempts=2) as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, store, load_id)
        run_all(ranks)
        last = len(plan.chunks) - 1
        for rank in ranks:
            error = rank.outcome
            if rank is ranks[0] and isinstance(error, RankReport):
                continue  # it needs other chunks only, and had finished
            assert isinstance(error, IntegrityError)
            assert (error.details["shard"], error.details["chunk"]) == ("model.safetensors", last)
            expected_digest = plan.chunks.digest(last)
            assert expected_digest is not None
            assert error.details["expected"] == f"blake3:{expected_digest.hex()}"
            assert error.details["found"].startswith("blake3:")
            assert error.details["found"] != error.details["expected"]
            assert error.details["rank"] in (0, 1)
            assert rank.device._segments == []  # freed: no caller can get half a model
        report = node.agent.report(load_id)
        assert report.corrupt_chunks == report.retries["digest_mismatch"] == store.readings >= 4


def test_a_byte_that_is_wrong_once_costs_one_retry(shm_dir: Path):
    objects = flat_objects(tensors=8)
    store = FlipByteStore(MemoryStore(objects), "model.safetensors", 2000, lambda reading: reading == 1)
    with local_node(shm_dir, slots=12) as node:
        ranks, report = node.load(plan_of(objects, (1, 2, 1), 1024), store)
        check_exact(ranks, objects, fsdp=2)
        assert (report.retries, report.corrupt_chunks) == ({"digest_mismatch": 1}, 1)


@pytest.mark.parametrize(
    ("error", "cause"), [(ShortRead, "short_read"), (Throttled, "throttled"), (StoreUnavailable, "unavailable")]
)
def test_temporary_errors_are_retried_and_counted(shm_dir: Path, error: type[LongshoreError], cause: str):
    objects = flat_objects(tensors=16)
    store = FailingStore(MemoryStore(objects), lambda key, span, number: number % 5 == 0, lambda: error("for now"))
    with local_node(shm_dir, slots=8) as node:
        ranks, report = node.load(plan_of(objects, (1, 2, 1), 2048), store)
        check_exact(ranks, objects, fsdp=2)
        assert report.retries == {cause: store.started // 5}
        assert report.store_chunks == report.needed_chunks


@pytest.mark.parametrize(
    ("error", "kind"), [(ObjectNotFound, ChunkFailed), (ObjectChanged, ChunkFailed), (IntegrityError, IntegrityError)]
)
def test_a_permanent_error_ends_the_load_and_names_the_place(
    shm_dir: Path, error: type[LongshoreError], kind: type[LongshoreError]
):
    objects = flat_objects(tensors=4)
    store = FailingStore(MemoryStore(objects), lambda key, span, number: span.start > 2000, lambda: error("gone"))
    with local_node(shm_dir, slots=8, fetch_attempts=1, chunk_attempts=1) as node:
        ranks = node.ranks(plan := plan_of(objects, (1, 1, 1), 1024), store, node.begin(plan))
        run_all(ranks)
        found = ranks[0].outcome
        assert isinstance(found, kind)
        assert found.details["shard"] == "model.safetensors"
        assert found.details["chunk"] in range(len(plan.chunks))
        assert found.details["rank"] == 0
        if kind is ChunkFailed:
            assert found.details["cause"] == error.__name__
        assert ranks[0].device._segments == []


def test_a_bug_in_a_store_ends_the_load_without_a_hang(shm_dir: Path):
    objects = flat_objects(tensors=4)
    store = FailingStore(MemoryStore(objects), lambda *_: True, lambda: ZeroDivisionError("a bug"))
    with local_node(shm_dir, slots=8) as node:
        ranks = node.ranks(plan := plan_of(objects, (1, 1, 1), 1024), store, node.begin(plan))
        run_all(ranks)
        assert isinstance(ranks[0].outcome, LongshoreError)
        assert "ZeroDivisionError" in str(ranks[0].outcome)
        assert in_use(node) == (0, 0)


class StallingStore(WrappedStore):
    """Reads wait until they are released; the first `free` ones do not."""

    def __init__(self, objects: dict[str, bytes], free: int) -> None:
        super().__init__(MemoryStore(objects))
        self.free = free
        self.go = threading.Event()
        self.stalled = threading.Event()

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        with self.lock:
            self.free -= 1
            stall = self.free < 0
        if stall:
            self.stalled.set()
            self.go.wait(60)
        return super().read_into(key, byte_range, buffer, etag=etag)


def test_an_expired_lease_is_replaced_and_its_commit_ignored(shm_dir: Path):
    objects = flat_objects(tensors=12)
    plan = plan_of(objects, (1, 1, 2), 1024)
    slow, quick = StallingStore(objects, free=0), WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=20, lease_deadline_s=0.4, fetch_threads=2) as node:
        load_id = node.begin(plan)
        first, second = node.ranks(plan, slow, load_id)[0], node.ranks(plan, quick, load_id)[1]
        while node.agent._ledger._cache.stats().ready_slots < 20:
            time.sleep(0.005)  # with fewer, the first rank may get a single lease, and only that one expires
        threads = start_all([first])
        assert slow.stalled.wait(30)
        threads += start_all([second])
        threads[1].join()  # done, although the first rank keeps its leases
        slow.go.set()
        for thread in threads:
            thread.join()
        for rank in (first, second):
            assert isinstance(rank.outcome, RankReport), rank.outcome
            assert rank.tensor_bytes() == expected(objects, 0, 1, 1)
        assert node.agent.report(load_id).retries["lease_expired"] >= 2
        assert in_use(node) == (0, 0)


# --- the end, before the end ------------------------------------------------------------------------------------


def test_a_load_can_be_cancelled_midway(shm_dir: Path):
    objects = flat_objects(tensors=30)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = StallingStore(objects, free=6)
    with local_node(shm_dir, slots=12) as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, store, load_id)
        threads = start_all(ranks)
        assert store.stalled.wait(30)
        for rank in ranks:
            rank.loader.cancel()
        store.go.set()
        for thread in threads:
            thread.join()
        assert all(isinstance(rank.outcome, LoadCancelled) for rank in ranks)
        assert all(rank.device._segments == [] for rank in ranks)
        assert in_use(node) == (0, 0)
        # It does not hinder the next load.
        again, _ = node.load(plan_of(objects, (1, 1, 2), 1024), MemoryStore(objects))
        check_exact(again, objects)


def test_a_load_can_be_cancelled_before_start_and_after_end(shm_dir: Path):
    objects = flat_objects(tensors=4)
    plan = plan_of(objects, (1, 1, 2), 1024)
    with local_node(shm_dir, slots=12) as node:
        load_id = node.begin(plan)
        early, late = node.ranks(plan, MemoryStore(objects), load_id)
        early.loader.cancel(DoesNotFit("no room after all"))
        early.run()
        assert isinstance(early.outcome, DoesNotFit)
        late.run()
        late.loader.cancel()
        assert late.tensor_bytes() == expected(objects, 0, 1, 1)


def test_a_cancelled_rank_can_run_again_in_the_same_process(shm_dir: Path):
    objects = flat_objects(tensors=30)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = StallingStore(objects, free=6)
    with local_node(shm_dir, slots=5) as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, store, load_id)
        threads = start_all(ranks)
        assert store.stalled.wait(30)
        ranks[0].loader.cancel()
        store.go.set()
        threads[0].join()
        fresh = node.ranks(plan, store, load_id)[0]
        fresh.run()
        threads[1].join()
        check_exact([fresh, ranks[1]], objects)


def test_an_agent_that_ends_the_load_stops_its_ranks(shm_dir: Path):
    objects = flat_objects(tensors=30)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = StallingStore(objects, free=4)
    with local_node(shm_dir, slots=12) as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, store, load_id)
        threads = start_all(ranks)
        assert store.stalled.wait(30)
        node.agent.end(load_id)
        store.go.set()
        for thread in threads:
            thread.join()
        assert all(isinstance(rank.outcome, LoadCancelled) for rank in ranks)
        assert in_use(node) == (0, 0)
        latecomer = node.ranks(plan, store, load_id)[0]
        latecomer.run()
        assert isinstance(latecomer.outcome, LoadCancelled)


def test_an_agent_that_shuts_down_is_an_error_without_a_hang(shm_dir: Path):
    objects = flat_objects(tensors=30)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = StallingStore(objects, free=4)
    with local_node(shm_dir, slots=12) as node:
        ranks = node.ranks(plan, store, node.begin(plan))
        threads = start_all(ranks)
        assert store.stalled.wait(30)
        node.agent.shutdown()
        store.go.set()
        for thread in threads:
            thread.join()
        assert all(isinstance(rank.outcome, AgentEnded) for rank in ranks)
        for call in (node.agent.facts, lambda: node.agent.report("x"), lambda: node.agent.rank_lost("x", 0, 1)):
            with pytest.raises(AgentEnded):
                call()
        node.agent.end("x")
        node.agent.shutdown()


def test_a_rank_that_was_replaced_gets_rank_lost(shm_dir: Path):
    objects = flat_objects(tensors=30)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = StallingStore(objects, free=4)
    with local_node(shm_dir, slots=12) as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, store, load_id)
        threads = start_all(ranks)
        assert store.stalled.wait(30)
        node.agent.rank_lost(load_id, 0, 1)
        device = ranks[0].device.__class__()
        successor = Rank(RankLoader(node.agent, node.job(plan, load_id, 0, 1), device, store=store), device)
        threads += start_all([successor])
        store.go.set()
        for thread in threads:
            thread.join()
        assert isinstance(ranks[0].outcome, RankLost)
        check_exact([successor, ranks[1]], objects)
        assert in_use(node) == (0, 0)


# --- the agent is lost ------------------------------------------------------------------------------------------


def test_an_agent_restarted_in_mid_load_keeps_committed_chunks(shm_dir: Path):
    objects = flat_objects(tensors=40)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = StallingStore(objects, free=10)
    with local_node(shm_dir, slots=len(plan.chunks) + 5) as node:
        load_id = node.begin(plan)
        link = SwitchedLink(node.agent)
        ranks = node.ranks(plan, store, load_id, link)
        threads = start_all(ranks)
        assert store.stalled.wait(30)
        wait_for(lambda: node.agent.report(load_id).store_chunks == 10)
        link.cut.set()
        committed = set(store.reads)  # all others stall
        node.crash()
        store.go.set()
        wait_for(lambda: all(not rank.loader.state.in_hand for rank in ranks))
        node.agent = link.agent = node.start_agent()
        node.begin(plan, load_id)
        link.cut.clear()
        for thread in threads:
            thread.join()
        check_exact(ranks, objects)
        assert len(committed) == 10
        assert committed.isdisjoint(store.reads[10:])
        report = node.agent.report(load_id)
        assert report.store_chunks + report.cached_chunks == report.needed_chunks
        assert in_use(node) == (0, 0)


def test_a_new_arena_at_the_old_path_is_noticed(shm_dir: Path):
    """Otherwise a rank would continue in an unlinked file, and read there what no agent ever wrote."""
    objects = flat_objects(tensors=40)
    plan = plan_of(objects, (1, 1, 2), 1024)
    store = StallingStore(objects, free=10)
    with local_node(shm_dir, slots=12) as node:
        load_id = node.begin(plan)
        link = SwitchedLink(node.agent)
        ranks = node.ranks(plan, store, load_id, link)
        threads = start_all(ranks)
        assert store.stalled.wait(30)
        link.cut.set()
        node.agent.shutdown()
        store.go.set()
        wait_for(lambda: all(not rank.loader.state.in_hand for rank in ranks))
        node.agent = link.agent = node.start_agent()
        node.begin(plan, load_id)
        link.cut.clear()
        for thread in threads:
            thread.join()
        check_exact(ranks, objects)


def test_lost_answers_do_not_wait_for_a_deadline(shm_dir: Path):
    objects = flat_objects(tensors=40)
    plan = plan_of(objects, (1, 1, 2), 1024)
    with local_node(shm_dir, slots=8, lease_deadline_s=60.0) as node:
        load_id = node.begin(plan)
        link = SwitchedLink(node.agent, lose_answer=6)
        ranks = node.ranks(plan, MemoryStore(objects), load_id, link)
        run_all(ranks)
        check_exact(ranks, objects)
        assert node.agent.report(load_id).retries == {}
        assert in_use(node) == (0, 0)


def test_a_complete_rank_survives_the_loss_of_its_agent(shm_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("actors.rank.loader.AGENT_BACK_S", 0.2)
    objects = flat_objects(tensors=1)  # one chunk, so one copy
    plan = plan_of(objects, (1, 1, 1), 4096)
    with local_node(shm_dir, slots=8) as node:
        link = SwitchedLink(node.agent)
        rank = node.ranks(plan, MemoryStore(objects), node.begin(plan), link)[0]
        place = rank.device.synchronize

        def cut_after_the_last_copy() -> None:
            place()
            link.cut.set()

        rank.device.synchronize = cut_after_the_last_copy  # type: ignore[method-assign]
        rank.run()
        check_exact([rank], objects)


@pytest.mark.parametrize("known", [True, False])
def test_a_lost_agent_or_an_unknown_load_is_a_typed_error(shm_dir: Path, monkeypatch: pytest.MonkeyPatch, known: bool):
    monkeypatch.setattr("actors.rank.loader.AGENT_GONE_S", 0.2)
    objects = flat_objects(tensors=2)
    plan = plan_of(objects, (1, 1, 1), 4096)
    with local_node(shm_dir, slots=8) as node:
        link = SwitchedLink(node.agent)
        if known:
            link.cut.set()
            node.begin(plan, "load")
        rank = node.ranks(plan, MemoryStore(objects), "load", link)[0]
        monkeypatch.setattr(rank.loader, "_join", lambda join=rank.loader._join: join(0.2))
        rank.run()
        assert isinstance(rank.outcome, ClusterLost)


# --- devices and reports ----------------------------------------------------------------------------------------


def test_a_device_without_room_ends_the_load_before_a_byte_moved(shm_dir: Path, monkeypatch: pytest.MonkeyPatch):
    objects = flat_objects(tensors=2)
    plan = plan_of(objects, (1, 1, 1), 4096)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=8) as node:
        rank = node.ranks(plan, store, node.begin(plan))[0]

        def no_room(*_: object, **__: object) -> object:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr("actors.devices.cpu_device.mmap.mmap", no_room)
        rank.run()
        assert isinstance(rank.outcome, DoesNotFit)
        assert store.reads == []


def test_the_report_of_a_rank_is_consistent(shm_dir: Path):
    objects = flat_objects(tensors=20)
    plan = plan_of(objects, (1, 2, 1), 1024)
    with local_node(shm_dir, slots=30) as node:
        for cached in (False, True):
            ranks, report = node.load(plan, MemoryStore(objects))
            reports = [rank.outcome for rank in ranks if isinstance(rank.outcome, RankReport)]
            assert sum(rank.stages.fetch_bytes for rank in reports) == (0 if cached else report.needed_bytes)
            assert sum(rank.stages.verify_bytes for rank in reports) == (0 if cached else report.needed_bytes)
            for number, rank in enumerate(reports):
                assert rank.stages.place_bytes == rank.size_bytes == plan.ranks[number].size_bytes
                assert rank.device_bytes == plan.ranks[number].device_bytes
                assert rank.load_s > 0  # also when nothing had to be fetched
                assert rank.start_s >= 0


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_s, "that never came true"
        time.sleep(0.01)


def test_plan_of_equals_the_plan_of_a_published_model():
    """The reference of these tests is correct: chunks tile the shards, digests match their bytes."""
    objects = flat_objects(tensors=3)
    plan: LoadPlan = plan_of(objects, (1, 1, 1), 512)
    assert int(plan.chunks.sizes_bytes().max()) <= 512
    assert plan.chunks.hash_name == "blake3"
