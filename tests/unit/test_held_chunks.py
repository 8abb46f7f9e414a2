"""Nodes report the chunks of a model that they hold, and the next load takes exactly those from there."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.node.disk_backlog import DiskBacklog
from actors.node.node_ledger import NodeLedger
from actors.node_agent import NodeAgent
from cluster.errors import AgentEnded
from cluster.planning import chunk_keys
from cluster.planning.chunk_keys import (
    NO_KEY,
    HeldChunks,
    NodeSources,
    chunk_key,
    key_blocks,
    lasting_keys,
    node_sources,
)
from cluster.planning.make_plan import needed_chunks
from cluster.planning.plan import LoadPlan
from cluster.telemetry.stats import NodeReport
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import KEY_BYTES
from storage.disk.files import SUBFOLDER
from storage.host.processes import ProcessId
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import flat_objects
from tests.support.disk_chunks import chunks_in
from tests.support.local_node import LocalNode, local_node, plan_of, run_all
from tests.support.ray_clusters import eventually

CHUNK_BYTES = 512  # two of a tensor
STORE = "twin"  # as LocalNode calls it


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=70))
def test_bitmaps_survive_a_round_trip(held: list[tuple[bool, bool]]) -> None:
    packed = HeldChunks.of(held)
    assert list(zip(packed.in_arena().tolist(), packed.on_disk().tolist(), strict=True)) == held
    assert len(pickle.dumps(packed)) < 200 + len(held)  # enough for a model of a million chunks too


@given(st.data())
def test_every_needed_byte_has_one_source(data: st.DataObject) -> None:
    held = data.draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
    sizes = np.array([data.draw(st.integers(1, 100)) for _ in held], np.int64)
    needed = np.array(sorted(data.draw(st.sets(st.integers(0, len(held) - 1)))), np.int64)
    found = node_sources(needed, sizes, HeldChunks.of(held))
    of = [(int(sizes[chunk]), *held[chunk]) for chunk in needed.tolist()]
    assert found.cached_bytes == sum(size for size, arena, _ in of if arena)
    assert found.disk_bytes == sum(size for size, arena, disk in of if disk and not arena)
    assert found.store_bytes == sum(size for size, arena, disk in of if not arena and not disk)
    assert node_sources(needed, sizes, None) == NodeSources(sum(size for size, *_ in of), 0, 0)


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=20), st.integers(1, 7))
def test_keys_are_sent_in_blocks(keys: list[bytes], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_keys, "BLOCK_CHUNKS", block)
        blocks = list(key_blocks(b"".join(keys)))
    assert [key for some in blocks for key in some] == keys
    assert all(len(some) <= block for some in blocks)


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    return flat_objects(tensors=24, rows=64)


def expected_of(agent: NodeAgent, plan: LoadPlan, ranks: Sequence[int] = ()) -> NodeSources:
    held = agent.holds(lasting_keys(plan.shards, plan.chunks, STORE))
    return node_sources(needed_chunks(plan, ranks or range(len(plan.ranks))), plan.chunks.sizes_bytes(), held)


def found_by(report: NodeReport) -> NodeSources:
    return NodeSources(report.store_bytes, report.cached_bytes, report.disk_bytes)


@pytest.mark.parametrize("digests", [True, False])
def test_a_load_finds_the_chunks_that_the_agent_reported(
    shm_dir: Path, objects: dict[str, bytes], digests: bool
) -> None:
    store = MemoryStore(objects)
    halves, whole = plan_of(objects, (1, 2, 1), CHUNK_BYTES, digests), plan_of(objects, (1, 1, 1), CHUNK_BYTES, digests)
    with local_node(shm_dir, 64) as node:
        nothing = expected_of(node.agent, whole)
        assert (nothing.cached_bytes, nothing.disk_bytes) == (0, 0)
        assert expected_of(node.agent, whole) == nothing  # the request brought nothing
        load_id = node.begin(halves, ranks=[0])  # the other half stays in the store
        run_all([node.rank(halves, store, load_id, 0)])
        expected = expected_of(node.agent, whole)
        assert min(expected.store_bytes, expected.cached_bytes) > 0
        _, report = node.load(whole, store)
        assert found_by(report) == expected
        again = expected_of(node.agent, whole)
        assert (again.store_bytes, again.cached_bytes) == (0, report.needed_bytes)


def test_chunks_on_disk_are_read_from_disk(shm_dir: Path, tmp_path: Path, objects: dict[str, bytes]) -> None:
    settings = {"disk_cache_dir": str(tmp_path), "disk_cache_bytes": 1 << 24}
    halves, whole = plan_of(objects, (1, 2, 1), CHUNK_BYTES), plan_of(objects, (1, 1, 1), CHUNK_BYTES)
    with local_node(shm_dir, 64, **settings) as node:
        keep_half(node, halves, MemoryStore(objects), tmp_path)
    with local_node(shm_dir, 64, **settings) as node:  # its arena is empty
        expected = expected_of(node.agent, whole)
        assert min(expected.store_bytes, expected.disk_bytes) > expected.cached_bytes == 0
        _, report = node.load(whole, MemoryStore(objects))
        assert found_by(report) == expected
        after = expected_of(node.agent, whole)
        assert (after.store_bytes, after.disk_bytes) == (0, 0)  # the arena has it all, and goes first


def keep_half(node: LocalNode, halves: LoadPlan, store: MemoryStore, disk: Path) -> None:
    """The first rank's half is loaded, and then kept on disk."""
    load_id = node.begin(halves, ranks=[0])
    run_all([node.rank(halves, store, load_id, 0)])
    wanted = len(needed_chunks(halves, [0]))
    eventually(
        lambda: len(chunks_in(str(disk / SUBFOLDER))) == wanted,
        lambda: f"{len(chunks_in(str(disk / SUBFOLDER)))} of {wanted} chunks came to disk",
    )


def test_a_look_does_not_change_the_order_of_eviction() -> None:
    class Shelf:
        unkept_chunks = 0

        def __contains__(self, key: object) -> bool:
            return key == bytes([7]) * KEY_BYTES

        def touch(self, key: bytes) -> None:
            raise AssertionError("it was not used")

    cache, me = ChunkCache(2), ProcessId.current()
    ledger = NodeLedger(cache, 10, disk=(backlog := DiskBacklog(Shelf())))
    old, new, on_disk = (bytes([number]) * KEY_BYTES for number in (1, 2, 7))
    for key in (old, new):
        lease = cache.lease(key, me, 1e9)
        assert lease is not None
        cache.commit(lease.lease_id, 10)
    assert ledger.held([old, on_disk, NO_KEY, old]) == [(True, False), (False, True), (False, False), (True, False)]
    backlog.unusable(on_disk)
    assert ledger.held([on_disk]) == [(False, False)]
    lease = cache.lease(bytes([3]) * KEY_BYTES, me, 1e9)
    assert lease is not None
    assert lease.evicted_key == old  # the look did not count as a use


def test_reported_keys_equal_those_of_the_load(objects: dict[str, bytes]) -> None:
    plan = plan_of(objects, (1, 1, 1), CHUNK_BYTES, digests=False)
    keys = lasting_keys(plan.shards, plan.chunks, STORE)
    assert len(keys) == KEY_BYTES * len(plan.chunks)
    assert keys[:KEY_BYTES] == chunk_key(plan.shards, plan.chunks, STORE, 0, "some load")
    unversioned = [type(shard)(shard.key, shard.size_bytes, None) for shard in plan.shards]
    assert chunk_key(unversioned, plan.chunks, STORE, 0) == NO_KEY  # no other load can know it
    assert chunk_key(unversioned, plan.chunks, STORE, 0, "a") != chunk_key(unversioned, plan.chunks, STORE, 0, "b")


def test_a_shut_down_agent_reports_that(shm_dir: Path) -> None:
    with local_node(shm_dir, 4) as node:
        assert node.agent.holds(b"") == HeldChunks.of([])
    with pytest.raises(AgentEnded):
        node.agent.holds(NO_KEY)
