"""A read hangs in a real load of ranks, agent and arena. A hedge brings the chunk, and the read is ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import safetensors

from cluster.planning.packed_plan import pack_shared, unpack_shared
from cluster.telemetry.report import RankReport
from storage.errors import ReadEnded
from storage.stores.object_store import ByteRange, MemoryStore, ObjectStore
from storage.stores.requests import ReadLimit
from tests.support.checkpoints import flat_objects
from tests.support.faulty_stores import WrappedStore
from tests.support.local_node import Belongings, local_node, plan_of, start_all
from tests.support.reference_slices import torch_share

pytestmark = pytest.mark.slow


class HangingStore(WrappedStore):
    """Reads for which `hangs(range, number of the read)` is true bring nothing until they are ended from outside."""

    def __init__(self, inner: ObjectStore, hangs: Callable[[ByteRange, int], bool]) -> None:
        super().__init__(inner)
        self.hangs = hangs
        self.hanging = threading.Event()
        self.ended = threading.Event()

    def read_pieces(
        self,
        key: str,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        etag: str | None = None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        with self.lock:
            self.reads.append((key, byte_range))
            hangs = self.hangs(byte_range, len(self.reads))
        while hangs and limit is not None:
            self.hanging.set()
            try:
                limit.check()
            except ReadEnded:
                self.ended.set()
                raise
            time.sleep(0.005)
        start = byte_range.start
        for piece in pieces:
            found = self.inner.read_into(key, ByteRange(start, start + len(piece)), piece, etag=etag)
            start += len(piece)
        return found


TENSORS = 24
NEVER_S = 10_000.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


@pytest.mark.parametrize("where", [0.4, 1.0], ids=["in the middle", "the last"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2), (1, 3, 1)], ids=["alone", "replicas", "sharded"])
def test_a_read_that_hangs_does_not_wait_for_a_deadline(
    shm_dir: Path, sizes: tuple[int, int, int], where: float
) -> None:
    objects = flat_objects(tensors=TENSORS)
    plan = plan_of(objects, sizes, 1024)
    tables = unpack_shared(pack_shared(plan))
    needed = set().union(*(tables.chunk_ids(rank).tolist() for rank in range(len(plan.ranks))))
    store = HangingStore(MemoryStore(objects), lambda _, number: number == int(where * len(needed)))
    settings = {"hedge_factor": 0.01, "hedge_after_s": 0.05, "lease_deadline_s": NEVER_S, "stuck_after_s": NEVER_S}
    with local_node(shm_dir, slots=2 * len(plan.chunks), **settings) as node:
        ranks, report = node.load(plan, store)  # no deadline ends it: the chunk is fetched twice
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
            assert rank.loader.state.placed_bytes == sum(len(data) for _, data in held.values())
        stats = node.agent._ledger._cache.stats()
        assert (stats.leased_slots, stats.quarantined_slots, stats.in_use_slots) == (0, 0, 0)


def test_a_complete_rank_does_not_wait_for_fetches_for_others(shm_dir: Path) -> None:
    """Its fetch for another rank hangs without a hedge. The load ends, and the rank returns complete."""
    objects = flat_objects(tensors=TENSORS)
    plan = plan_of(objects, (1, 2, 1), 256)
    tables = unpack_shared(pack_shared(plan))
    mine = {tables.chunks.byte_range(chunk) for chunk in tables.chunk_ids(0).tolist()}
    hung: list[ByteRange] = []

    def hangs(byte_range: ByteRange, _: int) -> bool:
        """The read is the first that the other rank needs; more would take all of its request slots."""
        if byte_range not in mine and not hung:
            hung.append(byte_range)
        return byte_range in hung

    store = HangingStore(MemoryStore(objects), hangs)
    with local_node(shm_dir, slots=2 * len(plan.chunks), lease_deadline_s=NEVER_S, stuck_after_s=NEVER_S) as node:
        load_id = node.begin(plan)
        first = node.ranks(plan, store, load_id)[0]
        (thread,) = start_all([first])
        assert store.hanging.wait(60)
        give_up_s = time.monotonic() + 60
        while not first.loader.state.finished and time.monotonic() < give_up_s:
            time.sleep(0.005)
        node.agent.end(load_id)
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(first.outcome, RankReport), first.outcome
        assert store.ended.is_set()
        stats = node.agent._ledger._cache.stats()
        assert (stats.leased_slots, stats.quarantined_slots) == (0, 0)


def whole_tensors(objects: dict[str, bytes]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {
        name: (tuple(entry["shape"]), bytes(entry["data"]))
        for key, data in objects.items()
        if key.endswith(".safetensors")
        for name, entry in safetensors.deserialize(data)
    }
