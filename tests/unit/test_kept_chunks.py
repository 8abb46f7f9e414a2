"""Chunks that an arena keeps beside its window: read again without the store, and never at the cost of a load."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from actors.node import node_resources
from cluster.fit.needs import min_slots
from storage.disk.files import SUBFOLDER
from storage.host.memory import MemoryPool
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import flat_objects
from tests.support.disk_chunks import chunks_in
from tests.support.faulty_stores import WrappedStore
from tests.support.local_node import SLOT_BYTES, Belongings, LocalNode, local_node, plan_of, start_all
from tests.support.ray_clusters import eventually
from tests.support.reference_slices import check_exact

CHUNK_BYTES = 4096
WINDOW = min_slots(2)
HEADER_BYTES = 48 << 10  # of the arenas here, at most


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """About 25 chunks."""
    return flat_objects(tensors=24, rows=256)


def node_with(folder: Path, kept_slots: int = 64, **settings: object) -> LocalNode:
    return local_node(folder, WINDOW + kept_slots, **{"window_bytes": WINDOW * SLOT_BYTES, **settings})


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (1, 1, 1)])
def test_a_second_load_takes_nothing_from_the_store(shm_dir: Path, objects, sizes, digests: bool) -> None:
    plan = plan_of(objects, sizes, CHUNK_BYTES, digests=digests)
    store = WrappedStore(MemoryStore(objects))
    with node_with(shm_dir) as node:
        for loaded_before in (False, True):
            ranks, report = node.load(plan, store)
            check_exact(ranks, objects, fsdp=sizes[1])
            assert report.needed_chunks > 2 * WINDOW  # so that the window alone could not keep the model
            assert report.cached_chunks == loaded_before * report.needed_chunks
            assert report.cached_bytes + report.store_bytes == report.needed_bytes
        assert len(store.reads) == report.needed_chunks
        # The arena takes its header, its window and what it keeps, in whole pages.
        window_bytes = WINDOW * SLOT_BYTES
        assert report.window_bytes == window_bytes
        kept_bytes = report.arena_bytes - window_bytes
        assert report.needed_bytes <= kept_bytes <= report.needed_bytes + report.needed_chunks * 4096 + HEADER_BYTES
        assert report.arena_limit_bytes == window_bytes + 64 * SLOT_BYTES


def test_a_model_larger_than_the_limit_evicts_nothing(shm_dir: Path, objects) -> None:
    small = flat_objects(tensors=2, rows=256, seed=5)
    store = WrappedStore(MemoryStore(objects))
    with node_with(shm_dir, kept_slots=8) as node:
        kept = WrappedStore(MemoryStore(small))
        for _ in range(2):
            node.load(plan_of(small, chunk_bytes=CHUNK_BYTES), kept)
        reads = len(kept.reads)
        for _ in range(2):
            ranks, report = node.load(plan_of(objects, (1, 2, 1), CHUNK_BYTES), store)
            check_exact(ranks, objects, fsdp=2)
        assert report.store_chunks > 0
        node.load(plan_of(small, chunk_bytes=CHUNK_BYTES), kept)
        assert len(kept.reads) == reads


def test_a_restarted_agent_still_has_what_was_kept(shm_dir: Path, objects) -> None:
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    store = WrappedStore(MemoryStore(objects))
    with node_with(shm_dir) as node:
        node.load(plan, store)
        node.crash()
        node.agent = node.start_agent()
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects, fsdp=2)
        assert report.cached_chunks == report.needed_chunks == len(store.reads)


def test_a_full_file_system_ends_keeping_and_not_the_load(small_tmpfs: Path, objects) -> None:
    """The window and its header leave room for some of the chunks in 8 MiB."""
    many = flat_objects(tensors=160, rows=4096)
    plan = plan_of(many, (1, 2, 1), 64 << 10)
    store = WrappedStore(MemoryStore(many))
    settings = {"host_reserve_bytes": 0, "arena_bytes": 256 * SLOT_BYTES}
    with node_with(small_tmpfs, **settings) as node:
        for _ in range(2):
            ranks, report = node.load(plan, store)
            check_exact(ranks, many, fsdp=2)
        assert 0 < report.cached_chunks < report.needed_chunks
        assert report.cached_chunks + report.store_chunks == report.needed_chunks


class Host:
    """A host whose free memory the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 1 << 40
        monkeypatch.setattr(node_resources, "memory_pools", lambda: (MemoryPool("host", self.free_bytes, 1 << 40),))
        monkeypatch.setattr(node_resources, "ROOM_EVERY_S", 0.0)
        monkeypatch.setattr(node_resources, "ray_kills_above", lambda environ: 1.0)


def kept_bytes(node: LocalNode) -> int:
    arena = node.agent._arena
    assert arena is not None
    return arena.taken_bytes - arena.window_slots * arena.slot_bytes


def test_nothing_is_kept_while_the_host_lacks_memory(shm_dir: Path, objects, monkeypatch) -> None:
    host = Host(monkeypatch)
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    store = WrappedStore(MemoryStore(objects))
    with node_with(shm_dir) as node:
        host.free_bytes = 1 << 20
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects, fsdp=2)
        assert kept_bytes(node) < HEADER_BYTES
        host.free_bytes = 1 << 40
        for _ in range(3):  # what the window still had is kept when it is fetched again
            _, report = node.load(plan, store)
        assert report.cached_chunks == report.needed_chunks


def test_kept_chunks_give_memory_back_to_the_host(shm_dir: Path, objects, monkeypatch) -> None:
    host = Host(monkeypatch)
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    store = WrappedStore(MemoryStore(objects))
    with node_with(shm_dir) as node:
        _, report = node.load(plan, store)
        assert node.agent.facts().pools[0].free_bytes >= host.free_bytes + report.needed_bytes
        host.free_bytes = 0
        eventually(lambda: kept_bytes(node) < HEADER_BYTES, lambda: f"{kept_bytes(node)} bytes are kept")
        host.free_bytes = 1 << 40
        ranks, report = node.load(plan, store)
        check_exact(ranks, objects, fsdp=2)
        assert report.store_chunks == report.needed_chunks


def test_a_load_that_needs_memory_gets_it_before_it_begins(shm_dir: Path, objects, monkeypatch) -> None:
    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    host = Host(monkeypatch)
    with node_with(shm_dir) as node:
        node.load(plan, MemoryStore(objects))
        before = kept_bytes(node)
        host.free_bytes = (1 << 30) + node_resources.LEFT_BYTES
        monkeypatch.setattr(node_resources, "free_bytes", lambda directory: 1 << 27)  # tensors are not put there
        node.agent._kept.make_room(1 << 30)
        assert kept_bytes(node) == before
        node.agent._kept.make_room((1 << 30) + 1)
        assert kept_bytes(node) < HEADER_BYTES


def may_grow(node: LocalNode) -> bool:
    with node.agent._changed:
        node.agent._kept.look()
        return node.agent._ledger._cache.may_grow


def test_kept_chunks_leave_memory_that_tensors_will_take(shm_dir: Path, objects, monkeypatch) -> None:
    plan, host = plan_of(objects, (1, 2, 1), CHUNK_BYTES), Host(monkeypatch)
    with node_with(shm_dir) as node:
        host.free_bytes = (1 << 30) + node_resources.LEFT_BYTES + node.agent._kept._margin_bytes
        assert may_grow(node)
        load_id = node.begin(plan, host_bytes=1 << 30)
        assert not may_grow(node)
        ranks = node.ranks(plan, MemoryStore(objects), load_id)
        for thread in start_all(ranks):
            thread.join()
        check_exact(ranks, objects, fsdp=2)
        assert may_grow(node)  # all is placed: what is free now is nobody's


def test_memory_that_cannot_be_given_back_stays_in_use(shm_dir: Path, objects, monkeypatch, caplog) -> None:
    plan, host = plan_of(objects, (1, 2, 1), CHUNK_BYTES), Host(monkeypatch)
    with node_with(shm_dir) as node:
        node.load(plan, MemoryStore(objects))
        before = kept_bytes(node)
        with monkeypatch.context() as broken:
            broken.setattr(mmap, "mmap", lambda *_, **__: os.stat("/no such file"))
            host.free_bytes = 1 << 30
            node.agent._kept.make_room(1 << 40)
            host.free_bytes = 1 << 40
        assert "cannot give back memory of the arena" in caplog.text
        assert kept_bytes(node) == before
        node.agent._kept.make_room(1 << 50)
        assert kept_bytes(node) < HEADER_BYTES


def test_kept_chunks_are_free_for_others_when_all_loads_have_them(shm_dir: Path, objects) -> None:
    """One of two loads at once reads the kept copy of a chunk, and the other copies it from the window."""
    plan, store = plan_of(objects, (1, 2, 1), CHUNK_BYTES), MemoryStore(objects)
    with local_node(shm_dir, 2 * WINDOW + 64, window_bytes=2 * WINDOW * SLOT_BYTES) as node:
        node.load(plan, store)
        loads = [node.begin(plan), node.begin(plan)]
        ranks = [rank for load_id in loads for rank in node.ranks(plan, store, load_id)]
        for thread in start_all(ranks):
            thread.join()
        for pair in (ranks[:2], ranks[2:]):
            check_exact(pair, objects, fsdp=2)
        assert node.agent._ledger._cache.stats().kept_in_use_slots == 0


def test_chunks_that_nobody_uses_are_given_back(shm_dir: Path, objects) -> None:
    with node_with(shm_dir, cache_idle_s=0.2) as node:
        node.load(plan_of(objects, (1, 2, 1), CHUNK_BYTES), MemoryStore(objects))
        eventually(lambda: kept_bytes(node) < HEADER_BYTES, lambda: f"{kept_bytes(node)} bytes are kept")


def test_the_disk_tier_is_written_from_kept_chunks(shm_dir: Path, tmp_path: Path, objects: Mapping[str, bytes]) -> None:
    """The window is too small for the model, and the disk is slower than the load."""
    disk = tmp_path / "disk"

    def on_disk() -> int:
        return len(chunks_in(str(disk / SUBFOLDER)))

    plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES)
    with node_with(shm_dir, disk_cache_dir=str(disk), disk_cache_bytes=1 << 24) as node:
        _, report = node.load(plan, MemoryStore(objects))
        eventually(lambda: on_disk() == report.needed_chunks, lambda: f"{on_disk()} chunks came to disk")
    with node_with(shm_dir, disk_cache_dir=str(disk), disk_cache_bytes=1 << 24) as node:
        ranks, report = node.load(plan, MemoryStore({}))
        check_exact(ranks, objects, fsdp=2)
        assert report.disk_chunks == report.needed_chunks


def test_a_model_that_is_on_disk_and_larger_than_the_limit_evicts_nothing(
    shm_dir: Path, tmp_path: Path, objects: Mapping[str, bytes]
) -> None:
    small = flat_objects(tensors=2, rows=256, seed=5)
    large_plan, small_plan = plan_of(objects, (1, 2, 1), CHUNK_BYTES), plan_of(small, chunk_bytes=CHUNK_BYTES)
    disk = tmp_path / "disk"
    with node_with(shm_dir, disk_cache_dir=str(disk), disk_cache_bytes=1 << 24) as node:
        _, report = node.load(large_plan, MemoryStore(objects))
        eventually(lambda: len(chunks_in(str(disk / SUBFOLDER))) == report.needed_chunks, "not all came to disk")
    with node_with(shm_dir, kept_slots=8, disk_cache_dir=str(disk), disk_cache_bytes=1 << 24) as node:
        for _ in range(2):
            node.load(small_plan, MemoryStore(small))
        ranks, report = node.load(large_plan, MemoryStore({}))
        check_exact(ranks, objects, fsdp=2)
        assert report.disk_chunks == report.needed_chunks
        _, report = node.load(small_plan, MemoryStore({}))
        assert report.cached_chunks == report.needed_chunks
