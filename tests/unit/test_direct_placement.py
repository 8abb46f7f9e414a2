"""Chunks that only one rank needs are received in its own memory; the rest go through the arena."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import expand_read_items, whole_chunks
from storage.errors import IntegrityError, LongshoreError
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import flat_objects, odd_objects
from tests.support.faulty_stores import FlipByteStore, WrappedStore
from tests.support.local_node import Rank, local_node, plan_of, run_all

pytestmark = pytest.mark.slow

FSDP = (1, 4, 1)


def check_tensors(ranks: list[Rank], plan: LoadPlan, objects: dict[str, bytes]) -> None:
    """Check that every rank holds the bytes of its slices."""
    for rank, mine in zip(ranks, plan.ranks, strict=True):
        items = expand_read_items(mine.slices, plan.chunks)
        expected = [np.zeros(size, np.uint8) for size in mine.segment_bytes]
        for row in range(len(items)):
            chunk = int(items.chunk[row])
            span, key = plan.chunks.byte_range(chunk), plan.shards[plan.chunks.shard[chunk]].key
            data = np.frombuffer(objects[key][span.start : span.end], np.uint8)
            for run in range(int(items.count[row])):
                source = int(items.src_offset[row] + run * items.src_stride[row])
                dest = int(items.dest_offset[row] + run * items.dest_stride[row])
                size = int(items.run_bytes[row])
                expected[int(items.segment[row])][dest : dest + size] = data[source : source + size]
        found = rank.device.tensors(mine.slices)
        assert set(found) == {piece.name for piece in mine.slices}
        for segment, wanted in zip(rank.device._segments, expected, strict=True):
            assert np.array_equal(segment.data, wanted)


@pytest.fixture(params=["flat", "odd"])
def objects(request: pytest.FixtureRequest) -> dict[str, bytes]:
    return flat_objects(tensors=12, rows=2048) if request.param == "flat" else odd_objects()


def test_chunks_of_one_rank_bypass_the_arena(shm_dir: Path) -> None:
    objects = flat_objects(tensors=12, rows=2048)
    plan = plan_of(objects, FSDP, 4096)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=128, placement="direct") as node:
        ranks, report = node.load(plan, store)
        check_tensors(ranks, plan, objects)
        direct = [rank.loader.state._direct for rank in ranks]
        wanted_once = [c for mine in direct for c in mine if sum(c in plan.ranks[r].chunk_ids for r in range(4)) == 1]
        sizes = plan.chunks.sizes_bytes()
        assert report.direct_bytes == int(sizes[wanted_once].sum()) > 0
        assert report.store_bytes == report.needed_bytes == store.read_bytes
        assert report.store_chunks == report.needed_chunks
        assert node.agent._ledger._cache.stats().used_bytes == report.needed_bytes - report.direct_bytes


def test_both_modes_and_any_layout_give_the_same_bytes(objects: dict[str, bytes], shm_dir: Path) -> None:
    for sizes in ((1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 2, 2)):
        for placement in ("via_arena", "direct"):
            plan = plan_of(objects, sizes, 4096)
            store = WrappedStore(MemoryStore(objects))
            with local_node(shm_dir, slots=128, placement=placement) as node:
                ranks, report = node.load(plan, store)
                check_tensors(ranks, plan, objects)
                assert store.read_bytes == report.needed_bytes
                assert bool(report.direct_bytes) <= (placement == "direct")


@pytest.mark.parametrize(
    ("slots", "local", "disk", "direct"),
    [
        (128, False, False, False),
        (9, False, False, True),  # too small for the share
        (128, True, False, True),  # the kernel's page cache keeps local files
        (128, True, True, False),  # which may be on a network, so a disk tier keeps them
    ],
)
def test_auto_is_direct_where_the_arena_need_not_keep_the_share(
    shm_dir: Path, tmp_path: Path, slots: int, local: bool, disk: bool, direct: bool
) -> None:
    objects = flat_objects(tensors=12, rows=2048)
    plan = plan_of(objects, FSDP, 4096)
    assert 9 < len(plan.chunks) <= 128
    tier = {"disk_cache_dir": str(tmp_path / "tier")} if disk else {}
    with local_node(shm_dir, slots=slots, placement="auto", is_local=local, **tier) as node:
        ranks, report = node.load(plan, MemoryStore(objects))
        check_tensors(ranks, plan, objects)
        assert report.direct == bool(report.direct_bytes) == direct


def test_chunks_in_the_arena_are_not_fetched_again(shm_dir: Path) -> None:
    objects = flat_objects(tensors=12, rows=2048)
    plan = plan_of(objects, FSDP, 4096)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=128) as node:
        node.load(plan, store)
        node.placement = "direct"
        ranks, report = node.load(plan, store)
        check_tensors(ranks, plan, objects)
        assert (report.direct_bytes, report.store_bytes) == (0, 0)
        assert store.read_bytes == report.needed_bytes


def first_direct_byte(plan: LoadPlan, objects: dict[str, bytes]) -> tuple[str, int]:
    items = expand_read_items(plan.ranks[1].slices, plan.chunks)
    chunk = int(whole_chunks(items, plan.chunks, 64)[1])
    return plan.shards[plan.chunks.shard[chunk]].key, plan.chunks.byte_range(chunk).start


def test_a_damaged_chunk_is_fetched_again(shm_dir: Path) -> None:
    objects = flat_objects(tensors=12, rows=2048)
    plan = plan_of(objects, FSDP, 4096)
    # The rank's own tries are spent. The next one goes through the arena, by any rank that may still try.
    store = FlipByteStore(MemoryStore(objects), *first_direct_byte(plan, objects), on_reading=lambda n: n <= 2)
    with local_node(shm_dir, slots=128, placement="direct", fetch_attempts=2) as node:
        ranks, report = node.load(plan, store)
        check_tensors(ranks, plan, objects)
        assert report.corrupt_chunks == 2
        assert report.store_chunks == report.needed_chunks


def test_a_chunk_that_stays_damaged_ends_the_load_and_is_named(shm_dir: Path) -> None:
    objects = flat_objects(tensors=12, rows=2048)
    plan = plan_of(objects, FSDP, 4096)
    key, offset = first_direct_byte(plan, objects)
    store = FlipByteStore(MemoryStore(objects), key, offset, on_reading=lambda n: True)
    with local_node(shm_dir, slots=128, placement="direct", fetch_attempts=1) as node:
        ranks = node.ranks(plan, store, node.begin(plan))
        run_all(ranks)
        errors = [rank.outcome for rank in ranks if isinstance(rank.outcome, IntegrityError)]
        assert errors
        assert errors[0].details["shard"] == key
        assert all(isinstance(rank.outcome, LongshoreError) or rank.outcome.size_bytes for rank in ranks)
        assert not ranks[1].device._segments


def test_a_replaced_rank_refetches_only_its_direct_chunks(shm_dir: Path) -> None:
    objects = flat_objects(tensors=12, rows=2048)
    plan = plan_of(objects, FSDP, 4096)
    store = WrappedStore(MemoryStore(objects))
    with local_node(shm_dir, slots=128, placement="direct") as node:
        load_id = node.begin(plan)
        ranks = node.ranks(plan, store, load_id)
        run_all(ranks[:2])
        read_bytes = store.read_bytes
        node.agent.rank_lost(load_id, 1, 1)
        again = node.rank(plan, store, load_id, 1, incarnation=1)
        run_all([again, *ranks[2:]])
        check_tensors([ranks[0], again, *ranks[2:]], plan, objects)
        sizes = plan.chunks.sizes_bytes()
        mine = [c for c in ranks[1].loader.state._direct if sum(c in plan.ranks[r].chunk_ids for r in range(4)) == 1]
        others = set(np.concatenate([plan.ranks[r].chunk_ids for r in (2, 3)]).tolist())
        before = set(np.concatenate([plan.ranks[r].chunk_ids for r in (0, 1)]).tolist())
        assert store.read_bytes - read_bytes == int(sizes[mine].sum()) + int(sizes[sorted(others - before)].sum())
        assert node.agent.report(load_id).refetched_chunks == len(mine)


@given(st.integers(1, 6), st.integers(1, 5000), st.integers(1, 4))
def test_a_whole_chunk_is_tiled_by_its_parts(tensors: int, chunk_bytes: int, fsdp: int) -> None:
    """Chunks that may be received in place have every byte exactly once, in order."""
    plan = plan_of(flat_objects(tensors=tensors, rows=256), (1, fsdp, 1), chunk_bytes)
    for mine in plan.ranks:
        items = expand_read_items(mine.slices, plan.chunks)
        for chunk in whole_chunks(items, plan.chunks, 8).tolist():
            rows = items.for_chunk(chunk)
            assert rows.stop - rows.start <= 8
            position = 0
            for row in range(rows.start, rows.stop):
                assert (int(items.src_offset[row]), int(items.count[row])) == (position, 1)
                position += int(items.run_bytes[row])
            assert position == plan.chunks.byte_range(chunk).size_bytes
