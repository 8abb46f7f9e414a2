"""One connection is far slower than its peers, over real Ray. A second request brings its chunk; the first ends."""

from __future__ import annotations

import pytest

import cluster
from tests.support.fault_proxy import Asked, Fault, FaultProxy, Stall, Trickle
from tests.support.ray_clusters import Longshore, eventually
from tests.support.reference_slices import shard_differs
from tests.support.stored_models import CHUNK_BYTES, KV_HEADS, StoredModel

pytestmark = pytest.mark.slow

NEVER_S = 10_000.0
LATE = 12  # this request for weights hangs; earlier ones gave the usual duration
RANKS = 2


@pytest.mark.parametrize(
    "fault",
    [Stall(CHUNK_BYTES // 2), pytest.param(Trickle(50.0), marks=pytest.mark.long)],
    ids=["stalled", "trickling"],
)
def test_the_slot_of_a_hedged_request_that_lost_is_freed(
    longshore: Longshore, llama: StoredModel, fault: Fault
) -> None:
    """No deadline or timeout ends the first request in this test."""
    waits = dict.fromkeys(("read_timeout_s", "lease_deadline_s", "stuck_after_s"), NEVER_S)
    longshore.configure(empty=True, fetch_threads=4, hedge_factor=2.0, hedge_after_s=2.0, **waits)

    late: dict[str, int] = {}

    def script(asked: Asked) -> tuple[Fault, ...]:
        is_long = asked.number >= LATE and asked.size_bytes > CHUNK_BYTES // 2  # or it would end before it stalls
        return (fault,) if is_long and late.setdefault("number", asked.number) == asked.number else ()

    with FaultProxy(llama.server.endpoint_url, script) as proxy:
        options = {**llama.options, "endpoint_url": proxy.endpoint_url, "placement": "via_arena"}
        with cluster.load(llama.uri, tensor_parallel_size=RANKS, device="cpu", **options) as model:
            report = model.report
            assert [asked.number for asked, _ in proxy.struck] == [late["number"]]
            assert report.hedges >= report.nodes[0].hedges_won >= 1
            assert report.retries == {}
            assert report.store_bytes == report.nodes[0].needed_bytes
            assert report.store_bytes <= proxy.weights_bytes() <= report.store_bytes + CHUNK_BYTES * report.hedges
            eventually(lambda: not slots_in_use(longshore), lambda: f"slots in use: {longshore.status().nodes}")
            assert model.call(shard_differs, str(llama.folder), RANKS, 1, KV_HEADS) == [[]] * RANKS
    longshore.assert_nothing_left()


def slots_in_use(longshore: Longshore) -> int:
    return sum(node.leased_slots + node.quarantined_slots for node in longshore.status().nodes)
