"""A store that throttles, and a slow one: real S3 behind a proxy, ranks in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.devices.cpu_device import CpuDevice
from actors.rank.executor import RankLoader
from cluster.layouts.mesh import Layout
from cluster.layouts.rules import rules_for
from cluster.planning.make_plan import build_load_plan
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import ReadItems
from cluster.scheduling.concurrency import LEVELS
from cluster.telemetry import report
from cluster.telemetry.report import RankReport, find_limit
from storage.checkpoints.checkpoint import open_model
from storage.store_ref import parse_uri
from storage.stores.embedded_s3 import EmbeddedS3
from storage.stores.object_store import MemoryStore, ObjectStore
from storage.stores.open_store import open_store
from tests.support.checkpoints import safetensors_bytes
from tests.support.counting_proxy import CountingProxy, Request, s3_refusal
from tests.support.local_node import Rank, local_node, plan_of, run_all
from tests.support.reference_slices import torch_share

pytestmark = pytest.mark.slow


class LimitedProxy(CountingProxy):
    """Answers 503 SlowDown to ranges of weights above `admits` at a time; passes `bytes_per_s` (0: all there are)."""

    def __init__(self, upstream_url: str, *, admits: int = 1 << 30, bytes_per_s: float = 0) -> None:
        self._admits = admits
        self._bytes_per_s = bytes_per_s
        self._gate = threading.Lock()
        self._under_way = 0
        self._free_s = 0.0  # when the link has passed on what was given to it
        self.peak = 0  # requests of weights at a time, the refused ones not counted
        super().__init__(upstream_url)

    def refusal(self, request: Request) -> bytes | None:
        if not request.is_weights:
            return None
        with self._gate:
            if self._under_way >= self._admits:
                return s3_refusal(503, "SlowDown", "Please reduce your request rate.")
            self._under_way += 1
            self.peak = max(self.peak, self._under_way)
        return None

    def after_request(self, request: Request) -> None:
        if request.is_weights:
            with self._gate:
                self._under_way -= 1

    def passing(self, request: Request, size_bytes: int) -> None:
        if not self._bytes_per_s:
            return
        with self._gate:
            self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self._bytes_per_s
            wait_s = self._free_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


KEY = "model.safetensors"
CHUNK_BYTES = 64 << 10


def weights(tensors: int, rows: int = 4096) -> bytes:
    """Each tensor is 16 bytes a row."""
    return safetensors_bytes([(f"layers.{number}.weight", "F32", (rows, 4)) for number in range(tensors)], 1)


@pytest.fixture(scope="module")
def bucket(rclone: EmbeddedS3) -> str:
    folder = rclone.folder / "throttling"
    folder.mkdir()
    (folder / KEY).write_bytes(weights(500))
    rclone.refresh()
    return "throttling"


@pytest.fixture(autouse=True)
def processors_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore busy processors: these tests look for other limits."""
    monkeypatch.setattr(report, "FULL", 2.0)


@contextmanager
def store_behind(proxy: LimitedProxy, server: EmbeddedS3, bucket: str) -> Iterator[ObjectStore]:
    ref = parse_uri(f"s3://{bucket}", endpoint_url=proxy.endpoint_url, region=server.region, environ={})
    store = open_store(ref, server.credentials(), read_timeout_s=30.0)
    try:
        yield store
    finally:
        store.close()


def plan_for(store: ObjectStore, ranks: int) -> LoadPlan:
    return build_load_plan(open_model(store, chunk_bytes=CHUNK_BYTES), Layout(1, ranks, 1), rules_for(None, None), None)


def reports(ranks: list[Rank]) -> list[RankReport]:
    found = []
    for rank in ranks:
        assert isinstance(rank.outcome, RankReport), rank.outcome
        found.append(rank.outcome)
    return found


@pytest.mark.parametrize("admits", [1, 4, 9])
def test_a_store_that_throttles_above_n_gets_about_n_requests(
    shm_dir: Path, rclone: EmbeddedS3, bucket: str, admits: int
):
    with LimitedProxy(rclone.endpoint_url, admits=admits) as proxy, store_behind(proxy, rclone, bucket) as store:
        plan = plan_for(store, ranks=2)
        with local_node(shm_dir, slots=80) as node:
            load_id = node.begin(plan)
            ranks = node.ranks(plan, store, load_id)
            run_all(ranks)
            found = reports(ranks)
            report = node.agent.report(load_id)
    data = (rclone.folder / bucket / KEY).read_bytes()
    for number, rank in enumerate(ranks):
        for name, (shape, held) in rank.tensor_bytes().items():
            begin = 16 * 4096 * int(name.split(".")[1]) + len(data) - 500 * 16 * 4096
            assert (shape, held) == torch_share((4096, 4), data[begin : begin + 16 * 4096], 2, number)
    refused = [request for request in proxy.requests() if request.status == 503]
    assert len(refused) == report.retries.get("throttled", 0) == sum(rank.throttles for rank in found)
    if admits <= 4:  # more at a time a busy machine may never have under way
        # Each of two ranks has one request at least, and one level more while that is tried: the load may end then.
        tried = min(level for level in LEVELS if level > max(1, admits // 2))
        assert all(rank.requests <= tried for rank in found)
        assert refused
    if admits > 1:
        assert len(refused) <= 0.2 * len(plan.chunks)


def limit_of(found: list[RankReport]) -> str:
    load_s = max(rank.load_s for rank in found)
    return find_limit(found, plan_s=0.0, start_s=0.0, load_s=load_s, total_s=load_s, resident=False).stage


def test_behind_a_slow_link_the_store_is_the_limit(shm_dir: Path, rclone: EmbeddedS3, bucket: str):
    with (
        LimitedProxy(rclone.endpoint_url, bytes_per_s=8e6) as proxy,
        store_behind(proxy, rclone, bucket) as store,
        local_node(shm_dir, slots=80) as node,
    ):
        plan = plan_for(store, ranks=2)
        ranks = node.ranks(plan, store, node.begin(plan))
        run_all(ranks)
    found = reports(ranks)
    assert limit_of(found) == "store"
    for rank in found:
        spent = rank.stages
        assert spent.working_s + spent.wait_slot_s + spent.wait_lease_s + spent.wait_retry_s <= rank.load_s * 1.01
        assert spent.wait_chunk_s + spent.place_s - spent.place_fetching_s <= rank.load_s * 1.01
        assert rank.cpu_s > 0
        assert 1 <= rank.requests <= rank.peak_requests <= node.config.fetch_threads


class SlowDevice(CpuDevice):
    """A device that is slow for every chunk. The fetching thread places chunks at once, or another thread does."""

    def __init__(self, receives: bool) -> None:
        super().__init__()
        self.receives = receives

    def place(self, chunk: memoryview, items: ReadItems, rows: slice) -> None:
        super().place(chunk, items, rows)
        time.sleep(0.03)


@pytest.mark.parametrize("at_once", [False, True])
def test_with_a_small_arena_a_slow_device_is_the_limit(shm_dir: Path, at_once: bool):
    objects = {KEY: weights(40, rows=1024)}
    plan = plan_of(objects, (1, 1, 1), 16384)
    with local_node(shm_dir, slots=4) as node:
        device = SlowDevice(at_once)
        loader = RankLoader(node.agent, node.job(plan, node.begin(plan), 0), device, store=MemoryStore(objects))
        rank = Rank(loader, device)
        rank.run()
    (report,) = reports([rank])
    assert limit_of([report]) == "place"
    if not at_once:  # back-pressure: placing keeps the slots
        assert report.stages.wait_slot_s > 0.3 * report.load_s
        assert report.stages.place_fetching_s == 0
