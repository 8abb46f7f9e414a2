"""Real S3 behind a proxy that breaks answers, ranks in threads: exact bytes or one typed error, nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.errors import ChunkFailed
from cluster.layout import Layout
from cluster.layout_rules import rules_for
from cluster.load_plan import LoadPlan
from cluster.planning import build_load_plan
from cluster.report import NodeReport
from storage.checkpoint import open_model
from storage.embedded_s3 import EmbeddedS3
from storage.errors import IntegrityError, LongshoreError
from storage.object_store import ObjectStore
from storage.open_store import open_store
from tests.support.checkpoints import flat_objects
from tests.support.exact_ranks import check_exact
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import (
    TRANSIENT,
    Asked,
    Before,
    Cut,
    Delay,
    Drop,
    Flip,
    Instead,
    Refuse,
    Rewrite,
    Script,
    Shorten,
    Stall,
    Trickle,
    merged,
    only,
    random_faults,
    zeros_from,
)
from tests.support.local_node import Belongings, LocalNode, Rank, local_node, run_all, start_all, with_digests
from tests.support.s3_servers import server_ref

pytestmark = pytest.mark.slow

KEY = "model.safetensors"
CHUNK_BYTES = 64 << 10
TENSORS = 16
READ_TIMEOUT_S = 0.3
FSDP = 2
OBJECTS = flat_objects(tensors=TENSORS, rows=4096, seed=3)  # a tensor is a chunk
# One worker's tries and the node's, few enough that a hopeless case ends within a second or two.
IMPATIENT = {"fetch_attempts": 2, "chunk_attempts": 2}


def stored(asked: Asked) -> bytes:
    """The right bytes."""
    return OBJECTS[KEY][asked.start : asked.end]


def of_another_range(asked: Asked) -> bytes:
    """As many bytes from elsewhere in the object."""
    start = asked.start + CHUNK_BYTES
    if start + asked.size_bytes > len(OBJECTS[KEY]):
        start = asked.start - CHUNK_BYTES
    return OBJECTS[KEY][start : start + asked.size_bytes]


class Bucket:
    """A bucket of one checkpoint, without a manifest in it: its chunks would be too large for these tests."""

    def __init__(self, server: EmbeddedS3, name: str) -> None:
        self.server, self.name = server, name
        self.path = server.make_bucket(name) / KEY
        self.path.write_bytes(OBJECTS[KEY])
        server.refresh()

    @contextmanager
    def store(self, endpoint_url: str, read_timeout_s: float = READ_TIMEOUT_S) -> Iterator[ObjectStore]:
        ref = replace(server_ref(self.server, self.name), endpoint_url=endpoint_url)
        store = open_store(ref, self.server.credentials(), read_timeout_s=read_timeout_s)
        try:
            yield store
        finally:
            store.close()

    def plan(self, objects: Mapping[str, bytes] = OBJECTS) -> LoadPlan:
        """Ranks that share all tensors by rows, so that every chunk is needed by both."""
        with self.store(self.server.endpoint_url) as store:
            index = with_digests(open_model(store, chunk_bytes=CHUNK_BYTES), objects)
        return build_load_plan(index, Layout(1, FSDP, 1), rules_for(None, None), None)

    def become(self, data: bytes | None) -> None:
        """Replace or (None) remove the object; returns when the server has noticed."""
        with self.store(self.server.endpoint_url) as store:
            old = store.stat(KEY).etag
            if data is None:
                self.path.unlink()
            else:
                fresh = self.path.with_suffix(".new")
                fresh.write_bytes(data)
                os.replace(fresh, self.path)
            while True:
                self.server.refresh()
                try:
                    if store.stat(KEY).etag != old:
                        return
                except LongshoreError:
                    if data is None:
                        return


@pytest.fixture(scope="module")
def bucket(rclone: EmbeddedS3) -> Bucket:
    return Bucket(rclone, "store-faults")


@pytest.fixture
def own_bucket(rclone: EmbeddedS3, request: pytest.FixtureRequest) -> Bucket:
    """For a test that changes what is in it."""
    return Bucket(rclone, f"own-{abs(hash(request.node.name)) % 10**10}")


@pytest.fixture(autouse=True)
def nothing_left_behind(rclone: EmbeddedS3) -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


def run(node: LocalNode, plan: LoadPlan, store: ObjectStore) -> tuple[list[Rank], NodeReport]:
    load_id = node.begin(plan)
    ranks = node.ranks(plan, store, load_id)
    run_all(ranks)
    return ranks, node.agent.report(load_id)


def check_at_rest(node: LocalNode) -> None:
    """No slot is leased, fenced or held."""
    stats = node.agent._ledger._cache.stats()
    assert (stats.leased_slots, stats.quarantined_slots) == (0, 0)


def refused_with(ranks: list[Rank]) -> LongshoreError:
    """The one error that all ranks of a failed load have."""
    for rank in ranks:
        assert isinstance(rank.outcome, LongshoreError), rank.outcome
        assert rank.device._segments == []
    outcome = ranks[0].outcome
    assert isinstance(outcome, LongshoreError)
    assert {type(rank.outcome) for rank in ranks} == {type(outcome)}
    return outcome


# --- faults that pass -------------------------------------------------------------------------------------------

PASSING: dict[str, tuple[Script, str]] = {
    "500": (only(Refuse(500, "InternalError")), "unavailable"),
    "503 SlowDown": (only(Refuse(503, "SlowDown")), "throttled"),
    "503 without a body": (only(Refuse(503)), "throttled"),
    "429": (only(Refuse(429)), "throttled"),
    "no answer": (only(Drop()), "unavailable"),
    "reset before the answer": (only(Drop(reset=True)), "unavailable"),
    "late": (only(Delay(0.1)), ""),
    "too late": (only(Delay(10 * READ_TIMEOUT_S)), "unavailable"),
    "cut at the first byte": (only(Cut(0)), "short_read"),
    "cut in the middle": (only(Cut(CHUNK_BYTES // 2)), "short_read"),
    "cut at the last byte": (only(Cut(CHUNK_BYTES - 1)), "short_read"),
    "reset in the middle": (only(Cut(CHUNK_BYTES // 2, reset=True)), "unavailable"),
    "stalled at once": (only(Stall(0)), "unavailable"),
    "stalled in the middle": (only(Stall(1000)), "unavailable"),
    "a pause": (only(Stall(1000, 0.05)), ""),
    "a trickle": (only(Trickle(2000.0)), "unavailable"),
    "slow, not stuck": (only(Trickle(1e6)), ""),
    "a flipped bit": (only(Flip(77_777)), "digest_mismatch"),
    "the last bit flipped": (only(Flip(8 * CHUNK_BYTES - 1)), "digest_mismatch"),
    "another range": (only(Instead(of_another_range)), "digest_mismatch"),
    "zeros at the end": (only(zeros_from(0.9, stored)), "digest_mismatch"),
    "fewer bytes, and says so": (only(Shorten(1000)), "range_mismatch"),
    "says another range": (only(Rewrite("Content-Range", "bytes 0-65535/*")), "range_mismatch"),
    "says rubbish": (only(Rewrite("Content-Range", "lots")), "range_mismatch"),
    "claims an encoding": (only(Rewrite("Content-Encoding", "gzip")), "range_mismatch"),
}


@pytest.mark.parametrize("placement", ["via_arena", "direct"])
@pytest.mark.parametrize("case", PASSING)
def test_a_fault_that_passes_costs_at_most_what_was_in_flight(
    shm_dir: Path, bucket: Bucket, case: str, placement: str
) -> None:
    script, cause = PASSING[case]
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, script) as proxy,
        bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=32, placement=placement) as node,
    ):
        ranks, report = run(node, plan, store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert len(proxy.struck) == 1
        assert report.retries == ({cause: 1} if cause else {})
        assert report.corrupt_chunks == (cause == "digest_mismatch")
        assert report.store_chunks == report.needed_chunks == TENSORS
        assert proxy.weights_bytes() <= report.needed_bytes + CHUNK_BYTES


@pytest.mark.parametrize("seed", range(6))
def test_many_faults_at_once(shm_dir: Path, bucket: Bucket, seed: int) -> None:
    """Every third read meets one, of any kind; several at a time."""
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, random_faults(seed, tuple(TRANSIENT), share=0.35)) as proxy,
        bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=32) as node,
    ):
        ranks, report = run(node, plan, store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert proxy.struck
        assert sum(report.retries.values()) <= len(proxy.struck)
        assert proxy.weights_bytes() <= report.needed_bytes + CHUNK_BYTES * len(proxy.struck)


def test_two_loads_in_the_smallest_arena_under_faults(shm_dir: Path, bucket: Bucket) -> None:
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, random_faults(1, ("cut", "reset", "503", "flip"), share=0.3)) as proxy,
        bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=2 * (2 * FSDP + 1)) as node,
    ):
        loads = [node.ranks(plan, store, node.begin(plan)) for _ in range(2)]
        for thread in [thread for ranks in loads for thread in start_all(ranks)]:
            thread.join()
        for ranks in loads:
            check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)


# --- faults that stay -------------------------------------------------------------------------------------------


def of_chunk(asked: Asked) -> bool:
    """The reads of one chunk in the middle of the object."""
    return asked.start <= len(OBJECTS[KEY]) // 2 < asked.end


STAYING: dict[str, tuple[Script, str]] = {
    "500": (only(Refuse(500, "InternalError"), where=of_chunk), "StoreUnavailable"),
    "503": (only(Refuse(503, "SlowDown"), where=of_chunk), "Throttled"),
    "404": (only(Refuse(404, "NoSuchKey"), where=of_chunk), "ObjectNotFound"),
    "expired token": (only(Refuse(403, "ExpiredToken"), where=of_chunk), "AccessDenied"),
    "expired signature": (only(Refuse(403, "RequestTimeTooSkewed"), where=of_chunk), "AccessDenied"),
    "no answer": (only(Drop(), where=of_chunk), "StoreUnavailable"),
    "cut at the first byte": (only(Cut(0), where=of_chunk), "ShortRead"),
    "stalled": (only(Stall(0), where=of_chunk), "StoreUnavailable"),
    "another version": (only(Rewrite("ETag", '"f00"'), where=of_chunk), "ObjectChanged"),
    "another range": (only(Rewrite("Content-Range", "bytes 0-65535/*"), where=of_chunk), "RangeMismatch"),
}


@pytest.mark.parametrize("case", STAYING)
def test_a_fault_that_stays_ends_in_one_typed_error(shm_dir: Path, bucket: Bucket, case: str) -> None:
    """And what was verified before it is not fetched again by the load that comes after."""
    script, kind = STAYING[case]
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, script) as proxy,
        bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=32, **IMPATIENT) as node,
    ):
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        assert error.details["cause"].split(" (")[0] == kind
        assert error.details["shard"] == KEY
        check_at_rest(node)
        script, proxy.script = proxy.script, lambda asked: ()
        first_bytes = proxy.weights_bytes()
        ranks, report = run(node, plan, store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        assert report.cached_chunks + report.store_chunks == report.needed_chunks == TENSORS
        assert proxy.weights_bytes() - first_bytes == report.store_bytes


def test_bytes_that_stay_wrong_are_never_placed(shm_dir: Path, bucket: Bucket) -> None:
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, only(Flip(9), where=of_chunk)) as proxy,
        bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=32, **IMPATIENT) as node,
    ):
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, IntegrityError)
        (chunk,) = {chunk for asked, _ in proxy.struck for chunk in [_chunk_at(plan, asked.end)]}
        assert error.details["chunk"] == chunk
        assert error.details["expected"] == f"blake3:{plan.chunks.digest(chunk).hex()}"
        assert error.details["found"] != error.details["expected"]
        check_at_rest(node)


def _chunk_at(plan: LoadPlan, end: int) -> int:
    return next(chunk for chunk in range(len(plan.chunks)) if plan.chunks.byte_range(chunk).end == end)


def test_a_store_that_is_not_there(shm_dir: Path, bucket: Bucket) -> None:
    plan = bucket.plan()
    with FaultProxy(bucket.server.endpoint_url) as proxy:
        nobody_there = proxy.endpoint_url
    with bucket.store(nobody_there) as store, local_node(shm_dir, slots=32, **IMPATIENT) as node:
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        assert error.details["cause"] == "StoreUnavailable"
        check_at_rest(node)


# --- the object changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_requests", [1, TENSORS // 2, TENSORS])
@pytest.mark.parametrize("size", ["same", "shorter", "longer"])
def test_an_object_replaced_in_mid_load_is_never_mixed_with_the_old_one(
    shm_dir: Path, own_bucket: Bucket, after_requests: int, size: str
) -> None:
    tensors = {"same": TENSORS, "shorter": TENSORS - 4, "longer": TENSORS + 1}[size]
    newer = flat_objects(tensors=tensors, rows=4096, seed=4)
    put = Before(lambda: own_bucket.become(newer[KEY]))
    plan = own_bucket.plan()
    with (
        FaultProxy(own_bucket.server.endpoint_url, only(put, where=_nth(after_requests))) as proxy,
        own_bucket.store(proxy.endpoint_url, 5.0) as store,
        local_node(shm_dir, slots=32) as node,
    ):
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        assert error.details["cause"] == "ObjectChanged"
        check_at_rest(node)
        # A load of what is there now loads it whole.
        ranks, _ = run(node, own_bucket.plan(newer), store)
        check_exact(ranks, newer, fsdp=FSDP)


def test_an_object_deleted_in_mid_load(shm_dir: Path, own_bucket: Bucket) -> None:
    plan = own_bucket.plan()
    delete = Before(lambda: own_bucket.become(None))
    with (
        FaultProxy(own_bucket.server.endpoint_url, only(delete, where=_nth(TENSORS // 2))) as proxy,
        own_bucket.store(proxy.endpoint_url, 5.0) as store,
        local_node(shm_dir, slots=32) as node,
    ):
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        assert error.details["cause"] == "ObjectNotFound"
        check_at_rest(node)


def _nth(number: int) -> Callable[[Asked], bool]:
    return lambda asked: asked.number == number


# --- the proxy ------------------------------------------------------------------------------------------------


def test_random_faults_are_the_same_for_the_same_seed() -> None:
    kinds = tuple(TRANSIENT)
    asked = [Asked("/b/model.safetensors", start, start + 1000, 1, 1) for start in range(1000, 400_000, 1000)]
    first, again, other = (random_faults(seed, kinds, share=0.5) for seed in (7, 7, 8))
    assert [repr(first(one))[:30] for one in asked] == [repr(again(one))[:30] for one in asked]
    assert [repr(first(one))[:30] for one in asked] != [repr(other(one))[:30] for one in asked]
    assert len(merged(first, other)(asked[0])) <= 2
