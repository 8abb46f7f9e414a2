"""A connection that hangs or trickles in mid-load, through the whole path: S3 server, proxy, socket, slot, ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from storage.stores.embedded_s3 import EmbeddedS3
from tests.support.fault_proxy import Asked, Cut, Fault, FaultProxy, Stall, Trickle, only
from tests.support.faulty_bucket import CHUNK_BYTES, FSDP, OBJECTS, TENSORS, Bucket, check_at_rest, run
from tests.support.local_node import Belongings, local_node
from tests.support.reference_slices import check_exact

pytestmark = pytest.mark.slow

NEVER_S = 10_000.0
HALF = CHUNK_BYTES // 2
DEADLINE_S = 3.0
LATE_S = 20.0  # of a machine that is busy with something else; the timeouts are never


@pytest.fixture(scope="module")
def bucket(rclone: EmbeddedS3) -> Bucket:
    return Bucket(rclone, "stuck-connections")


@pytest.fixture(autouse=True)
def nothing_left_behind(rclone: EmbeddedS3) -> Iterator[None]:
    before = Belongings()
    yield
    before.check()


def late(asked: Asked) -> bool:
    """One of the last chunks, requested when earlier ones have shown how long a fetch takes."""
    return asked.number == TENSORS - 1


@pytest.mark.parametrize("fault", [Stall(0), Stall(HALF), Trickle(50.0)], ids=["silent", "stalled", "trickling"])
def test_a_hedge_replaces_a_stuck_fetch_before_its_timeout(shm_dir: Path, bucket: Bucket, fault: Fault) -> None:
    settings = {"hedge_factor": 1.0, "hedge_after_s": 2.0, "lease_deadline_s": NEVER_S, "stuck_after_s": NEVER_S}
    with (
        FaultProxy(bucket.server.endpoint_url, only(fault, where=late)) as proxy,
        bucket.store(proxy.endpoint_url, NEVER_S) as store,
        local_node(shm_dir, slots=40, **settings) as node,
    ):
        ranks, report = run(node, bucket.plan(), store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert len(proxy.struck) == 1
        assert report.hedges >= 1
        assert report.hedges_won >= 1
        assert report.retries == {}
        assert report.store_bytes == report.needed_bytes
        assert proxy.weights_bytes() <= report.needed_bytes + CHUNK_BYTES * report.hedges


@pytest.mark.parametrize(
    ("placement", "fault"), [("via_arena", Trickle(50.0)), ("via_arena", Stall(HALF)), ("direct", Trickle(50.0))]
)
def test_without_a_hedge_a_stuck_fetch_ends_at_its_deadline(
    shm_dir: Path, bucket: Bucket, placement: str, fault: Fault
) -> None:
    """The read timeout does not apply, since some bytes keep coming."""
    settings = {"lease_deadline_s": DEADLINE_S, "stuck_after_s": NEVER_S}
    asked_s: dict[int, list[float]] = defaultdict(list)  # by the end of the range
    strike = only(fault)

    def script(asked: Asked) -> Sequence[Fault]:
        asked_s[asked.end].append(time.monotonic())
        return strike(asked)

    with (
        FaultProxy(bucket.server.endpoint_url, script) as proxy,
        bucket.store(proxy.endpoint_url, NEVER_S) as store,
        local_node(shm_dir, slots=40, placement=placement, **settings) as node,
    ):
        ranks, report = run(node, bucket.plan(), store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert report.retries["lease_expired"] >= 1
        ((stuck, _),) = proxy.struck
        first_s, second_s, *more = asked_s[stuck.end]
        assert second_s - first_s < DEADLINE_S + LATE_S
        assert not more or report.retries["lease_expired"] > 1  # (a machine that stood still for a whole deadline)


@pytest.mark.parametrize("placement", ["via_arena", "direct"])
def test_reads_resume_where_the_connection_broke(shm_dir: Path, bucket: Bucket, placement: str) -> None:
    """More often than a chunk has tries: each brought something."""
    pieces = 4

    def script(asked: Asked) -> tuple[Fault, ...]:
        return (Cut(CHUNK_BYTES // pieces),) if asked.size_bytes > CHUNK_BYTES // pieces else ()

    with (
        FaultProxy(bucket.server.endpoint_url, script) as proxy,
        bucket.store(proxy.endpoint_url) as store,
        local_node(shm_dir, slots=40, placement=placement, fetch_attempts=2, chunk_attempts=1) as node,
    ):
        ranks, report = run(node, bucket.plan(), store)
        check_exact(ranks, OBJECTS, fsdp=FSDP)
        check_at_rest(node)
        assert report.retries == {"short_read": TENSORS * (pieces - 1)}
        assert proxy.weights_bytes() == report.needed_bytes  # no byte twice
