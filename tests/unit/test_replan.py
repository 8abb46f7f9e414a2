"""Places for the ranks of a lost node."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import NodeLost, NotEnoughResources
from cluster.scheduling.topology import NodeInfo, lost_ranks, no_place, place_again


def cpu_nodes(*free: int) -> list[NodeInfo]:
    return [NodeInfo(f"n{index}", f"host{index}", cpu_ranks_free=places) for index, places in enumerate(free)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 4), st.data())
def test_every_lost_rank_gets_a_place_that_is_free(free, group_size, groups, data):
    ranks = range(group_size * groups)
    rank_nodes = {rank: data.draw(st.sampled_from(["n0", "n1", "gone", "gone too"])) for rank in ranks}
    nodes = cpu_nodes(*free)
    lost = lost_ranks(rank_nodes, {node.node_id for node in nodes} | {"n0", "n1"})
    assert lost == tuple(rank for rank in ranks if rank_nodes[rank].startswith("gone"))
    if len(lost) > sum(free):
        with pytest.raises(NotEnoughResources):
            place_again(nodes, rank_nodes, lost, group_size, "cpu", 4)
        return
    placements = place_again(nodes, rank_nodes, lost, group_size, "cpu", 4)
    assert sorted(placements) == list(lost)
    taken = [node.node_id for node in placements.values()]
    assert all(taken.count(node.node_id) <= node.cpu_ranks_free for node in nodes)
    assert placements == place_again(nodes, rank_nodes, lost, group_size, "cpu", 4)


@pytest.mark.parametrize(
    ("free", "rank_nodes", "expected"),
    [
        # The rest of the group first, however little room there is beside it.
        ((1, 4), {0: "n0", 1: "gone", 2: "n1", 3: "n1"}, {1: "n0"}),
        # Then a node that has ranks of the load, then the roomiest.
        ((2, 4), {0: "n0", 1: "n0", 2: "gone", 3: "gone"}, {2: "n0", 3: "n0"}),
        ((2, 4), {0: "gone", 1: "gone"}, {0: "n1", 1: "n1"}),
        # A group stays together where it can, and is parted where it must.
        ((1, 2), {0: "n0", 1: "n0", 2: "gone", 3: "gone"}, {2: "n1", 3: "n1"}),
        ((1, 1), {0: "gone", 1: "gone"}, {0: "n0", 1: "n1"}),
    ],
)
def test_lost_ranks_go_to_the_expected_nodes(free, rank_nodes, expected):
    lost = lost_ranks(rank_nodes, {"n0", "n1"})
    placements = place_again(cpu_nodes(*free), rank_nodes, lost, 2, "cpu", 8)
    assert {rank: node.node_id for rank, node in placements.items()} == expected


def test_a_dead_node_gets_no_rank():
    dead = NodeInfo("n0", "host0", cpu_ranks_free=8, alive=False)
    with pytest.raises(NotEnoughResources, match="1 ranks need a place, 0 are free"):
        place_again([dead], {0: "gone"}, [0], 1, "cpu", 8)


def test_the_error_names_node_and_ranks():
    error = no_place({3: "host7", 2: "host7"}, 30.0, "2 ranks need a place, 0 are free")
    assert isinstance(error, NodeLost)
    assert "node host7 was lost, and its ranks (2, 3) found no other place in 30 s: 2 ranks" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
