"""Nodes that feed each other, simulated: what the store sends, how long it takes, and what one bad node costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sim_node import GB, Rates
from bench.simulate_peers import PeerCase, simulate_peers

RATES = Rates(nic_bytes_s=1.25 * GB, store_bytes_s=1.25 * GB, latency_s=0.005, arena_slots=64, threads=16)
SMALLEST = replace(RATES, arena_slots=3)


def test_a_chunk_has_as_many_hops_as_its_tree_is_deep() -> None:
    assert [PeerCase(nodes, 1).hops for nodes in (1, 2, 4, 5, 13, 14, 40, 41, 1024)] == [0, 1, 1, 2, 2, 3, 3, 4, 6]


@pytest.mark.parametrize("nodes", [1, 2, 5, 14])
def test_the_store_sends_the_model_once_near_the_limit(nodes: int) -> None:
    result = simulate_peers(PeerCase(nodes, 400), RATES)
    assert result.store_share == 1
    assert 0.85 < result.efficiency <= 1
    assert not result.causes


def test_same_input_same_result() -> None:
    case = PeerCase(4, 100, slow_share=0.2, lost_every_s=0.4)
    assert simulate_peers(case, RATES) == simulate_peers(case, RATES)


@pytest.mark.parametrize("rates", [RATES, SMALLEST], ids=["64 slots", "3 slots"])
@pytest.mark.parametrize(
    ("case", "store_share", "load_s"),
    [
        (PeerCase(6, 60), 1.0, 15),
        (PeerCase(6, 60, slow_share=0.01), 1.5, 15),
        (PeerCase(6, 60, slow_share=0.01, slow_down=True), 1.5, 15),
        (PeerCase(6, 60, lost_every_s=60), 2.0, 60),  # receivers wait 20 s for a node that is gone, twice at most
    ],
    ids=["even", "slow in sending", "slow", "lost"],
)
def test_one_bad_node_is_survived(rates: Rates, case: PeerCase, store_share: float, load_s: float) -> None:
    result = simulate_peers(case, rates)
    assert 1 <= result.store_share <= store_share
    assert result.lost == bool(case.lost_every_s)
    assert result.load_s < load_s


def test_a_slow_sender_sheds_what_it_cannot_send() -> None:
    even = simulate_peers(PeerCase(16, 300), RATES)
    slow = simulate_peers(PeerCase(16, 300, slow_share=0.01), RATES)
    assert slow.load_s < 2 * even.load_s  # 3.4 times without a limit of requests in line
