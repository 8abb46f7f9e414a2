"""Every node of a load computes the same home for each chunk, among the nodes that need it."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from actors.node.peer_homes import PeerHomes
from cluster.messages import NodePeer
from storage.peers import Peer
from tests.support.node_simulation import SimModel, SimTables

CHUNKS = 200


def tables_of(needs: Mapping[int, Sequence[int]], chunks: int = CHUNKS) -> SimTables:
    tables = pickle.loads(SimModel(tuple(range(chunks))).shared(needs))
    assert isinstance(tables, SimTables)
    return tables


def nodes_of(count: int, silent: Sequence[int] = ()) -> list[NodePeer]:
    """One rank on each. Those that are `silent` serve no chunks."""
    return [
        NodePeer(f"node-{at}", (at,), None if at in silent else Peer("10.0.0.1", 1000 + at, f"agent-{at}"))
        for at in range(count)
    ]


def homes_seen(nodes: Sequence[NodePeer], tables: SimTables, chunk: int) -> list[str]:
    """The home of a chunk as each node that needs it sees it."""
    found = []
    for node in nodes:
        if chunk in tables.chunk_ids(node.ranks[0]):
            home = PeerHomes(nodes, node.node_id, tables).home(chunk)
            found.append(node.node_id if home is None else home.node_id)
    return found


@given(st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=5))
def test_all_nodes_see_one_home_among_those_that_need_the_chunk(needs: list[set[int]]):
    tables = tables_of({rank: sorted(chunks) for rank, chunks in enumerate(needs)}, chunks=20)
    nodes = nodes_of(len(needs))
    for chunk in range(20):
        seen = homes_seen(nodes, tables, chunk)
        needing = [node.node_id for node, chunks in zip(nodes, needs, strict=True) if chunk in chunks]
        assert len(set(seen)) == (1 if needing else 0)
        assert set(seen) <= set(needing)
        for node in nodes:
            askers = PeerHomes(nodes, node.node_id, tables).askers(chunk)
            assert askers == (set(needing) - {node.node_id} if seen[:1] == [node.node_id] else set())


def test_homes_are_spread_evenly():
    tables = tables_of({rank: range(CHUNKS) for rank in range(4)})
    homes = PeerHomes(nodes_of(4), "node-0", tables)
    counts = Counter(home.node_id if (home := homes.home(chunk)) else "node-0" for chunk in range(CHUNKS))
    assert set(counts) == {f"node-{at}" for at in range(4)}
    assert all(30 <= count <= 70 for count in counts.values())  # 50 each, and three times the deviation


def test_when_a_node_leaves_only_its_chunks_get_another_home():
    tables = tables_of({rank: range(CHUNKS) for rank in range(4)})
    nodes = nodes_of(4)
    before, after = PeerHomes(nodes, "node-0", tables), PeerHomes(nodes[:3], "node-0", tables)
    for chunk in range(CHUNKS):
        was, now = before.home(chunk), after.home(chunk)
        assert was == now or (was is not None and was.node_id == "node-3")


def test_a_node_that_serves_nothing_asks_and_is_no_home():
    tables = tables_of({rank: range(CHUNKS) for rank in range(3)})
    nodes = nodes_of(3, silent=[1])
    silent = PeerHomes(nodes, "node-1", tables)
    for chunk in range(CHUNKS):
        home = silent.home(chunk)
        assert home is not None
        assert home.node_id != "node-1"
        assert not silent.askers(chunk)
        assert "node-1" not in homes_seen([nodes[0], nodes[2]], tables, chunk)
