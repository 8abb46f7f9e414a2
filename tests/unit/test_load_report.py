"""Reports whose bottleneck is evident."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.layouts.mesh import Layout
from cluster.telemetry.report import (
    LoadLimit,
    LoadReport,
    NodeReport,
    ProcessMemory,
    RankReport,
    StageTimes,
    find_limit,
    stage_shares,
)

GB = 1_000_000_000


def rank(
    number: int = 0, load_s: float = 10.0, cpu_s: float = 1.0, host_busy: float = 0.1, **stages: float
) -> RankReport:
    times = StageTimes(fetch_bytes=GB, place_bytes=GB, **stages)  # type: ignore[arg-type]
    return RankReport(
        rank=number,
        node="n",
        host="h",
        pid=1,
        device="cpu",
        incarnation=0,
        size_bytes=GB,
        device_bytes=GB,
        stages=times,
        peak_host_bytes=GB + 200,
        start_s=1.0,
        load_s=load_s,
        baseline_host_bytes=150,
        cpu_s=cpu_s,
        host_busy=host_busy,
        cpus=2,
        requests=4,
        peak_requests=6,
    )


def limit_of(*ranks: RankReport, plan_s: float = 0.1, start_s: float = 0.2, **changes: Any) -> LoadLimit:
    load_s = max((rank.load_s for rank in ranks), default=0.0)
    times = {"plan_s": plan_s, "start_s": start_s, "load_s": load_s, "total_s": plan_s + start_s + load_s}
    return find_limit(ranks, **{**times, "resident": False, **changes})


# Four requests in flight the whole time: 40 thread-seconds of 10.
READING = {"fetch_s": 38.0, "verify_s": 2.0, "working_s": 9.9, "place_s": 1.0, "wait_chunk_s": 9.0}


@pytest.mark.parametrize(
    ("stage", "share", "ranks"),
    [
        ("store", 0.94, [rank(**READING)]),
        ("store", 0.94, [rank(0, **READING), rank(1, **READING)]),
        ("store", 0.9, [rank(fetch_s=4.0, working_s=1.0, wait_retry_s=8.0, place_s=0.5)]),
        ("verify", 0.8, [rank(fetch_s=8.0, verify_s=32.0, working_s=10.0, place_s=1.0)]),
        # The arena is full because placing empties it slowly...
        ("place", 0.95, [rank(fetch_s=4.0, working_s=2.0, wait_slot_s=8.0, place_s=9.5)]),
        ("device", 0.9, [rank(fetch_s=4.0, working_s=2.0, wait_slot_s=8.0, place_s=0.5, device_s=9.0)]),
        # ...or because it is small: no chunk keeps a slot for long.
        ("slots", 0.6, [rank(fetch_s=9.0, working_s=3.0, wait_slot_s=6.0, place_s=3.0)]),
        # Threads place fetched chunks; reading takes little of their time.
        ("place", 0.8, [rank(fetch_s=6.0, verify_s=2.0, place_s=32.0, place_fetching_s=32.0, working_s=10.0)]),
        # ...and most of the placing time is spent on fresh memory, in place or on the way there.
        (
            "memory",
            0.6,
            [rank(fetch_s=6.0, verify_s=2.0, place_s=32.0, place_fetching_s=32.0, fresh_s=24.0, working_s=10.0)],
        ),
        # All from the arena: there is nothing to fetch.
        ("place", 0.9, [rank(place_s=9.0)]),
        ("control", 0.7, [rank(fetch_s=9.0, working_s=2.0, wait_lease_s=7.0, place_s=1.0)]),
        ("cpu", 0.97, [rank(cpu_s=9.0, host_busy=0.97, **READING)]),
        ("cpu", 1.0, [rank(0, cpu_s=5.0, host_busy=1.0, **READING), rank(1, cpu_s=6.0, host_busy=1.0, **READING)]),
        # Other processes use the processors: this load does not lack them.
        ("store", 0.94, [rank(cpu_s=0.5, host_busy=1.0, **READING)]),
    ],
)
def test_the_busy_stage_is_the_bottleneck(stage: str, share: float, ranks: list[RankReport]):
    found = limit_of(*ranks)
    assert found.stage == stage, found
    assert found.share == pytest.approx(share, abs=0.01)
    assert found.sentence.startswith(f"{stage}: ")


def test_start_up_and_resident_models_are_reported():
    found = limit_of(rank(load_s=1.0, working_s=1.0, fetch_s=4.0), plan_s=1.0, start_s=3.0)
    assert (found.stage, found.share) == ("start-up", 0.8)
    assert "4.00 of 5.00 s" in found.sentence
    found = limit_of(rank(load_s=1.0), connect_s=10.0, total_s=11.3)
    assert found.sentence == (
        "start-up: 10.30 of 11.30 s had passed before bytes moved (cluster 10.00 s, planning 0.10 s, workers 0.20 s)"
    )
    # A worker that was replaced began late; bytes moved meanwhile.
    assert limit_of(rank(load_s=1.0, fetch_s=4.0, working_s=1.0), load_s=4.0, total_s=4.3).stage == "store"
    assert limit_of(rank(), resident=True).stage == "resident"
    assert limit_of().stage in ("start-up", "store")  # no rank had anything to load


def test_throttling_is_reported():
    found = limit_of(RankReport(**{**_fields(rank(**READING)), "throttles": 7}))
    assert "7 times" in found.sentence


@given(
    load_s=st.floats(0, 1e4),
    times=st.lists(st.floats(0, 1e5), min_size=10, max_size=10),
    cpu_s=st.floats(0, 1e5),
    host_busy=st.floats(0, 1),
)
def test_every_report_has_a_limit_and_valid_shares(load_s: float, times: list[float], cpu_s: float, host_busy: float):
    names = [
        "fetch_s",
        "verify_s",
        "place_s",
        "device_s",
        "wait_chunk_s",
        "working_s",
        "wait_slot_s",
        "wait_lease_s",
        "wait_retry_s",
        "fresh_s",
    ]
    some = rank(load_s=load_s, cpu_s=cpu_s, host_busy=host_busy, **dict(zip(names, times, strict=True)))
    assert all(0 <= share <= 1 for share in stage_shares([some]).values())
    found = limit_of(some)
    assert 0 <= found.share <= 1
    assert found.sentence


def test_the_report_says_limit_sources_retries_and_memory():
    node = NodeReport(
        node="n",
        host="h",
        needed_chunks=2,
        needed_bytes=GB,
        overfetch_bytes=0,
        store_chunks=2,
        store_bytes=GB,
        cached_chunks=1,
        cached_bytes=5,
        refetched_chunks=0,
        corrupt_chunks=0,
        retries={"throttled": 2},
        arena_bytes=1000,
        peak_host_bytes=70,
        baseline_host_bytes=50,
        direct_bytes=7,
        disk_chunks=1,
        disk_bytes=3,
    )
    report = LoadReport(
        model_id="m",
        uri="u",
        revision="r",
        verified="blake3",
        placement_mode="via_arena",
        resident=False,
        layout=Layout(),
        model_bytes=GB,
        placed_bytes=GB,
        overfetch_bytes=0,
        plan_s=0.1,
        start_s=0.1,
        load_s=10.0,
        total_s=10.2,
        attempts=1,
        ranks=(rank(**READING),),
        nodes=(node,),
        control_plane=(ProcessMemory("planning", "h", 100, 130),),
    )
    assert (
        report.bytes_by_source
        == node.bytes_by_source
        == {
            "store_via_arena": GB - 7,
            "store_direct": 7,
            "arena": 5,
            "disk": 3,
            "peer": 0,
            "unknown": 0,
        }
    )
    assert report.retries == {"throttled": 2}
    # Arena once, planning 30, agent 20, the rank 50 beside its tensors.
    assert report.host_bytes_beyond_destination == 1000 + 30 + 20 + 50
    assert [process.role for process in report.processes] == ["planning", "agent", "rank 0"]
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["limit"]["stage"] == "store"
    assert plain["host_bytes_beyond_destination"] == 1100
    assert plain["ranks"][0]["peak_requests"] == 6


def test_shares_of_a_node_are_added():
    node = NodeReport("n1", "host-a", 2, 20, 2, 20, 0, 0, 0, 0, {"reset": 1}, direct=True)
    both = node.plus(node)
    assert (both.store_chunks, both.store_bytes, both.retries) == (
        2 * node.store_chunks,
        2 * node.store_bytes,
        {"reset": 2},
    )
    assert both.direct is True
    assert node.plus(NodeReport("n1", "host-a", 0, 0, 0, 0, 0, 0, 0, 0, {})).direct is True


def _fields(report: RankReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}
