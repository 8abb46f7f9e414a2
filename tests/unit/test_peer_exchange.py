"""A node's share in the exchange of chunks: when it says that it is too slow, and who may wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import pytest

from actors.node.chunk_flow import ChunkKeys
from actors.node.peer_exchange import (
    BEGIN_PATIENCE_S,
    BUSY_S,
    CATCH_UP,
    FALLS_BACK,
    LONG_LINE,
    MOST_PATIENCE_S,
    PATIENCE_S,
    PAUSE,
    SLOW_S,
    PeerExchange,
)
from actors.node.peer_routes import PeerRoutes
from bench.sim_node import Rates
from bench.sim_peers import Cluster, ReplicaTables
from cluster.messages import Commit, Members, NodePeer, PeerSource, credited
from cluster.scheduling.concurrency import KNOWN_S, LEAST_SLOW_S, MOST_ASKED, PeerPatience, SlowStore
from cluster.scheduling.lease_queue import LeaseQueue
from storage.arena.chunk_cache import ChunkCache
from storage.arena.slots import CachedChunk
from storage.host.processes import ProcessId
from storage.peers import Asker, NoChunk, Peer

CHUNKS, CHUNK_BYTES, NODES = 600, 1024, 4
PART = ("load", 1)
RANK, AGENT = ProcessId(1, 1), ProcessId(2, 2)
AS_FAR = Asker("node-1", 1.0)  # as far as node 0 at its begin
HALF_DONE = Asker("node-1", 0.5)


class Node:
    """Node 0 of a load on four nodes, each of which needs everything."""

    def __init__(self, filled: int = 0) -> None:
        """So many of the others were complete before this one began."""
        tables = ReplicaTables.of_size(CHUNKS, CHUNK_BYTES)
        nodes = tuple(
            NodePeer(f"node-{at}", (at,), Peer("10.0.0.1", 1, f"{at}"), filled=0 < at <= filled) for at in range(NODES)
        )
        self.cache = ChunkCache(CHUNKS)
        self.queue = LeaseQueue({0: tables.chunk_ids(0)})
        self.keys = ChunkKeys(tables, "store", "load")
        self.routes = routes = PeerRoutes(Members(nodes, b"key"), "load", "node-0", tables)
        self.exchange = PeerExchange(routes, PART, self.cache, self.keys, self.queue, needs_digest=False)
        self.missing = iter(range(CHUNKS))
        # chunks that node 1 reads from here
        self.for_others = [chunk for chunk in range(CHUNKS) if "node-1" in routes.askers(chunk)]
        self.here: set[int] = set()

    def get(self, count: int, peer: int = 0) -> None:
        """So many chunks come, in the order of the plan, from the first of the nodes to ask, or (-1) from the store."""
        for _ in range(count):
            chunk = next(self.missing)
            lease = self.cache.lease(self.keys[chunk], RANK, 60.0, owner=PART)
            assert lease is not None
            self.queue.leased(chunk, 0)
            self.exchange.leased(lease.lease_id, chunk, from_peers=True)
            self.cache.commit(lease.lease_id, CHUNK_BYTES, [("rank", chunk)])
            cached = self.cache.lookup(self.keys[chunk])
            assert cached is not None
            self.queue.committed(chunk)
            self.exchange.committed(Commit(lease.lease_id, chunk, peer=peer), cached, 0.0)
            self.queue.placed(0, chunk)
            self.here.add(chunk)

    def get_from_others(self, count: int) -> None:
        """So many chunks come of which this node is not the home."""
        while count:
            count -= bool(self.routes.sources(next(copy(self.missing))))
            self.get(1)

    def take(self, chunk: int, asker: Asker = AS_FAR, now_s: float = 0.0) -> CachedChunk | NoChunk:
        return self.exchange.take(chunk, AGENT, f"peer-{chunk}", asker, now_s)

    def to_come(self) -> int:
        """Return a chunk that node 1 reads from here, and that is far from coming."""
        return self.for_others[-1]


@pytest.mark.parametrize("filled", [NODES - 1, 1])
def test_a_restarted_agent_keeps_nothing_for_nodes_that_have_all(filled: int) -> None:
    node = Node(filled)
    node.get(20)
    left = {asker for kept in node.exchange._kept.values() for asker in kept.left}
    assert left == {f"node-{at}" for at in range(filled + 1, NODES)}
    node.take(node.to_come())  # unless one of them was restarted too
    node.get(20)
    assert "node-1" in {asker for kept in node.exchange._kept.values() for asker in kept.left}


@pytest.fixture
def node() -> Iterator[Node]:
    return Node()


def line_up(node: Node) -> list[tuple[int, CachedChunk]]:
    """A long line of requests, none of which is sent yet."""
    node.get(4 * LONG_LINE)
    held = []
    for chunk in sorted(node.here & set(node.for_others))[:LONG_LINE]:
        found = node.take(chunk)
        assert isinstance(found, CachedChunk)
        held.append((chunk, found))
    assert len(held) == LONG_LINE
    return held


def test_a_node_that_gets_more_than_it_sends_says_that_it_is_slow(node: Node) -> None:
    line_up(node)
    assert node.take(node.to_come()) is NoChunk.COMING
    node.get_from_others(2 * LONG_LINE - 1)
    assert node.take(node.to_come()) is NoChunk.COMING
    node.get_from_others(1)
    assert node.take(node.to_come(), now_s=BUSY_S - 0.1) is NoChunk.COMING
    assert node.take(node.to_come(), now_s=BUSY_S) is NoChunk.TOO_SLOW
    assert node.take(node.to_come(), Asker("node-1"), BUSY_S) is NoChunk.COMING  # who asks nobody else
    assert node.take(node.to_come(), Asker("other"), SLOW_S - 1) is not NoChunk.TOO_SLOW  # of a later load


def test_a_node_that_sends_as_much_as_it_gets_is_not_slow_however_long_the_line(node: Node) -> None:
    held = line_up(node)
    for chunk in (chunk for chunk in node.for_others if chunk >= 4 * LONG_LINE):
        while chunk not in node.here:
            node.get(1)
        given, cached = held.pop(0)
        node.exchange.given(given, cached, AGENT, f"peer-{given}", "node-1", received=True)
        found = node.take(chunk)
        assert isinstance(found, CachedChunk)
        held.append((chunk, found))
        if chunk > CHUNKS - 20:
            break


def test_a_node_is_not_slow_for_ever(node: Node) -> None:
    held = line_up(node)
    assert node.take(node.to_come()) is NoChunk.COMING
    node.get_from_others(2 * LONG_LINE)
    assert node.take(node.to_come(), now_s=BUSY_S) is NoChunk.TOO_SLOW
    for chunk, cached in held:
        node.exchange.given(chunk, cached, AGENT, f"peer-{chunk}", "node-1", received=True)
    assert node.take(node.to_come(), now_s=BUSY_S + SLOW_S - 0.1) is NoChunk.TOO_SLOW
    assert node.take(node.to_come(), now_s=BUSY_S + SLOW_S) is NoChunk.COMING


def test_a_node_that_stays_far_behind_says_that_it_is_slow(node: Node) -> None:
    assert node.take(node.to_come(), HALF_DONE) is NoChunk.COMING  # it may only have begun later
    for _ in range(CATCH_UP - 1):
        node.get(1)
        assert node.take(node.to_come(), HALF_DONE) is NoChunk.COMING
    node.get(1)
    assert node.take(node.to_come(), Asker("node-1")) is NoChunk.COMING
    assert node.take(node.to_come(), HALF_DONE, BUSY_S - 0.1) is NoChunk.COMING  # its machine may be busy
    assert node.take(node.to_come(), HALF_DONE, BUSY_S) is NoChunk.TOO_SLOW


def test_a_node_that_catches_up_is_waited_for(node: Node) -> None:
    for _ in range(3):
        assert node.take(node.to_come(), HALF_DONE) is NoChunk.COMING
        node.get(PAUSE)  # and nobody who is far ahead waits
    assert node.take(node.to_come(), Asker("node-1", 1 - 3 * PAUSE / CHUNKS)) is NoChunk.COMING
    node.get(CATCH_UP)
    assert node.take(node.to_come(), HALF_DONE, 2 * BUSY_S) is NoChunk.COMING  # the count begins anew


def test_a_node_that_falls_back_says_that_it_is_slow_and_each_time_for_longer(node: Node) -> None:
    assert node.take(node.to_come(), HALF_DONE) is NoChunk.COMING
    ahead = [Asker("node-2", 0.5 - chunks / CHUNKS) for chunks in (FALLS_BACK - 1, FALLS_BACK)]
    to_come = max(chunk for chunk in range(CHUNKS) if "node-2" in node.routes.askers(chunk))
    assert node.take(to_come, ahead[1], BUSY_S - 0.1) is NoChunk.COMING
    assert [node.take(to_come, asker, BUSY_S) for asker in ahead] == [NoChunk.COMING, NoChunk.TOO_SLOW]  # whoever
    once_s, twice_s = BUSY_S + SLOW_S, BUSY_S + 3 * SLOW_S
    assert node.take(node.to_come(), now_s=once_s - 0.1) is NoChunk.TOO_SLOW  # who has waited goes on elsewhere, too
    assert node.take(node.to_come(), now_s=once_s) is NoChunk.COMING
    assert node.take(node.to_come(), HALF_DONE, once_s) is NoChunk.TOO_SLOW  # it has not caught up since
    assert node.take(node.to_come(), now_s=twice_s - 0.1) is NoChunk.TOO_SLOW
    assert node.take(node.to_come(), now_s=twice_s) is NoChunk.COMING


def test_a_home_whose_store_alone_is_slow_hands_its_chunks_over(node: Node) -> None:
    exchange, asker = node.exchange, Asker("node-1", 1.0, slow_store_s=15.0)
    chunk = next(chunk for chunk in node.for_others if not node.routes.sources(chunk))
    node.queue.leased(chunk, 0)
    assert exchange.leased("first", chunk, from_peers=True) == ((), True, False)
    exchange.slow_store.reported(0, 14.0)
    assert node.take(chunk, asker) is NoChunk.COMING
    assert exchange.reads_store(chunk)
    assert not exchange.hands_over("first")
    exchange.slow_store.reported(0, 16.0)
    assert exchange.hands_over("first")
    assert node.take(chunk, asker) is NoChunk.COMING  # until the lease is back
    node.queue.requeue(chunk, None, "")
    assert exchange.forget(())
    assert node.take(chunk, asker) is NoChunk.TOO_SLOW
    node.queue.leased(chunk, 0)
    heirs, feeds, hands_over = exchange.leased("second", chunk, from_peers=True)
    assert (list(heirs), feeds, hands_over) == (node.routes.heirs(chunk), False, True)
    assert chunk in exchange.take_news()  # those that wait here are refused
    exchange.slow_store.reported(0, None)
    assert node.take(chunk, asker) is NoChunk.TOO_SLOW  # as long as this node waits for others
    node.queue.requeue(chunk, None, "")
    exchange.forget(())
    assert node.take(chunk, asker) is NoChunk.COMING


def test_leases_that_brought_nothing_are_forgotten() -> None:
    rates = Rates(nic_bytes_s=1e9, store_bytes_s=1e9, latency_s=20.0, arena_slots=64, threads=16)
    cluster = Cluster(ReplicaTables.of_size(40, CHUNK_BYTES), rates, [(1.0, 1.0)] * 4, 60.0)
    cluster.run(1000.0)  # leases are returned every 20 s
    for each in cluster.nodes:
        each.tick()
        (load,) = each.ledger._parts("load")
        assert isinstance(load.peers, PeerExchange)
        assert not load.peers._leases


def test_a_rank_remembers_a_bounded_number_of_chunks_that_it_asked_for() -> None:
    patience = PeerPatience()
    for chunk in range(2 * MOST_ASKED):
        patience.asked(chunk, "node", float(chunk))
    assert len(patience._asked) == MOST_ASKED
    last = 2 * MOST_ASKED - 1
    assert patience.waits_on(last, "node", "peer_late", last + 1.0)
    assert not patience.waits_on(0, "node", "peer_late", last + 1.0)


def test_a_store_is_slow_only_beside_a_faster_one() -> None:
    slow, fast = PeerPatience(), PeerPatience()
    for number in range(4):
        fast.reads_store(f"{number}", 0.0)
        slow.reads_store(f"{number}", 0.0)
    assert fast.slow_store_s(10.0) is None  # nothing has come
    for number in range(3):
        fast.ended(f"{number}", number, 2.0, came=True)
    store = SlowStore()
    store.heard("node-1", fast.slow_store_s(2.0))
    for now_s, is_slow in ((2.0, False), (LEAST_SLOW_S, False), (LEAST_SLOW_S + 1, True)):
        store.reported(0, slow.store_s(now_s))
        assert store.is_slow == is_slow
    store.reported(1, 2.0)  # another rank of the node
    assert not store.is_slow
    store.reported(1, None)
    slow.ended("0", 0, 20.0, came=False)  # it was taken back, and would have taken longer
    for number in range(1, 4):
        slow.ended(f"{number}", number, 20.0, came=False)
    assert slow.store_s(21.0) == 20.0
    assert slow.store_s(20.0 + KNOWN_S) is None
    assert PeerPatience().slow_store_s(0.0) is None


def test_a_home_that_is_left_out_is_waited_for_once(node: Node) -> None:
    """It might hand its chunks over to this node. When it did not come for one, it reads them from the store."""
    (home,) = next(found for chunk in range(CHUNKS) if len(found := node.routes.sources(chunk)) == 1)
    out = node.routes.node_at(home.peer)
    node.routes.leave_out(home, 1000.0)
    of_home = [chunk for chunk in range(100, CHUNKS) if not node.routes.may_wait(out, chunk)]
    assert any(out in node.routes.askers(chunk) for chunk in of_home)
    node.get(100)
    node.exchange.look(PATIENCE_S + 0.1)
    assert not any(out in node.routes.askers(chunk) for chunk in of_home)
    node.routes.asked_by(out, of_home[0], PATIENCE_S + 0.1, hands_over=True)
    assert any(out in node.routes.askers(chunk) for chunk in of_home)


def test_a_node_that_has_not_begun_is_waited_for_longer(node: Node) -> None:
    """Node 1 asks for one chunk and then for none. The others have not begun."""
    node.get(8, peer=-1)
    first = min(node.here & set(node.for_others))
    found = node.take(first)
    assert isinstance(found, CachedChunk)
    node.exchange.given(first, found, AGENT, f"peer-{first}", "node-1", received=True)
    node.exchange.look(MOST_PATIENCE_S - 0.1)
    kept = {chunk: set(each.left) for chunk, each in node.exchange._kept.items()}
    assert kept
    assert not any("node-1" in left for left in kept.values())
    node.exchange.look(BEGIN_PATIENCE_S + 0.1)
    assert not node.exchange._kept


def test_bytes_of_a_chunk_count_for_the_nodes_that_sent_them() -> None:
    sources = [PeerSource(Peer(f"10.0.0.{at}", 1, ""), "load", b"") for at in range(3)]
    assert credited(Commit("lease", 1, peer=2, came=((0, 300), (1, 0))), sources, 1000) == {
        "10.0.0.0": 300,
        "10.0.0.1": 0,
        "10.0.0.2": 700,
    }
    assert credited(Commit("lease", 1, peer=1, came=((0, 5000), (7, 1))), sources, 1000)["10.0.0.0"] == 1000
    assert not credited(Commit("lease", 1, came=((0, 300),)), sources, 1000)  # the store sent the rest
