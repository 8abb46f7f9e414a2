"""A read that hangs in a real load of ranks, agent and arena: another one brings the chunk, and it is ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors

from cluster.packed_plan import pack_shared, unpack_shared
from storage.object_store import MemoryStore
from tests.support.checkpoints import flat_objects
from tests.support.faulty_stores import HangingStore
from tests.support.local_node import Belongings, local_node, plan_of
from tests.support.reference_slices import torch_share

TENSORS = 24
NEVER_S = 10_000.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


@pytest.mark.parametrize("where", [0.4, 1.0], ids=["in the middle", "the last"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2), (1, 3, 1)], ids=["alone", "replicas", "sharded"])
def test_a_read_that_hangs_costs_no_deadline(shm_dir: Path, sizes: tuple[int, int, int], where: float) -> None:
    objects = flat_objects(tensors=TENSORS)
    plan = plan_of(objects, sizes, 1024)
    tables = unpack_shared(pack_shared(plan))
    needed = set().union(*(tables.chunk_ids(rank).tolist() for rank in range(len(plan.ranks))))
    store = HangingStore(MemoryStore(objects), int(where * len(needed)))
    settings = {"hedge_factor": 0.01, "hedge_after_s": 0.05, "lease_deadline_s": NEVER_S, "stuck_after_s": NEVER_S}
    with local_node(shm_dir, slots=2 * len(plan.chunks), **settings) as node:
        ranks, report = node.load(plan, store)  # no deadline helps here: it ends because the chunk is fetched twice
        assert store.ended.wait(60)
        assert 1 <= report.hedges <= report.needed_chunks
        assert report.retries == {}
        assert report.store_chunks == report.needed_chunks
        assert report.store_bytes == report.needed_bytes
        for number, rank in enumerate(ranks):
            held = rank.tensor_bytes()
            assert held == {
                name: torch_share(shape, data, sizes[1], number % sizes[1])
                for name, (shape, data) in whole_tensors(objects).items()
            }
            assert rank.loader._work.placed_bytes == sum(len(data) for _, data in held.values())
        stats = node.agent._ledger._cache.stats()
        assert (stats.leased_slots, stats.quarantined_slots, stats.in_use_slots) == (0, 0, 0)


def whole_tensors(objects: dict[str, bytes]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {
        name: (tuple(entry["shape"]), bytes(entry["data"]))
        for key, data in objects.items()
        if key.endswith(".safetensors")
        for name, entry in safetensors.deserialize(data)
    }
