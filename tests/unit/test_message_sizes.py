"""Messages grow with nodes, never with chunks, nor with ranks times tensors. Counted, not timed."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from bench.huge_model import DenseShape
from bench.sim_flows import Network
from bench.sim_node import LOAD, Rates, SimNode
from bench.simulate import Model
from cluster.config import Config
from cluster.layouts.mesh import Layout
from cluster.messages import AgentBeat, LoadBeat, RankBeat
from cluster.options import LoadOptions
from cluster.planning.packed_plan import pack_shared, rank_facts
from cluster.planning.plan import LoadPlan
from cluster.request import make_request
from cluster.scheduling.holders import Holders
from cluster.scheduling.load_state import Life
from cluster.scheduling.retry import RETRIES
from cluster.telemetry.stats import SOURCES, ArenaUse, LoadCounters, NodeMemory, NodeStats, StageTimes
from storage.arena.chunk_cache import CacheStats
from storage.disk.tier import DiskStats
from storage.host.memory import GpuMemory

KIB = 1 << 10
RANKS = 4
SHAPE = DenseShape(layers=2, hidden=512, inner=1024, vocabulary=4000, shards=2)


def plan_of(shape: DenseShape, chunk_bytes: int, layout: Layout) -> tuple[Model, LoadPlan]:
    model = Model(shape, chunk_bytes)
    return model, model.plan(layout)


def beats_of_a_load(chunk_bytes: int, heartbeats: int) -> tuple[list[AgentBeat], int, int]:
    """A whole load on one node, its agent's heartbeats at equal intervals, chunks, and bytes of the node's report."""
    model, plan = plan_of(SHAPE, chunk_bytes, Layout(RANKS))
    rates = Rates(
        nic_bytes_s=float(model.index.size_bytes),  # about one second
        worker_bytes_s=1e12,
        pcie_bytes_s=1e12,
        latency_s=0.0,
        exchange_s=0.0,
        threads=4,
        arena_slots=64,
    )
    network = Network(1e15, 1e15)
    node = SimNode(network, plan, {rank: model.places(plan, rank) for rank in range(RANKS)}, rates, chunk_bytes)
    beats: list[AgentBeat] = []
    for number in range(heartbeats):
        at_s = 1.2 * number / (heartbeats - 1)
        network.at(at_s, lambda: beats.append(node.ledger.beat("node", "host", "incarnation", network.now_s, ())))
    node.begin()
    network.run()
    assert node.complete
    report = node.ledger.report(LOAD, "node", "host")
    assert report.store_chunks == report.needed_chunks > 0
    return beats, report.needed_chunks, len(pickle.dumps(report))


def test_heartbeats_do_not_grow_with_chunks() -> None:
    few, few_chunks, few_report = beats_of_a_load(256 * KIB, 20)
    many, many_chunks, many_report = beats_of_a_load(8 * KIB, 20)
    assert many_chunks > 20 * few_chunks
    assert len(few) == len(many) == 20  # as many as time has passed, whatever happened meanwhile
    for before, after in zip(few, many, strict=True):
        assert len(after.ranks) == len(before.ranks) == RANKS  # one summary per rank
        assert len(after.loads) == 1
        assert len(pickle.dumps(after)) <= len(pickle.dumps(before)) + 64  # numbers may take more digits
    assert any(beat.loads[0].complete for beat in many)
    assert not many[0].loads[0].complete
    assert many_report <= few_report + 64


def test_heartbeats_of_a_node_with_many_gpus_stay_small() -> None:
    """Every number is as large as it gets. Two a second from a thousand nodes are a few megabytes a second."""
    large = 2**40
    counters = LoadCounters(
        dict.fromkeys(SOURCES, large),
        dict.fromkeys(SOURCES, large),
        retries=dict.fromkeys(RETRIES, large),
        leases_granted=large,
        stages=StageTimes(*[1234.5678] * len(fields(StageTimes))),
    )
    gpus = tuple(GpuMemory(large + number, large - number) for number in range(8))
    stats = NodeStats(
        CacheStats(*[large] * 15), DiskStats(*[large] * 6), NodeMemory(large, large, large, large, large, gpus)
    )
    ranks = tuple(
        RankBeat("llama-70b-0123abcd", 1, rank, 0, 2**22 + rank, large + rank, 1.5, requests=64, own_bytes=large - rank)
        for rank in range(8)
    )
    load = LoadBeat("llama-70b-0123abcd", 1, large, None, False, "llama-70b")
    beat = AgentBeat(
        "0" * 56,
        "host-001",
        "0" * 12,
        (load,),
        ranks,
        ArenaUse(large, large, 9, 9),
        number=large,
        counters={"llama-70b": counters},
        stats=stats,
    )
    assert len(pickle.dumps(beat)) < 4 * KIB
    more = replace(beat, loads=(load,) * 2, ranks=ranks * 2)
    assert len(pickle.dumps(more)) - len(pickle.dumps(beat)) < KIB


def test_node_tables_do_not_grow_with_ranks_or_replicas() -> None:
    sizes = {
        layout: len(pack_shared(plan_of(SHAPE, 64 * KIB, layout)[1]))
        for layout in (Layout(4), Layout(4, 8), Layout(4, 8, 32))
    }
    assert max(sizes.values()) <= min(sizes.values()) + 64
    assert len(rank_facts(plan_of(SHAPE, 64 * KIB, Layout(4, 8, 32))[1].cut)) == 1024


def test_tables_grow_with_tensors_and_chunks_once() -> None:
    small = len(pack_shared(plan_of(SHAPE, 64 * KIB, Layout(4))[1]))
    _, plan = plan_of(replace(SHAPE, layers=20), 64 * KIB, Layout(4))
    large = len(pack_shared(plan))
    # a name, three numbers, and no more of a tensor; a chunk's row
    assert large - small < 90 * len(plan.cut) + 24 * len(plan.chunks)


@pytest.mark.slow  # imports Ray
def test_jobs_do_not_grow_with_the_model() -> None:
    from actors.coordination.jobs import node_job, rank_job
    from actors.coordination.model_record import ModelRecord, Placement

    request = make_request(LoadOptions("s3://bucket/model", tensor_parallel_size=4, fsdp_size=1, data_parallel_size=2))
    record = ModelRecord("load", request, Life.new(request.world_size), Holders())
    for rank in range(request.world_size):
        record.placements[rank] = Placement(rank, f"node-{rank // 4}", f"host-{rank // 4}", None)
    # Neither takes a plan: whatever the model is, this is all that goes through the coordinator for a node or a rank.
    assert node_job(record, "node-1", record.life.attempt, Config()).ranks == (4, 5, 6, 7)
    assert len(pickle.dumps(node_job(record, "node-1", record.life.attempt, Config()))) < 4 * KIB
    assert len(pickle.dumps(rank_job(record, record.placements[0], Config()))) < 2 * KIB
