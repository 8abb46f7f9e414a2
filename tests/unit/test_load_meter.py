"""An agent's counters grow with a load's report. Across restarts of the agent nothing counts twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.node.chunk_sources import DISK, STORE, STORE_DIRECT, ChunkSources, LoadMeter
from cluster.messages import AgentBeat, NodeJob, RankHello, RankUpdate
from cluster.planning.packed_plan import pack_shared, unpack_shared
from cluster.telemetry.stats import SOURCES, LoadCounters, RankStats, StageTimes
from storage.host.processes import ProcessId
from storage.stores.object_store import MemoryStore
from tests.support.checkpoints import odd_objects
from tests.support.local_node import LocalNode, local_node, plan_of

ME = ProcessId(1, 1)
OBJECTS = odd_objects()
PLAN = plan_of(OBJECTS, chunk_bytes=512)


def beat_of(node: LocalNode) -> AgentBeat:
    return node.agent._ledger.beat("node", "host", "i", 0.0, ())


def job(*, again: bool = False) -> NodeJob:
    return NodeJob(
        "load-1", 1, pack_shared(PLAN), "twin", (0,), frozenset(), 3, 3, 60.0, b"", again=again, incarnations=(2,)
    )


def said(meter: LoadMeter) -> LoadCounters:
    return meter.counters(Counter(), 0, 0, digests=True)


def test_counters_of_a_load_equal_its_report(tmp_path: Path) -> None:
    with local_node(tmp_path, 16) as node:
        ranks, report = node.load(PLAN, MemoryStore(dict(OBJECTS)))
        (counters,) = beat_of(node).counters.values()
        assert counters.bytes_by_source == {
            "store_via_arena": report.store_bytes,
            "store_direct": 0,
            "disk": 0,
            "peer": 0,
            "arena": 0,
        }
        assert counters.verified_chunks == counters.leases_granted == report.store_chunks > 0
        loader = ranks[0].loader  # its last message had the final stats
        final = loader._meter.stats(0.0, loader.state, loader._fetcher, loader._placer, last=True)
        assert final is not None
        assert counters.stages == final.stages.exact()
        _, again = node.load(PLAN, MemoryStore(dict(OBJECTS)))
        (both,) = beat_of(node).counters.values()  # of one model
        assert both.bytes_by_source["arena"] == again.cached_bytes == report.needed_bytes
        grown = (both.leases_granted - counters.leases_granted, both.verified_chunks - counters.verified_chunks)
        assert grown == (0, 0)


def test_chunks_that_bypass_the_arena_are_counted_separately(tmp_path: Path) -> None:
    with local_node(tmp_path, 16, placement="direct") as node:
        _, report = node.load(PLAN, MemoryStore(dict(OBJECTS)))
        (counters,) = beat_of(node).counters.values()
        assert counters.bytes_by_source["store_direct"] == report.direct_bytes > 0
        assert sum(counters.bytes_by_source.values()) == report.store_bytes


def test_counters_outlive_loads_and_are_sent_until_answered(tmp_path: Path) -> None:
    with local_node(tmp_path, 16) as node:
        _, report = node.load(PLAN, MemoryStore(dict(OBJECTS)))
        node.agent.end("load-1")
        first, second = beat_of(node), beat_of(node)
        assert not first.loads
        for beat in (first, second):
            (counters,) = beat.counters.values()
            assert counters.bytes_by_source["store_via_arena"] == report.store_bytes
        ledger = node.agent._ledger
        ledger.answered(first, "one")
        assert (beat_of(node).counters, beat_of(node).counted_by) == ({}, "one")
        node.load(PLAN, MemoryStore(dict(OBJECTS)))
        (more,) = beat_of(node).counters.values()
        assert more.bytes_by_source["arena"] == more.bytes_by_source["store_via_arena"] == report.store_bytes
        ledger.answered(beat_of(node), "one")
        ledger.answered(beat_of(node), "another")  # it knows nothing yet
        assert beat_of(node).counters == {next(iter(first.counters)): more}


def test_a_restarted_agent_counts_only_what_it_sees() -> None:
    meter = LoadMeter(job(again=True))
    sources = ChunkSources(job(again=True), unpack_shared(job().shared).chunks, meter)
    sources.hello(RankHello("load-1", 1, 0, 2, ME, fetched={STORE: (0,), DISK: (1,)}))
    sources.in_arena(2)  # by this load or by another one: unknown
    assert not any(said(meter).bytes_by_source.values())
    sources.fetched(3, STORE)
    sources.fetched(3, STORE)  # again: it had been evicted
    sources.late(3, STORE)  # known already
    sources.late(4, STORE_DIRECT)
    assert said(meter).chunks_by_source == {"store_via_arena": 2, "store_direct": 1, "disk": 0, "arena": 0, "peer": 0}
    # the report follows from all that is known
    assert sources.stats([0, 1, 2, 3, 4])["store_chunks"] == 3


def test_chunks_from_the_arena_are_counted_once() -> None:
    meter = LoadMeter(job())
    sources = ChunkSources(job(), unpack_shared(job().shared).chunks, meter)
    sources.in_arena(0)
    sources.in_arena(0)
    sources.fetched(1, DISK)
    sources.in_arena(1)
    assert {source: said(meter).chunks_by_source[source] for source in SOURCES} == {
        "store_via_arena": 0,
        "store_direct": 0,
        "disk": 1,
        "peer": 0,
        "arena": 1,
    }


def update(rank: int, incarnation: int, fetch_s: float, **more: object) -> RankUpdate:
    stats = RankStats(StageTimes(fetch_s=fetch_s), 1, 2)
    return RankUpdate("load-1", 1, rank, incarnation, ME, stats=stats, **more)  # type: ignore[arg-type]


def test_the_time_of_lost_ranks_stays_counted() -> None:
    meter = LoadMeter(replace(job(), incarnations=(0,)))
    meter.reported(update(0, 0, 5.0))
    meter.reported(update(0, 0, 7.0, throttled=2, retries={"digest_mismatch": 1, "reset": 3}))
    meter.reported(update(0, 1, 1.0))  # the one that took its place
    counters = said(meter)
    assert counters.stages.fetch_s == 8.0
    assert (counters.throttles, counters.corrupt_chunks) == (2, 1)


def test_a_ranks_earlier_report_is_not_counted_again() -> None:
    meter = LoadMeter(job(again=True))
    meter.reported(update(0, 2, 50.0))
    assert said(meter).stages.fetch_s == 0
    meter.reported(update(0, 2, 53.0))
    meter.reported(update(0, 3, 2.0))  # a new process: all that it reports is new
    assert said(meter).stages.fetch_s == pytest.approx(5.0)


def test_chunks_without_digests_do_not_count_as_verified() -> None:
    meter = LoadMeter(job())
    meter.had("disk", 10)
    assert meter.counters(Counter(), 0, 0, digests=False).verified_chunks == 0
    assert said(meter).verified_chunks == 1
    assert np.isfinite(said(meter).stages.fetch_s)
