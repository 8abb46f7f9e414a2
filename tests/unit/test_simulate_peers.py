"""Nodes that feed each other, simulated: what the store sends, how long it takes, and what one bad node costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.node.peer_exchange import PATIENCE_S
from bench.sim_node import GB, Rates
from bench.simulate_peers import PeerCase, simulate_peers
from cluster.scheduling.concurrency import LEAST_PATIENCE_S, PATIENT_FOR

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(("filled", "joining"), [(1, 1), (1, 3), (4, 4)])
def test_nodes_that_join_a_model_that_no_arena_keeps_read_it_once(filled: int, joining: int) -> None:
    """In the trees of the nodes that join, the filled ones would be waited for 20 s, and cost further reads."""
    result = simulate_peers(PeerCase(filled + joining, 400, filled=filled), RATES)
    assert result.store_share == 1
    assert result.load_s < 1.3 * result.limit_s
    assert result.causes.keys() == {"peer_without_chunk"}


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
        (PeerCase(6, 60, lost_every_s=60), 2.0, 30),  # receivers wait 4 s for a node that is gone, a few times at most
    ],
    ids=["even", "slow in sending", "slow", "lost"],
)
def test_one_bad_node_is_survived(rates: Rates, case: PeerCase, store_share: float, load_s: float) -> None:
    result = simulate_peers(case, rates)
    assert 1 <= result.store_share <= store_share
    assert result.lost == bool(case.lost_every_s)
    assert result.load_s < load_s


@pytest.mark.parametrize("slow_down", [False, True], ids=["in sending", "both ways"])
def test_a_slow_node_says_so_and_is_left_out(*, slow_down: bool) -> None:
    """Without that the others take about 4 times as long."""
    rates = replace(RATES, store_bytes_s=4 * RATES.nic_bytes_s)
    even = simulate_peers(PeerCase(16, 600), rates)
    slow = simulate_peers(PeerCase(16, 600, slow_share=0.01, slow_down=slow_down), rates)
    assert slow.causes["peer_slow"] > 0
    assert slow.load_s < 2 * even.load_s


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("rates", [RATES, SMALLEST], ids=["64 slots", "3 slots"])
@pytest.mark.parametrize("chunk_s", [20.0, 30.0])
def test_a_store_that_is_slow_for_all_nodes_is_read_once(chunk_s: float, rates: Rates, *, lends: bool) -> None:
    """Each chunk takes it as long as a rank waits in one lease, which is a third of it, or longer."""
    result = simulate_peers(PeerCase(4, 40, lends=lends), replace(rates, latency_s=chunk_s), lease_deadline_s=60.0)
    assert result.store_share == 1.0
    assert result.causes.keys() <= {"peer_without_chunk"}  # a reader's node asks those that began before


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize(
    ("nodes", "usual_s", "rates"),
    [(2, 0.05, RATES), (4, 0.05, RATES), (4, 2.0, RATES), (16, 0.05, RATES), (2, 0.05, SMALLEST), (4, 0.05, SMALLEST)],
)
def test_a_node_whose_store_alone_is_slow_hands_its_chunks_over(
    nodes: int, usual_s: float, rates: Rates, *, lends: bool
) -> None:
    """Another node reads each of them, once. All wait for it once, before it says so."""
    rates = replace(rates, latency_s=usual_s)
    even = simulate_peers(PeerCase(nodes, 60, lends=lends), rates)
    slow = simulate_peers(PeerCase(nodes, 60, store_delay_s=60.0, lends=lends), rates)
    assert slow.store_share <= 1.1
    assert slow.causes.keys() - even.causes.keys() <= {"peer_slow", "peer_without_chunk"}
    kept_s = PATIENCE_S if rates.arena_slots == SMALLEST.arena_slots else 0.0  # for chunks that nobody comes for
    assert slow.load_s < even.load_s + max(LEAST_PATIENCE_S, PATIENT_FOR * usual_s) + kept_s


def test_links_of_all_kinds_make_no_node_slow() -> None:
    """Requests stay in line everywhere if the store is far faster than the nodes."""
    for store in (1, 4, 16):
        result = simulate_peers(PeerCase(8, 400), replace(RATES, store_bytes_s=store * RATES.nic_bytes_s))
        assert not result.causes
        assert result.store_share == 1.0
