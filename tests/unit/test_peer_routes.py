"""Every node of a load computes the same way for each chunk, among the nodes that need it."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.node import peer_routes
from actors.node.peer_routes import FAN_OUT, LEFT_OUT_S, MOST_MISSES, MOST_SOURCES, PeerRoutes
from cluster.messages import Members, NodePeer, OlderLoad, PeerSource
from storage.peers import Peer
from tests.support.node_simulation import SimModel, SimTables

CHUNKS = 200


def tables_of(needs: Mapping[int, Sequence[int]], chunks: int = CHUNKS) -> SimTables:
    tables = pickle.loads(SimModel(tuple(chunk % 256 for chunk in range(chunks))).shared(needs))
    assert isinstance(tables, SimTables)
    return tables


def nodes_of(count: int, silent: Sequence[int] = ()) -> list[NodePeer]:
    """One rank on each. Those that are `silent` serve no chunks."""
    return [
        NodePeer(f"node-{at}", (at,), None if at in silent else Peer("10.0.0.1", 1000 + at, f"agent-{at}"))
        for at in range(count)
    ]


def routes_of(nodes: Sequence[NodePeer], tables: SimTables) -> dict[str, PeerRoutes]:
    return {node.node_id: PeerRoutes(Members(tuple(nodes), b"key"), "llama", node.node_id, tables) for node in nodes}


def first_sources(routes: Mapping[str, PeerRoutes], chunk: int, needing: Sequence[str]) -> dict[str, str | None]:
    """For each node that needs the chunk, the one that it asks first; None: the store."""
    sources = {node: routes[node].sources(chunk) for node in needing}
    return {node: node_at(found[0]) if found else None for node, found in sources.items()}


def node_at(source: PeerSource) -> str:
    return f"node-{source.peer.port - 1000}"


def source_of(node: NodePeer) -> PeerSource:
    assert node.peer is not None
    return PeerSource(node.peer, "llama", b"key")


def reach_the_store(first: Mapping[str, str | None]) -> bool:
    """Return whether every node's chunk comes from the store at last, and never round in a circle."""
    for node in first:
        at: str | None = node
        for _ in first:
            at = first[at] if at is not None else None
        if at is not None:
            return False
    return True


@given(st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=9), st.sets(st.integers(0, 8)))
def test_all_nodes_see_one_tree_of_those_that_need_the_chunk(needs: list[set[int]], silent: set[int]):
    tables = tables_of({rank: sorted(chunks) for rank, chunks in enumerate(needs)}, chunks=20)
    routes = routes_of(nodes_of(len(needs), sorted(silent)), tables)
    for chunk in range(20):
        needing = [f"node-{at}" for at, chunks in enumerate(needs) if chunk in chunks]
        serving = [node for node in needing if int(node[5:]) not in silent]
        first = first_sources(routes, chunk, needing)
        assert reach_the_store(first)
        assert set(first.values()) - {None} <= set(serving)
        if serving:
            assert list(first.values()).count(None) == 1  # the home
            assert next(node for node, source in first.items() if source is None) in serving
        else:
            assert set(first.values()) <= {None}
        for node in (f"node-{at}" for at in range(len(needs))):
            assert routes[node].askers(chunk) == {asker for asker, source in first.items() if source == node}
        if serving and len(serving) == len(needing):
            assert all(len(routes[node].askers(chunk)) <= FAN_OUT for node in needing)


@given(st.integers(2, 40), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_whatever_nodes_leave_out_they_never_wait_in_a_circle(count: int, chunk: int, chance: object):
    tables = tables_of({rank: range(1001) for rank in range(count)}, chunks=1001)
    nodes = nodes_of(count)
    routes = routes_of(nodes, tables)
    for each in routes.values():
        for node in nodes:
            if chance.random() < 0.4:  # type: ignore[attr-defined]
                each.leave_out(source_of(node), 1.0)
    first = first_sources(routes, chunk, list(routes))
    assert reach_the_store(first)
    for node, source in first.items():
        assert source is None or routes[source].may_wait(node, chunk)
        assert len(routes[node].sources(chunk)) <= MOST_SOURCES


@given(st.integers(2, 12), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_nodes_that_hand_a_chunk_over_are_in_no_circle(count: int, chunk: int, chance: object):
    """Whatever nodes leave out, and whoever hands over: they ask others, and refuse the chunk to all."""
    nodes = nodes_of(count)
    routes = routes_of(nodes, tables_of({rank: range(1001) for rank in range(count)}, chunks=1001))
    for each in routes.values():
        for node in nodes:
            if chance.random() < 0.3:  # type: ignore[attr-defined]
                each.leave_out(source_of(node), 1.0)
    heirs = {node: routes[node].heirs(chunk) for node in routes if chance.random() < 0.5}  # type: ignore[attr-defined]
    refuse = {node for node, found in heirs.items() if found}
    first: dict[str, str | None] = {}
    for node, each in routes.items():
        asked = [node_at(source) for source in heirs.get(node) or each.sources(chunk)]
        assert node not in asked
        first[node] = next((other for other in asked if other not in refuse), None)
    assert reach_the_store(first)


@pytest.mark.parametrize("count", [2, 5, 20])
def test_one_node_reads_the_store_in_place_of_a_home(count: int):
    """All others ask it after the home, and so does a home that hands the chunk over. It keeps the chunk for them."""
    nodes = nodes_of(count)
    routes = routes_of(nodes, tables_of({rank: range(20) for rank in range(count)}, chunks=20))
    for chunk in range(20):
        asked = {node: [node_at(source) for source in each.sources(chunk)] for node, each in routes.items()}
        home = next(node for node, found in asked.items() if not found)
        heir = node_at(routes[home].heirs(chunk)[0])
        assert asked[heir] == [home]
        for node, found in asked.items():
            if node not in (home, heir) and found[0] == home:
                assert found[1] == heir
                assert [source.in_place for source in routes[node].sources(chunk)] == [False, True]
        assert not routes[heir].may_wait(home, chunk)
        assert routes[heir].may_wait(home, chunk, hands_over=True)
        children = {node for node, found in asked.items() if found[:1] == [home]} - {heir}
        routes[heir].asked_by(home, chunk, 0.0, hands_over=True)
        assert routes[heir].askers(chunk) >= children | {home}
        routes[heir].forget(100.0)
        assert home not in routes[heir].askers(chunk)


@pytest.mark.parametrize("gone", range(7))
def test_what_a_lost_node_would_have_sent_comes_from_the_next_one(gone: int):
    tables = tables_of({rank: range(CHUNKS) for rank in range(7)})
    routes = routes_of(nodes_of(7), tables)
    before = {chunk: first_sources(routes, chunk, list(routes)) for chunk in range(CHUNKS)}
    for each in routes.values():
        each.leave_out(source_of(nodes_of(7)[gone]), 1.0)
    del routes[f"node-{gone}"]
    for chunk in range(CHUNKS):
        first = first_sources(routes, chunk, list(routes))
        assert list(first.values()).count(None) == 1
        for node, source in first.items():
            assert source != f"node-{gone}"
            was_first = before[chunk][node]
            assert source == was_first or was_first == f"node-{gone}"
            if source is not None:
                assert node in routes[source].askers(chunk)
    for each in routes.values():
        each.forget(2.0)
    for chunk in range(CHUNKS):
        assert first_sources(routes, chunk, list(routes)).items() <= before[chunk].items()


def test_nodes_that_failed_are_reported_until_they_are_asked_again(monkeypatch: pytest.MonkeyPatch):
    nodes, lender = nodes_of(7), Peer("10.0.0.2", 1000, "of another load")
    other = OlderLoad("other", b"other key", (NodePeer("older", (0,), lender),))
    members = Members(tuple(nodes), b"key", (other,))
    routes = PeerRoutes(members, "llama", "node-0", tables_of({rank: range(CHUNKS) for rank in range(7)}))
    routes.leave_out(source_of(nodes[3]), 1.0)
    routes.leave_out(source_of(nodes[4]), 5.0)
    routes.leave_out(PeerSource(lender, "other", b"other key"), 5.0)
    assert set(routes.left_out) == {nodes[3].peer, nodes[4].peer, lender}
    routes.forget(2.0)
    assert set(routes.left_out) == {nodes[4].peer, lender}
    monkeypatch.setattr(peer_routes, "MOST_LEFT_OUT", 1)
    assert len(routes.left_out) == 1
    routes.update(replace(members, nodes=tuple(node for node in nodes if node is not nodes[4])))  # it is lost
    assert routes.left_out == (lender,)


def test_nodes_of_a_later_attempt_share_out_what_they_borrow():
    """Two nodes have the model, and three join. One of these asks the old ones, and the others ask it."""
    tables = tables_of({rank: range(CHUNKS) for rank in range(5)})
    nodes = [replace(node, attempt=1 + (at >= 2), filled=at < 2) for at, node in enumerate(nodes_of(5))]
    routes = routes_of(nodes, tables)
    old, new = [node.node_id for node in nodes[:2]], [node.node_id for node in nodes[2:]]
    lent: Counter[str | None] = Counter()
    for chunk in range(CHUNKS):
        first = first_sources(routes, chunk, new)
        (home,) = (node for node, source in first.items() if source in old)
        assert {first[node] for node in new if node != home} == {home}
        assert routes[home].askers(chunk) == {*new} - {home}
        assert all(routes[node].may_wait(home, chunk) for node in old)  # what these have not read yet
        lent[first[home]] += 1
        assert first_sources(routes, chunk, old) in ({old[0]: None, old[1]: old[0]}, {old[1]: None, old[0]: old[1]})
    assert all(lent[node] > 0.4 * CHUNKS for node in old)
    moved = replace(nodes[0], peer=Peer("10.0.0.1", 1000, "restarted"))
    routes[new[0]].update(Members((moved, *nodes[2:]), b"key"))  # and the other old node is lost
    asked = {source.peer for chunk in range(CHUNKS) for source in routes[new[0]].sources(chunk)}
    assert asked - {node.peer for node in nodes[2:]} == {moved.peer}


def test_a_node_that_gets_ranks_of_a_lost_one_shares_out_only_these():
    tables = tables_of({rank: range(CHUNKS) for rank in range(4)})
    nodes = [*nodes_of(2), NodePeer("node-1", (3,), nodes_of(2)[1].peer, 2)]
    members = Members(tuple(nodes), b"key")
    by_attempt = {rank: PeerRoutes(members, "llama", "node-1", tables, (rank,)) for rank in (1, 3)}
    assert {node_at(source) for chunk in range(CHUNKS) for source in by_attempt[1].sources(chunk)} == {"node-0"}
    assert not all(by_attempt[1].sources(chunk) for chunk in range(CHUNKS))  # of half the chunks it is the home
    assert {tuple(by_attempt[3].sources(chunk)) for chunk in range(CHUNKS)} == {(source_of(nodes[0]),)}
    assert not any(by_attempt[3].askers(chunk) for chunk in range(CHUNKS))


@pytest.mark.parametrize("known", [True, False])
def test_only_lenders_that_needed_a_chunk_are_asked_for_it(monkeypatch: pytest.MonkeyPatch, *, known: bool):
    """A fully sharded load on 20 nodes has the model. The tables say which node needed which chunks."""
    if not known:
        monkeypatch.setattr(peer_routes, "MOST_LENT_NEEDS", 0)
    owners, chunks = 20, 20 * 4
    needs = {rank: range(4 * rank, min(chunks, 4 * rank + 5)) for rank in range(owners)}
    older = SimModel(tuple(range(chunks))).shared(needs)
    lenders = tuple(NodePeer(f"old-{at}", (at,), Peer("10.0.0.2", 1000 + at, f"old-{at}")) for at in range(owners))
    own = NodePeer("node-0", (0,), lenders[3].peer)  # it lends to itself nothing
    members = Members((own,), b"key", (OlderLoad("older", b"other key", lenders, older),))
    routes = PeerRoutes(members, "llama", "node-0", tables_of({0: range(chunks)}, chunks))
    assert not routes.alone
    for chunk in range(chunks):
        asked = [source.peer.port - 1000 for source in routes.sources(chunk)]
        having = {at for at in (chunk // 4, chunk // 4 - (chunk % 4 == 0)) if at >= 0 and at != 3}
        assert set(asked) == having if known else len(set(asked) - {3}) == MOST_SOURCES
        assert {(source.load_id, source.key) for source in routes.sources(chunk)} <= {("older", b"other key")}


def test_a_lender_that_keeps_nothing_is_left_out_for_a_while():
    lenders = tuple(NodePeer(f"old-{at}", (0,), Peer("10.0.0.2", 1000 + at, f"old-{at}")) for at in range(2))
    members = Members(tuple(nodes_of(1)), b"key", (OlderLoad("older", b"other key", lenders),))
    routes = PeerRoutes(members, "llama", "node-0", tables_of({0: range(CHUNKS)}))

    def fetch(*had: int) -> set[int]:
        """Fetch a chunk that these lenders have. Return those that were asked."""
        sources = routes.sources(0)
        asked = [source.peer.port - 1000 for source in sources]
        gave = next((at for at, lender in enumerate(asked) if lender in had), -1)
        routes.answered(sources, gave, 0.0)
        return {*asked[: gave + 1], *(asked if gave < 0 else ())}

    for _ in range(MOST_MISSES - 1):
        assert fetch() == {0, 1}
    assert fetch(0) == {0}
    assert fetch() == {0, 1}
    assert all(fetch() == {0} for _ in range(2 * MOST_MISSES))  # it keeps a part
    assert not routes.left_out  # the other one did not fail
    routes.forget(LEFT_OUT_S + 1)
    assert fetch() == {0, 1}
    assert fetch() == {0}
    routes.forget(LEFT_OUT_S + 1)
    assert fetch(1) == {0, 1}
    assert all(fetch() == {0, 1} for _ in range(2 * MOST_MISSES))


def test_a_node_that_is_asked_past_another_keeps_chunks_for_those_behind_it():
    tables = tables_of({rank: range(CHUNKS) for rank in range(20)})
    routes = routes_of(nodes_of(20), tables)
    chunk = 3
    first = first_sources(routes, chunk, list(routes))
    home = next(node for node, source in first.items() if source is None)
    middle = next(iter(routes[home].askers(chunk)))
    behind = routes[middle].askers(chunk)
    asker = next(iter(behind))
    routes[home].asked_by(asker, chunk, 0.0)
    assert routes[home].askers(chunk) >= behind | {middle}
    routes[home].forget(100.0)
    assert not routes[home].askers(chunk) & behind


@pytest.mark.parametrize("count", [4, 40])
def test_homes_and_sending_are_spread_evenly(count: int):
    chunks = 40 * count
    tables = tables_of({rank: range(chunks) for rank in range(count)}, chunks=chunks)
    routes = routes_of(nodes_of(count), tables)
    homes = Counter(node for chunk in range(chunks) for node, each in routes.items() if not each.sources(chunk))
    sent = Counter({node: sum(len(each.askers(chunk)) for chunk in range(chunks)) for node, each in routes.items()})
    assert all(35 <= homes[node] <= 45 for node in routes)  # 40 each
    assert all(0.9 * chunks < sent[node] < 1.1 * chunks for node in routes if count > 4)
    assert sum(sent.values()) == chunks * (count - 1)


def test_with_very_many_different_parts_nodes_form_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_routes, "MOST_NEEDS", 2 * 20)
    tables = tables_of({rank: range(20) for rank in range(6)}, chunks=20)
    routes = routes_of(nodes_of(6), tables)
    for chunk in range(20):
        first = first_sources(routes, chunk, list(routes))
        assert list(first.values()).count(None) == 3
        assert all(source is None or int(source[5:]) // 2 == int(node[5:]) // 2 for node, source in first.items())


def test_a_node_that_is_no_member_any_more_is_asked_for_nothing():
    tables = tables_of({rank: range(CHUNKS) for rank in range(7)})
    nodes = nodes_of(7)
    routes = routes_of(nodes, tables)["node-0"]
    moved = replace(nodes[1], peer=Peer("10.0.0.9", 1001, "restarted"))
    routes.update(Members((nodes[0], moved, *nodes[3:6], replace(nodes[6], peer=None)), b"key"))
    routes.forget(1e9)
    asked = {source.peer for chunk in range(CHUNKS) for source in routes.sources(chunk)}
    assert asked == {moved.peer, *(node.peer for node in nodes[3:6])}
