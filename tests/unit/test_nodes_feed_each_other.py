"""Several nodes load one model, with real agents and ranks over real sockets: the store sends each byte once."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from actors.node import peer_exchange
from actors.node_agent import NodeAgent
from actors.rank import chunk_fetcher
from cluster.messages import Members, NodePeer, OlderLoad
from cluster.planning.packed_plan import pack_shared
from cluster.planning.plan import LoadPlan
from cluster.telemetry.report import NodeReport
from cluster.telemetry.stats import NodeTraffic
from storage.errors import PeerUnavailable
from storage.peers import Asker, Peer, nixl_carrier
from storage.peers.chunk_server import ChunkServer, ServedChunk
from storage.peers.nixl_carrier import NixlReader
from storage.peers.peer_client import PeerClient
from storage.stores.object_store import ByteRange, MemoryStore, ObjectStore
from tests.support.checkpoints import read_objects, write_tiny_llama
from tests.support.fake_nixl import FakeAgent
from tests.support.faulty_stores import WrappedStore
from tests.support.local_node import LocalNode, local_node, plan_of, run_all
from tests.support.ray_clusters import eventually
from tests.support.reference_slices import check_exact

pytestmark = pytest.mark.slow

KEY = b"key of the load"
CHUNK_BYTES = 4096


class Nodes:
    """Nodes of one load, each with the same number of ranks."""

    def __init__(
        self, nodes: Sequence[LocalNode], objects: dict[str, bytes], sizes: tuple[int, int, int], digests: bool
    ) -> None:
        self.nodes, self.objects, self.sizes = nodes, objects, sizes
        self.plan: LoadPlan = plan_of(objects, sizes, CHUNK_BYTES, digests)
        self.store = WrappedStore(MemoryStore(objects))
        each = len(self.plan.ranks) // len(nodes)
        self.ranks_of = [tuple(range(at * each, (at + 1) * each)) for at in range(len(nodes))]
        self.others: dict[int, Peer] = {}  # instead of nodes, what the others take for them
        for node in nodes:
            node.agent.serve_peers("127.0.0.1")

    @property
    def members(self) -> Members:
        return Members(
            tuple(
                NodePeer(f"node-{at}", ranks, self.others.get(at, node.agent.facts().peer))
                for at, (ranks, node) in enumerate(zip(self.ranks_of, self.nodes, strict=True))
            ),
            KEY,
        )

    def load(self, only: Sequence[int] | None = None) -> list[NodeReport]:
        """Run the ranks of `only` these nodes, compare what they have, and return the report of each node."""
        found = []
        for at in range(len(self.nodes)) if only is None else only:
            node, ranks = self.nodes[at], self.ranks_of[at]
            node.begin(self.plan, "llama", ranks, members=self.members)
            found += [(rank, node.rank(self.plan, self.store, "llama", rank)) for rank in ranks]
        run_all([rank for _, rank in found])
        for number, rank in found:
            if isinstance(rank.outcome, BaseException):
                raise rank.outcome
            assert rank.loader.plan.rank == number
        if only is None:
            check_exact([rank for _, rank in found], self.objects, *self.sizes[:2])
        return [node.agent.report("llama") for at, node in enumerate(self.nodes) if only is None or at in only]


@pytest.fixture
def nodes_of(tmp_path: Path) -> Iterator[Any]:
    write_tiny_llama(tmp_path / "llama")
    objects = read_objects(tmp_path / "llama")
    with ExitStack() as stack:

        def make(
            count: int, sizes: tuple[int, int, int], slots: int = 8, *, digests: bool = True, **settings: Any
        ) -> Nodes:
            nodes = []
            for number in range(count):
                (folder := tmp_path / f"node-{number}").mkdir()
                nodes.append(stack.enter_context(local_node(folder, slots, peer_port=0, **settings)))
                nodes[-1].agent._node_id = f"node-{number}"
            return Nodes(nodes, objects, sizes, digests)

        yield make


def touched_bytes(plan: LoadPlan) -> int:
    touched = sorted(set().union(*(rank.chunk_ids.tolist() for rank in plan.ranks)))
    return int(plan.chunks.sizes_bytes()[touched].sum())


def check_read_once(nodes: Nodes, reports: Sequence[NodeReport]) -> None:
    """Check that the store sent each chunk once. On a machine that is busy with something else, patience ends now and
    then, or a chunk is fetched twice to be sure: the reports count that.
    """
    counted = sum(report.hedges + sum(report.retries.values()) for report in reports)
    again_bytes = nodes.store.read_bytes - touched_bytes(nodes.plan)
    assert 0 <= again_bytes <= counted * CHUNK_BYTES
    assert counted < len(nodes.plan.chunks) / 20, [report.retries for report in reports]


LAYOUTS = {
    "replicas": (2, (1, 1, 2)),
    "four replicas": (4, (1, 1, 4)),
    "tensor parallel over nodes": (2, (2, 1, 1)),
    "fully sharded over nodes": (3, (1, 3, 1)),
    "replicas of two ranks": (2, (2, 1, 2)),
}


@pytest.mark.parametrize("slots", [8, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_store_sends_each_byte_once(nodes_of: Any, layout: str, slots: int, monkeypatch: pytest.MonkeyPatch):
    for name in ("BUSY_S", "PATIENCE_S", "PRESSED_PATIENCE_S"):  # a node may get no processor for seconds
        monkeypatch.setattr(peer_exchange, name, 60.0)
    nodes = nodes_of(*LAYOUTS[layout], slots)
    reports = nodes.load()
    check_read_once(nodes, reports)
    for report in reports:
        assert (
            report.store_bytes + report.peer_bytes + report.cached_bytes == report.needed_bytes + report.refetched_bytes
        )


def test_what_a_node_sends_is_limited(nodes_of: Any):
    limit_bytes_per_s = 400_000
    nodes = nodes_of(2, (1, 1, 2), 100, peer_bytes_per_s=limit_bytes_per_s)
    began_s = time.monotonic()
    reports = nodes.load()
    took_s = time.monotonic() - began_s
    sent_bytes = max(report.sent_bytes for report in reports)
    assert sent_bytes > 0
    assert took_s > (sent_bytes - CHUNK_BYTES) / limit_bytes_per_s


@pytest.mark.parametrize("slots", [8, 1000])
def test_chunks_without_digests_travel_with_one_that_their_home_made(nodes_of: Any, slots: int):
    nodes = nodes_of(3, (1, 1, 3), slots, digests=False)
    reports = nodes.load()
    check_read_once(nodes, reports)
    assert all(report.peer_bytes > 0 for report in reports)


class WatchedStore(WrappedStore):
    """Notes what agents say of the load at each read, from the middle of it."""

    def __init__(self, inner: ObjectStore, agents: Sequence[NodeAgent]) -> None:
        super().__init__(inner)
        self.agents = agents
        self.seen: list[list[NodeTraffic]] = [[] for _ in agents]

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        for agent, seen in zip(self.agents, self.seen, strict=True):
            traffic = agent.chunks_now("llama")[2]
            with self.lock:
                seen.append(traffic)
        return super().read_into(key, byte_range, buffer, etag=etag)


def test_bytes_are_counted_by_source_and_sender_during_a_load(nodes_of: Any):
    nodes = nodes_of(2, (1, 1, 2), 8)
    agents = [node.agent for node in nodes.nodes]
    nodes.store = store = WatchedStore(nodes.store.inner, agents)
    reports = nodes.load()
    for agent, report, seen in zip(agents, reports, store.seen, strict=True):
        *_, last = agent.chunks_now("llama")
        known = {source: size for source, size in report.bytes_by_source.items() if source != "unknown"}
        assert last.bytes_by_source == known
        assert last.peer_bytes_from == report.peer_bytes_from == {"127.0.0.1": report.peer_bytes}
        assert last.sent_bytes == report.sent_bytes
        assert any(0 < traffic.bytes_by_source["peer"] < report.peer_bytes for traffic in seen)
        assert any(0 < traffic.sent_bytes < report.sent_bytes for traffic in seen)
        assert all(sum(traffic.peer_bytes_from.values()) == traffic.bytes_by_source["peer"] for traffic in seen)
        (counters,) = agent._ledger.beat("node", "host", "agent", 0.0, ()).counters.values()
        assert (counters.sent_bytes, counters.bytes_by_source["peer"]) == (report.sent_bytes, report.peer_bytes)


def test_nodes_feed_each_other_by_nixl(nodes_of: Any, monkeypatch: pytest.MonkeyPatch):
    reader = NixlReader(FakeAgent)
    monkeypatch.setattr(nixl_carrier, "PROCESS_NIXL", reader)
    monkeypatch.setattr(nixl_carrier, "open_agent", FakeAgent)
    reports = nodes_of(2, (1, 1, 2), peer_carrier="nixl").load()
    assert reader.read_bytes == sum(report.peer_bytes for report in reports) > 0
    assert not any(report.retries for report in reports)


class Rubbish:
    """Serves random bytes for every chunk."""

    def __init__(self, folder: Path, node: str, digest: bytes) -> None:
        self.node, self.digest = node, digest
        self.descriptor = os.open(folder / "rubbish", os.O_RDWR | os.O_CREAT)
        os.write(self.descriptor, os.urandom(CHUNK_BYTES))

    def load_key(self, load_id: str) -> bytes | None:
        return KEY

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> ServedChunk:
        return ServedChunk(self.descriptor, 0, CHUNK_BYTES, self.digest, lambda received: None)


@pytest.mark.parametrize(
    "fault", ["refuses", "hangs", "sends other bytes", "was restarted", "sends other bytes and a digest"]
)
def test_a_node_without_use_is_left_for_the_store(
    nodes_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
):
    """The others take something else for node 1. Node 1 itself reads from node 0 all the same."""
    monkeypatch.setattr(chunk_fetcher, "READ_TIMEOUT_S", 1.0)
    damages = fault.startswith("sends other bytes")
    nodes = nodes_of(2, (1, 1, 2), 100, digests=not fault.endswith("digest"))
    rubbish = Rubbish(tmp_path, "it", os.urandom(16) if fault.endswith("digest") else b"")
    with ExitStack() as stack:
        if damages:
            server = ChunkServer(rubbish, "127.0.0.1", 0)
            stack.callback(server.close)
            nodes.others[1] = Peer("127.0.0.1", server.port, "it")
        elif fault == "was restarted":
            nodes.others[1] = Peer("127.0.0.1", nodes.nodes[1].agent.facts().peer.port, "an earlier one")
        else:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            nodes.others[1] = Peer("127.0.0.1", listening.getsockname()[1], "it")
            if fault == "refuses":
                listening.close()
        first, second = nodes.load()
    os.close(rubbish.descriptor)
    (load,) = nodes.nodes[0].agent._ledger.beat("node", "host", "agent", 0.0, ()).loads
    assert load.left_out == (nodes.others[1],)
    assert set(first.retries) == {"peer_damaged" if damages else "peer_unavailable"}
    assert first.store_bytes == first.needed_bytes
    assert second.peer_bytes + second.store_bytes == second.needed_bytes
    assert second.peer_bytes > 0


def test_a_node_that_ends_in_the_middle_is_left_for_the_store(nodes_of: Any):
    nodes = nodes_of(3, (1, 1, 3), 8)
    server = nodes.nodes[2].agent._chunk_server

    def end() -> None:
        while not server.sent_bytes:
            time.sleep(0.001)
        server.close()

    ending = threading.Thread(target=end)
    ending.start()
    reports = nodes.load()
    ending.join()
    assert sum(report.peer_bytes for report in reports) > 0
    assert any("peer_unavailable" in report.retries for report in reports)
    for report in reports:
        assert report.store_bytes + report.peer_bytes == report.needed_bytes


def test_a_node_serves_only_chunks_of_its_loads_to_their_members(nodes_of: Any):
    """Another load of the same node, and another model in the same arena, have keys of their own."""
    nodes = nodes_of(2, (1, 2, 1), 1000)
    nodes.load()
    agent, plan = nodes.nodes[0].agent, nodes.plan
    other = Members((NodePeer("node-0", (0,), None),), b"other key")
    nodes.nodes[0].begin(plan, "other", nodes.ranks_of[0], members=other)
    needed = {*plan.ranks[0].chunk_ids.tolist()}
    here, foreign = min(needed), min({*range(len(plan.chunks))} - needed, default=len(plan.chunks))
    client, first = PeerClient("node-1"), ByteRange(0, 1)

    def status(chunk: int, key: bytes = KEY, load_id: str = "llama") -> int:
        try:
            client.read(agent.facts().peer, load_id, chunk, key, first, [memoryview(bytearray(1))])
        except PeerUnavailable as error:
            return int(error.details["status"])
        return 206

    assert status(here) == status(here, b"other key", "other") == 206
    assert status(here, b"other key") == status(here, KEY, "other") == status(here, KEY, "none") == 401
    assert status(foreign) == status(len(plan.chunks)) == status(999_999_999) == 404
    agent.end("llama")
    assert status(here) == 404
    client.close()


@pytest.mark.parametrize("kept", [True, False])
def test_a_replica_that_comes_later_fills_from_the_first(nodes_of: Any, tmp_path: Path, kept: bool):
    """It is a load of its own. Without chunks in the first node's arena it reads the store."""
    nodes = nodes_of(2, (1, 1, 2), 1000 if kept else 8)
    nodes.load()
    read_bytes = nodes.store.read_bytes
    older = (OlderLoad("llama", KEY, nodes.members.nodes),)
    (tmp_path / "later").mkdir()
    with local_node(tmp_path / "later", 1000, peer_port=0) as later:
        later.agent._node_id = "later"
        plan = plan_of(nodes.objects, (1, 1, 1), CHUNK_BYTES)
        members = Members((NodePeer("later", (0,), None),), b"another key", older)
        later.begin(plan, "second", members=members)
        rank = later.rank(plan, nodes.store, "second", 0)
        run_all([rank])
        check_exact([rank], nodes.objects, 1, 1)
        report = later.agent.report("second")
    if kept:
        assert nodes.store.read_bytes == read_bytes
        assert report.peer_bytes == report.needed_bytes
        assert report.peer_bytes_from == {"127.0.0.1": report.needed_bytes}
        assert not report.retries
    else:
        assert report.store_bytes + report.peer_bytes == report.needed_bytes
        assert set(report.retries) <= {"peer_without_chunk"}


def test_a_later_load_with_another_layout_asks_the_nodes_that_needed_a_chunk(nodes_of: Any, tmp_path: Path):
    """Each of four nodes keeps its part of a fully sharded model. The later load needs all of it."""
    nodes = nodes_of(4, (1, 4, 1), 1000)
    nodes.load()
    read_bytes = nodes.store.read_bytes
    older = (OlderLoad("llama", KEY, nodes.members.nodes, pack_shared(nodes.plan)),)
    (tmp_path / "later").mkdir()
    with local_node(tmp_path / "later", 1000, peer_port=0) as later:
        later.agent._node_id = "later"
        plan = plan_of(nodes.objects, (1, 1, 1), CHUNK_BYTES)
        later.begin(plan, "second", members=Members((NodePeer("later", (0,), None),), b"another key", older))
        rank = later.rank(plan, nodes.store, "second", 0)
        run_all([rank])
        check_exact([rank], nodes.objects, 1, 1)
        report = later.agent.report("second")
    assert nodes.store.read_bytes == read_bytes
    assert report.peer_bytes == report.needed_bytes
    assert not report.retries  # no node was asked in vain


def test_two_loads_at_one_time_read_the_store_once(nodes_of: Any, tmp_path: Path):
    """The second load has one node more. What the first is about to read, it waits for."""
    nodes = nodes_of(1, (1, 1, 1), 1000)
    first = nodes.nodes[0]
    older = (OlderLoad("llama", KEY, nodes.members.nodes),)
    (tmp_path / "later").mkdir()
    with local_node(tmp_path / "later", 1000, peer_port=0) as later:
        first.begin(nodes.plan, "llama", members=Members((NodePeer("node-0", (0,), first.agent.facts().peer),), KEY))
        later.agent._node_id = "later"
        later.begin(nodes.plan, "second", members=Members((NodePeer("later", (0,), None),), b"another key", older))
        ranks = [node.rank(nodes.plan, nodes.store, load, 0) for node, load in ((first, "llama"), (later, "second"))]
        run_all(ranks)
        for rank in ranks:
            check_exact([rank], nodes.objects, 1, 1)
    assert nodes.store.read_bytes == touched_bytes(nodes.plan)


def test_an_agent_gets_its_port_once_another_program_leaves_it(tmp_path: Path):
    """`doctor` is such a program: it listens for seconds where no agent runs yet."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with local_node(tmp_path, 8, peer_port=port) as node:
            node.agent.serve_peers("127.0.0.1")
            assert node.agent.facts().peer is None
            other.close()
            eventually(lambda: node.agent.facts().peer is not None, "the agent has not tried again")
            assert node.agent.facts().peer.port == port
            socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


@pytest.mark.parametrize("early", [False, True], ids=["after the begin", "before its end"])
def test_others_are_told_where_a_restarted_agent_serves(nodes_of: Any, *, early: bool):
    nodes = nodes_of(2, (1, 1, 2), 100)
    agent, newer = nodes.nodes[0].agent, nodes.members.pack()
    nodes.others[1] = Peer("127.0.0.1", nodes.nodes[1].agent.facts().peer.port, "an earlier one")
    members = nodes.members
    if early:
        agent.update_members("llama", newer)
    for at, node in enumerate(nodes.nodes):
        node.begin(nodes.plan, "llama", nodes.ranks_of[at], members=members)
    nodes.others.clear()
    if not early:
        agent.update_members("llama", newer)
    first, second = nodes.load()
    assert not first.retries
    assert nodes.store.read_bytes == touched_bytes(nodes.plan)
    assert (first.sent_bytes, second.sent_bytes) == (second.peer_bytes, first.peer_bytes)


def test_a_later_replica_gets_what_only_the_disk_has(nodes_of: Any, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    nodes = nodes_of(1, (1, 1, 1), 8, disk_cache_dir=str(tmp_path / "disk"), disk_cache_bytes=1 << 30)
    nodes.load()
    first = nodes.nodes[0].agent
    eventually(lambda: not first._disk.backlog, "the disk is behind")
    read_bytes = nodes.store.read_bytes
    (tmp_path / "later").mkdir()
    with local_node(tmp_path / "later", 1000, peer_port=0) as later:
        later.agent._node_id = "later"
        members = Members((NodePeer("later", (0,), None),), b"", (OlderLoad("llama", KEY, nodes.members.nodes),))
        later.begin(nodes.plan, "second", members=members)
        rank = later.rank(nodes.plan, nodes.store, "second", 0)
        run_all([rank])
        check_exact([rank], nodes.objects, 1, 1)
        report = later.agent.report("second")
    kept = len(list((tmp_path / "disk").rglob("*.chunk")))
    assert kept > 8  # more than the arena has; the disk keeps what it can without delaying the load
    assert report.peer_chunks >= kept
    eventually(lambda: first.report("llama").sent_bytes == report.peer_bytes, "what the disk sent is not counted")
    assert nodes.store.read_bytes - read_bytes == report.store_bytes == report.needed_bytes - report.peer_bytes
