"""Stores that fail for a while: ranks in threads behind a proxy that breaks answers end with exact bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.telemetry.report import NodeReport
from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.fault_proxy import (
    TRANSIENT,
    Asked,
    Cut,
    Delay,
    Drop,
    FaultProxy,
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
)
from tests.support.faulty_bucket import (
    CHUNK_BYTES,
    FSDP,
    KEY,
    OBJECTS,
    SHORT_TIMEOUT_S,
    TENSORS,
    Bucket,
    check_at_rest,
    run,
)
from tests.support.local_node import Belongings, local_node, start_all
from tests.support.reference_slices import check_exact

pytestmark = pytest.mark.slow


def zeros_from(part: float, data: Callable[[Asked], bytes]) -> Instead:
    """The right bytes up to a part of the answer and zeros behind it: what a half-written object looks like."""

    def body(asked: Asked) -> bytes:
        kept = int(asked.size_bytes * part)
        return data(asked)[:kept] + bytes(asked.size_bytes - kept)

    return Instead(body)


def stored(asked: Asked) -> bytes:
    """The right bytes."""
    return OBJECTS[KEY][asked.start : asked.end]


def of_another_range(asked: Asked) -> bytes:
    """Return as many bytes from elsewhere in the object."""
    start = asked.start + CHUNK_BYTES
    if start + asked.size_bytes > len(OBJECTS[KEY]):
        start = asked.start - CHUNK_BYTES
    return OBJECTS[KEY][start : start + asked.size_bytes]


@pytest.fixture(scope="module")
def bucket(rclone: EmbeddedS3) -> Bucket:
    return Bucket(rclone, "store-faults")


@pytest.fixture(autouse=True)
def nothing_left_behind(rclone: EmbeddedS3) -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


# --- faults that pass -------------------------------------------------------------------------------------------

PASSING: dict[str, tuple[Script, str]] = {
    "500": (only(Refuse(500, "InternalError")), "server_error"),
    "503 SlowDown": (only(Refuse(503, "SlowDown")), "throttled"),
    "503 without a body": (only(Refuse(503)), "throttled"),
    "429": (only(Refuse(429)), "throttled"),
    "408 without a code": (only(Refuse(408)), "server_error"),
    "425 without a code": (only(Refuse(425)), "server_error"),
    "KMS throttles with 400": (only(Refuse(400, "KMS.ThrottlingException")), "throttled"),
    "no answer": (only(Drop()), "reset"),
    "reset before the answer": (only(Drop(reset=True)), "reset"),
    "late": (only(Delay(0.1)), ""),
    "too late": (only(Delay(10 * SHORT_TIMEOUT_S)), "stalled"),
    "cut at the first byte": (only(Cut(0)), "short_read"),
    "cut in the middle": (only(Cut(CHUNK_BYTES // 2)), "short_read"),
    "cut at the last byte": (only(Cut(CHUNK_BYTES - 1)), "short_read"),
    "reset in the middle": (only(Cut(CHUNK_BYTES // 2, reset=True)), "reset"),
    "stalled at once": (only(Stall(0)), "stalled"),
    "stalled in the middle": (only(Stall(1000)), "stalled"),
    "a pause": (only(Stall(1000, 0.05)), ""),
    "a trickle": (only(Trickle(2000.0)), "stalled"),
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


def again_bytes(report: NodeReport) -> int:
    """Return the bytes that may leave the store twice: a chunk for each failed try and for each hedge."""
    return CHUNK_BYTES * (sum(report.retries.values()) + report.hedges)


IMPATIENTLY = ("too late", "stalled at once", "stalled in the middle", "a trickle")


@pytest.mark.parametrize("placement", ["via_arena", "direct"])
@pytest.mark.parametrize("case", PASSING)
def test_a_passing_fault_costs_at_most_the_bytes_in_flight(
    shm_dir: Path, bucket: Bucket, case: str, placement: str
) -> None:
    script, cause = PASSING[case]
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, script) as proxy,
        bucket.store(
            proxy.endpoint_url, **({"read_timeout_s": SHORT_TIMEOUT_S} if case in IMPATIENTLY else {})
        ) as store,
        local_node(shm_dir, slots=32, placement=placement) as node,
    ):
        ranks, report = run(node, plan, store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert len(proxy.struck) == 1
        if case in IMPATIENTLY:
            assert report.retries[cause] >= 1
        else:
            assert report.retries == ({cause: 1} if cause else {})
        assert report.corrupt_chunks == (cause == "digest_mismatch")
        assert report.store_chunks == report.needed_chunks == TENSORS
        assert proxy.weights_bytes() <= report.needed_bytes + again_bytes(report)


@pytest.mark.parametrize("seed", range(6))
def test_a_load_survives_many_faults_at_once(shm_dir: Path, bucket: Bucket, seed: int) -> None:
    """Every third read meets one, of any kind; several at a time."""
    plan = bucket.plan()
    with (
        FaultProxy(bucket.server.endpoint_url, random_faults(seed, tuple(TRANSIENT), share=0.35)) as proxy,
        bucket.store(proxy.endpoint_url, SHORT_TIMEOUT_S) as store,
        local_node(shm_dir, slots=32) as node,
    ):
        ranks, report = run(node, plan, store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert proxy.struck
        assert proxy.weights_bytes() <= report.needed_bytes + again_bytes(report)


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


# --- the proxy ------------------------------------------------------------------------------------------------


def test_random_faults_are_the_same_for_the_same_seed() -> None:
    kinds = tuple(TRANSIENT)
    asked = [Asked("/b/model.safetensors", start, start + 1000, 1, 1) for start in range(1000, 400_000, 1000)]
    first, again, other = (random_faults(seed, kinds, share=0.5) for seed in (7, 7, 8))
    assert [repr(first(one))[:30] for one in asked] == [repr(again(one))[:30] for one in asked]
    assert [repr(first(one))[:30] for one in asked] != [repr(other(one))[:30] for one in asked]
    assert len(merged(first, other)(asked[0])) <= 2
