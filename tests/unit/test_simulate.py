"""The simulator against what can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.huge_model import DenseShape
from bench.sim_flows import Network, NodeLink, WorkerFlows, water_level
from bench.simulate import Case, Model, Rates, Result, simulate

MIB = 1 << 20
# Nothing but what a test states is a limit.
FREE = Rates(
    nic_bytes_s=1e15,
    store_bytes_s=1e15,
    connection_bytes_s=1e15,
    worker_bytes_s=1e15,
    pcie_bytes_s=1e15,
    latency_s=0.0,
    exchange_s=0.0,
    threads=4,
    arena_slots=64,
)
NIC = replace(FREE, nic_bytes_s=1e9)
SMALL = Case(nodes=1, ranks_per_node=4)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(DenseShape(layers=3, hidden=1024, inner=4096, vocabulary=16_000, shards=2), MIB // 2)


def test_one_node_takes_bytes_over_nic(model: Model) -> None:
    result = simulate(model, SMALL, NIC)
    assert result.bottleneck == "NIC"
    assert result.load_s == pytest.approx(result.store_bytes / 1e9, rel=0.02)
    assert result.store_bytes == pytest.approx(model.index.size_bytes, rel=0.02)  # each chunk once, headers apart


def test_half_the_nic_takes_twice_as_long(model: Model) -> None:
    half = replace(NIC, nic_bytes_s=NIC.nic_bytes_s / 2)
    assert simulate(model, SMALL, half).load_s == pytest.approx(2 * simulate(model, SMALL, NIC).load_s, rel=0.02)


def test_a_slow_store_is_shared(model: Model) -> None:
    one = simulate(model, SMALL, NIC)
    rates = replace(NIC, store_bytes_s=2e9)
    two, eight = (simulate(model, replace(SMALL, nodes=nodes), rates) for nodes in (2, 8))
    assert two.load_s == pytest.approx(one.load_s, rel=0.02)
    assert eight.bottleneck == "store"
    assert eight.store_bytes == 8 * one.store_bytes
    assert eight.load_s == pytest.approx(eight.store_bytes / 2e9, rel=0.02)
    assert eight.store_rate_bytes_s <= 2e9 * 1.0001


def test_connections_workers_and_pcie_limit_too(model: Model) -> None:
    for limited in (
        replace(FREE, connection_bytes_s=1e7, latency_s=0.01),
        replace(FREE, worker_bytes_s=1e8),
        replace(FREE, pcie_bytes_s=1e8),
    ):
        result = simulate(model, SMALL, limited)
        assert result.ideal_s <= result.load_s * 1.0001
        assert result.efficiency > 0.85, (result.bottleneck, result)
    assert simulate(model, SMALL, replace(FREE, pcie_bytes_s=1e8)).bottleneck == "PCIe"


def test_a_slow_worker_leases_less(model: Model) -> None:
    # Few in hand: leases that a slow worker holds at the end are a tail, not its share. Batches grow with the arena.
    rates = replace(FREE, worker_bytes_s=1e8, threads=2, arena_slots=40)
    even, slow = simulate(model, SMALL, rates), simulate(model, replace(SMALL, slow_worker=8), rates)
    assert even.slow_worker_share == pytest.approx(1 / 4, abs=0.05)
    assert slow.slow_worker_share < 0.1  # it does 1/25 of the work that all can do
    # Four workers have become three and an eighth; shares fixed beforehand would take eight times as long.
    assert 4 / 3.125 * 0.9 * even.load_s < slow.load_s < 2 * even.load_s


def test_a_slow_node_is_slow_alone(model: Model) -> None:
    even = simulate(model, replace(SMALL, nodes=8), NIC)
    slow = simulate(model, replace(SMALL, nodes=8, slow_node=4), NIC)
    assert slow.others_s == pytest.approx(even.load_s, rel=0.001)
    assert slow.load_s == pytest.approx(4 * even.load_s, rel=0.02)


@pytest.mark.parametrize("slow", [{}, {"slow_node": 3.0}, {"slow_worker": 3.0}])
def test_one_simulated_node_stands_for_equal_nodes(model: Model, slow: dict[str, float]) -> None:
    rates = replace(NIC, store_bytes_s=2.5e9, worker_bytes_s=4e8, latency_s=0.001)
    case = replace(SMALL, nodes=4, **slow)
    short, whole = simulate(model, case, rates), simulate(model, replace(case, stand_ins=False), rates)
    assert short.load_s == pytest.approx(whole.load_s, rel=1e-6)
    assert short.store_bytes == whole.store_bytes


def test_same_input_same_result(model: Model) -> None:
    rates = replace(NIC, latency_s=0.002)
    assert simulate(model, SMALL, rates) == simulate(model, SMALL, rates)


def test_the_smallest_arena_suffices(model: Model) -> None:
    result: Result = simulate(model, SMALL, replace(NIC, arena_slots=9, latency_s=0.001, exchange_s=0.0001))
    assert result.load_s < math.inf
    assert result.efficiency <= 1.0001


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 100)), min_size=1, max_size=8), st.floats(0.1, 500))
def test_water_level_fills_the_capacity(demands: list[tuple[int, float]], capacity: float) -> None:
    level = water_level(demands, capacity)
    used = sum(count * min(cap, level) for count, cap in demands)
    if level == math.inf:
        assert used <= capacity * (1 + 1e-9)
    else:
        assert used == pytest.approx(capacity)


def test_requests_share_and_the_freed_share_is_used() -> None:
    """Two workers behind a NIC of 10: 5 each; when the small request is done, the other has all of it."""
    network = Network(1e9, 1e9)
    node = NodeLink(10.0)
    network.nodes.append(node)
    node.workers = [WorkerFlows(node, 100.0), WorkerFlows(node, 100.0)]
    ended: dict[str, float] = {}
    network.request(node.workers[0], 10, lambda: ended.update(small=network.now_s))
    network.request(node.workers[1], 30, lambda: ended.update(large=network.now_s))
    network.at(3.0, lambda: ended.update(timed=network.now_s))
    network.run()
    assert ended == {"small": pytest.approx(2.0), "timed": pytest.approx(3.0), "large": pytest.approx(4.0)}
