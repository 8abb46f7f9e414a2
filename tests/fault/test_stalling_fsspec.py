"""An fsspec file system hangs in mid-load. Its reads cannot be ended, and no load waits for them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from cluster.errors import ChunkFailed
from cluster.planning.plan import LoadPlan
from storage.errors import ReadEnded, StoreError
from storage.store_ref import StoreRef
from storage.stores.fsspec_store import FsspecStore
from storage.stores.object_store import ByteRange, read_pieces
from storage.stores.requests import ReadLimit, ReadLimits
from tests.support.faulty_bucket import CHUNK_BYTES, FSDP, KEY, OBJECTS, TENSORS, check_at_rest, refused_with, run
from tests.support.local_node import Belongings, local_node, plan_of
from tests.support.reference_slices import check_exact

pytestmark = pytest.mark.slow


class Stalls:
    """A file system of fsspec's in memory; the reads for which `hangs` is true wait for `go`."""

    def __init__(self, objects: dict[str, bytes], hangs: Callable[[int], bool]) -> None:
        """`hangs` is asked with the number of each read of data (from 1)."""
        self.objects = dict(objects)
        self.go = threading.Event()
        self.reads = 0
        self.hanging = 0
        self._hangs = hangs
        self._lock = threading.Lock()

    def store(self) -> FsspecStore:
        stalls = self

        class StallingFileSystem(AbstractFileSystem):  # type: ignore[misc]
            protocol = "stalling"
            cachable = False

            def info(self, path: str, **_: Any) -> dict[str, Any]:
                data = stalls.objects[self._strip_protocol(path).rpartition("/")[2]]
                etag = hashlib.md5(data, usedforsecurity=False).hexdigest()  # as the twin in memory has it
                return {"name": path, "size": len(data), "type": "file", "ETag": etag}

            def cat_file(self, path: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
                stalls.wait()
                return stalls.objects[self._strip_protocol(path).rpartition("/")[2]][start:end]

        fsspec.register_implementation("stalling", StallingFileSystem, clobber=True)
        return FsspecStore(StoreRef("stalling", "bucket", "model"))

    def wait(self) -> None:
        with self._lock:
            self.reads += 1
            hangs = self._hangs(self.reads)
            self.hanging += hangs
        if hangs:
            self.go.wait()
            with self._lock:
                self.hanging -= 1


NEVER_S = 10_000.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = Belongings()
    yield
    give_up_s = time.monotonic() + 20
    while time.monotonic() < give_up_s and len(before.threads) < len(Belongings().threads):
        time.sleep(0.01)  # until abandoned reads have returned
    before.check()


@pytest.fixture
def plan() -> LoadPlan:
    return plan_of(OBJECTS, (1, FSDP, 1), CHUNK_BYTES)


@pytest.mark.parametrize("placement", ["via_arena", "direct"])
def test_a_read_that_hangs_costs_its_deadline_and_no_more(shm_dir: Path, placement: str) -> None:
    """It still hangs when the load is over and exact; what it brings in the end goes nowhere."""
    fsdp = FSDP if placement == "via_arena" else 1  # what two ranks need goes through the arena
    plan = plan_of(OBJECTS, (1, fsdp, 1), CHUNK_BYTES)
    stalls = Stalls(OBJECTS, lambda number: number == 3)
    with (
        closing(stalls.store()) as store,
        local_node(shm_dir, slots=40, placement=placement, lease_deadline_s=1.0, stuck_after_s=NEVER_S) as node,
    ):
        ranks, report = run(node, plan, store)
        assert stalls.hanging == 1
        check_exact(ranks, OBJECTS, fsdp=fsdp)
        check_at_rest(node)
        assert (report.direct_bytes > 0) == (placement == "direct")
        assert set(report.retries) == {"lease_expired"}
        assert stalls.reads > TENSORS
        stalls.go.set()
        again, _ = run(node, plan, store)
        for one in (ranks, again):
            check_exact(one, OBJECTS, fsdp=fsdp)


def test_a_hedge_does_not_wait_for_the_deadline(shm_dir: Path, plan: LoadPlan) -> None:
    stalls = Stalls(OBJECTS, lambda number: number == TENSORS - 1)
    settings = {"hedge_factor": 1.0, "hedge_after_s": 2.0, "lease_deadline_s": NEVER_S, "stuck_after_s": NEVER_S}
    with closing(stalls.store()) as store, local_node(shm_dir, slots=40, **settings) as node:
        ranks, report = run(node, plan, store)
        assert stalls.hanging == 1
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert report.hedges_won >= 1
        stalls.go.set()


def test_a_file_system_that_never_answers_is_a_typed_error(shm_dir: Path, plan: LoadPlan) -> None:
    stalls = Stalls(OBJECTS, lambda number: number > 3)
    settings = {"lease_deadline_s": 0.3, "chunk_attempts": 2, "fetch_attempts": 1, "stuck_after_s": NEVER_S}
    with closing(stalls.store()) as store, local_node(shm_dir, slots=40, **settings) as node:
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        assert error.details["shard"] == KEY
        assert stalls.hanging
        check_at_rest(node)
        stalls.go.set()


def test_bytes_that_arrive_after_the_end_are_not_written() -> None:
    stalls = Stalls(OBJECTS, lambda number: True)
    buffer = bytearray(10)
    with closing(stalls.store()) as store:
        limits = ReadLimits()
        with closing(limits), limits.begin(time.monotonic() + 0.1) as limit, pytest.raises(ReadEnded):
            read_pieces(store, KEY, ByteRange(0, 10), [memoryview(buffer)], limit=limit)
        stalls.go.set()
        assert buffer == bytes(10)
        ended = ReadLimit()
        ended.end()
        with pytest.raises(ReadEnded):
            read_pieces(store, KEY, ByteRange(0, 10), [memoryview(buffer)], limit=ended)
        stalls.objects.clear()
        with pytest.raises(StoreError) as caught:  # what the file system raises in its own thread
            read_pieces(store, "other", ByteRange(0, 10), [memoryview(buffer)], limit=ReadLimit())
        assert not isinstance(caught.value, ReadEnded)
