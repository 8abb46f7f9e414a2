"""Stores that fail for good, and objects that change in mid-load: one typed error, no mixed versions, nothing left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.errors import ChunkFailed
from cluster.planning.plan import LoadPlan
from storage.errors import IntegrityError
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.checkpoints import flat_objects
from tests.support.fault_proxy import (
    Asked,
    Before,
    Cut,
    Drop,
    Fault,
    FaultProxy,
    Flip,
    Refuse,
    Rewrite,
    Script,
    Stall,
    only,
)
from tests.support.faulty_bucket import (
    FSDP,
    IMPATIENT,
    KEY,
    OBJECTS,
    READ_TIMEOUT_S,
    SHORT_TIMEOUT_S,
    TENSORS,
    Bucket,
    check_at_rest,
    refused_with,
    run,
)
from tests.support.local_node import Belongings, local_node
from tests.support.reference_slices import check_exact

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bucket(rclone: EmbeddedS3) -> Bucket:
    return Bucket(rclone, "store-refusals")


@pytest.fixture
def own_bucket(rclone: EmbeddedS3, request: pytest.FixtureRequest) -> Bucket:
    """Make a bucket for a test that changes its objects."""
    return Bucket(rclone, f"own-{abs(hash(request.node.name)) % 10**10}")


@pytest.fixture(autouse=True)
def nothing_left_behind(rclone: EmbeddedS3) -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


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
    """The next load does not fetch verified chunks again."""
    script, kind = STAYING[case]
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, script) as proxy,
        bucket.store(proxy.endpoint_url, SHORT_TIMEOUT_S if case == "stalled" else READ_TIMEOUT_S) as store,
        local_node(shm_dir, slots=32, **IMPATIENT) as node,
    ):
        ranks, first = run(node, plan, store)
        error = refused_with(ranks)
        assert isinstance(error, ChunkFailed)
        assert error.details["cause"].split(" (")[0] == kind
        assert error.details["shard"] == KEY
        check_at_rest(node)
        proxy.script = lambda asked: ()
        ranks, report = run(node, plan, store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        assert report.cached_chunks >= first.store_chunks
        assert report.cached_chunks + report.store_chunks == report.needed_chunks == TENSORS


def test_permanently_wrong_bytes_are_never_placed(shm_dir: Path, bucket: Bucket) -> None:
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


def test_an_unreachable_store_is_a_typed_error(shm_dir: Path, bucket: Bucket) -> None:
    plan = bucket.plan()
    with FaultProxy(bucket.server.endpoint_url) as proxy:
        nobody_there = proxy.endpoint_url
    with bucket.store(nobody_there) as store, local_node(shm_dir, slots=32, **IMPATIENT) as node:
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        assert error.details["cause"] == "StoreUnavailable (ConnectionRefusedError)"
        check_at_rest(node)


# --- the object changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_requests", [1, TENSORS // 2, TENSORS])
@pytest.mark.parametrize("size", ["same", "shorter", "longer"])
def test_an_object_replaced_in_mid_load_is_never_mixed(
    shm_dir: Path, own_bucket: Bucket, after_requests: int, size: str
) -> None:
    tensors = {"same": TENSORS, "shorter": TENSORS - 4, "longer": TENSORS + 1}[size]
    newer = flat_objects(tensors=tensors, rows=4096, seed=4)
    is_due = _nth(after_requests)

    def script(asked: Asked) -> tuple[Fault, ...]:
        if is_due(asked):
            own_bucket.become(newer[KEY])  # nobody else is let through before the server has noticed
        return ()

    plan = own_bucket.plan()
    with (
        FaultProxy(own_bucket.server.endpoint_url, script) as proxy,
        own_bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=32) as node,
    ):
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        assert error.details["cause"] == "ObjectChanged"
        check_at_rest(node)
        # A load of what is there now loads it whole.
        ranks, _ = run(node, own_bucket.plan(newer), store)
        check_exact(ranks, newer, fsdp=FSDP)


def test_an_object_deleted_in_mid_load_is_a_typed_error(shm_dir: Path, own_bucket: Bucket) -> None:
    delete = Before(lambda: own_bucket.become(None))
    plan = own_bucket.plan()
    with (
        FaultProxy(own_bucket.server.endpoint_url, only(delete, where=_nth(TENSORS // 2))) as proxy,
        own_bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=32) as node,
    ):
        error = refused_with(run(node, plan, store)[0])
        assert isinstance(error, ChunkFailed)
        # (rclone answers 500 for a file that is gone and that it has not noticed yet)
        assert error.details["cause"].split(" (")[0] in ("ObjectNotFound", "StoreUnavailable")
        check_at_rest(node)


def _nth(number: int) -> Callable[[Asked], bool]:
    return lambda asked: asked.number == number
