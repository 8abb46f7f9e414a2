"""`longshore doctor` on nodes that serve each other chunks: who tries whom, what is said, and real sockets."""

from __future__ import annotations

import http.server
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

from cluster.doctor import peer_checks
from cluster.doctor.host_checks import Check
from cluster.doctor.peer_checks import MOST_TARGETS, SHOWN, NoChunks, PeerNode, PeerProbe, PortState
from storage.peers.chunk_server import ChunkServer
from storage.peers.peer_client import serves_chunks
from tests.support.checkpoints import write_tiny_llama
from tests.support.free_ports import free_ports
from tests.support.head_cluster import HEAD_IP, WORKER_IP, HeadCluster, said
from tests.support.http_servers import serving

Node = dict[str, Any]
LOCAL = "127.0.0.1"


def peers_of(count: int, port: int = 9465) -> list[PeerNode]:
    return [PeerNode(f"n{at}", f"10.0.0.{at}", port) for at in range(count)]


# who connects to whom


@pytest.mark.parametrize("count", [0, 1, 2, 3, 15, 16, 17, 18, 31, 32, 40, 1000])
def test_each_node_tries_and_is_tried_equally_often(count: int) -> None:
    rows = peer_checks.choose_targets(count)
    tries = min(max(0, count - 1), MOST_TARGETS)
    assert [len(set(row)) for row in rows] == [len(row) for row in rows] == [tries] * count
    assert all(at not in row for at, row in enumerate(rows))
    assert set(Counter(to for row in rows for to in row).values()) <= {tries}
    assert rows == peer_checks.choose_targets(count)


def test_a_sample_has_near_and_distant_nodes() -> None:
    distances = peer_checks.choose_targets(1000)[0]
    assert max(distances) - min(distances) > 900
    assert distances[0] == 1


# sentences


def test_nodes_that_feed_nobody_are_not_checked() -> None:
    assert list(peer_checks.check_peers(None, [])) == []
    (check,) = peer_checks.check_peers(None, [(node_at("127.0.0.2"), -1), (node_at("127.0.0.3"), -1)])
    assert (check.name, check.outcome) == ("peers", "skip")
    assert check.detail.startswith("nodes do not feed each other, because LONGSHORE_PEER_PORT is -1")


def test_a_single_node_is_not_checked() -> None:
    serving, (check,) = peer_checks.choose_serving(peers_of(1))
    assert (serving, check.outcome, check.detail) == ([0], "skip", "n0 has no other node to feed")


def test_a_node_that_serves_nothing_is_named() -> None:
    off = PeerNode("off", "10.0.0.9", -1)
    serving, (check,) = peer_checks.choose_serving([*peers_of(2), off])
    assert serving == [0, 1]
    assert check == Check(
        "peers off",
        "warn",
        "LONGSHORE_PEER_PORT is -1 there; others read its chunks from the store instead",
        "set it to the same port on all nodes",
    )


def test_nodes_of_one_address_cannot_have_one_port() -> None:
    one, other = PeerNode("one", LOCAL, 9465), PeerNode("other", LOCAL, 9465)
    serving, (check, alone) = peer_checks.choose_serving([one, other])
    assert serving == [0]
    assert (check.name, check.outcome) == ("peers other", "warn")
    assert "one has the same address and LONGSHORE_PEER_PORT (127.0.0.1:9465)" in check.detail
    assert alone.outcome == "skip"
    for port in (0, 9466):
        assert peer_checks.choose_serving([PeerNode("one", LOCAL, port), other]) == ([0, 1], [])
    assert peer_checks.choose_serving([PeerNode(name, LOCAL, 0) for name in "abc"]) == ([0, 1, 2], [])


def test_a_taken_port_is_reported() -> None:
    states = {0: PortState(9465), 1: PortState(9465, "another program has port 9465")}
    (check,) = peer_checks.judge_ports(peers_of(2), states)
    assert (check.name, check.outcome) == ("peers n1", "warn")
    assert check.detail == "another program has port 9465; other nodes read this node's chunks from the store instead"
    assert "free the port" in check.hint


def judged(peers: Sequence[PeerNode], problem: Callable[[int, int], str]) -> list[Check]:
    rows = peer_checks.choose_targets(len(peers))
    reached = {(at, to): problem(at, to) for at, row in enumerate(rows) for to in row}
    states = {at: PortState(node.port or 41000 + at) for at, node in enumerate(peers)}
    return list(peer_checks.judge_reach(peers, states, reached))


def test_nodes_that_all_reach_each_other_are_one_check() -> None:
    assert judged(peers_of(3), lambda *_: "") == [
        Check("peers", "ok", "6 connections between 3 nodes at TCP port 9465")
    ]
    assert judged(peers_of(40), lambda *_: "") == [
        Check("peers", "ok", "600 connections between 40 nodes (each node tried 15 others) at TCP port 9465")
    ]
    assert judged(peers_of(1), lambda *_: "") == []


def test_a_failed_pair_names_both_nodes_and_the_remedy() -> None:
    assert judged(peers_of(3), lambda at, to: "connection refused" if (at, to) == (0, 2) else "") == [
        Check(
            "peers n0",
            "warn",
            "does not reach n2 at 10.0.0.2:9465 (connection refused); it reads their chunks from the store instead",
            "open TCP port 9465 between the nodes of the cluster",
        )
    ]


def test_many_failed_pairs_are_counted() -> None:
    *some, every = judged(peers_of(16), lambda *_: "dropped")
    assert [check.name for check in some] == [f"peers n{at}" for at in range(SHOWN)]
    assert all(check.detail.count("dropped") == SHOWN and " and 10 more; it reads" in check.detail for check in some)
    assert every.detail == "240 of 240 connections between 16 nodes failed; 5 nodes are above"
    assert {check.outcome for check in (*some, every)} == {"warn"}


def test_a_firewall_needs_one_port_to_open() -> None:
    (check,) = judged(peers_of(2, port=0), lambda at, to: "dropped" if at else "")
    assert "n0 at 10.0.0.0:41000" in check.detail
    assert check.hint.startswith("set LONGSHORE_PEER_PORT to one port, and open that TCP port")
    (every,) = judged(peers_of(2, port=0), lambda *_: "")
    assert every.detail == "2 connections between 2 nodes at free TCP ports"


# sockets


@pytest.fixture
def agent() -> Iterator[ChunkServer]:
    """The server of an agent that takes part in no load."""
    with closing(ChunkServer(NoChunks(), LOCAL, 0)) as server:
        yield server


@pytest.fixture
def foreign() -> Iterator[int]:
    """Yield the port of another program's HTTP server."""
    with serving(http.server.BaseHTTPRequestHandler) as server:
        yield server.server_address[1]


def test_an_agent_is_told_from_everything_else(agent: ChunkServer, foreign: int) -> None:
    assert peer_checks.reach_problem(LOCAL, agent.port) == ""
    assert peer_checks.reach_problem(LOCAL, foreign) == "what answers does not answer as Longshore"
    (free,) = free_ports(1)
    assert peer_checks.reach_problem(LOCAL, free).startswith("connection refused")
    with socket.create_server((LOCAL, 0)) as silent:
        port = silent.getsockname()[1]
        assert peer_checks.reach_problem(LOCAL, port, 0.2) == "what answers does not answer as Longshore"


def test_dropped_packets_are_told_from_a_refusal() -> None:
    with socket.create_server((LOCAL, 0), backlog=0) as full:  # the kernel drops what does not fit into its queue
        port = full.getsockname()[1]
        with socket.create_connection((LOCAL, port)):
            assert peer_checks.reach_problem(LOCAL, port, 0.3).startswith("no connection in 0.3 s")


def test_a_probe_listens_where_no_agent_does(agent: ChunkServer, foreign: int) -> None:
    probe = PeerProbe()
    (free,) = free_ports(1)
    with closing(probe):
        assert probe.listen(LOCAL, free) == PortState(free)
        assert probe.reach([(LOCAL, free), (LOCAL, agent.port), (LOCAL, foreign)])[:2] == ["", ""]
    assert probe.reach([(LOCAL, free)])[0].startswith("connection refused")
    assert probe.reach([]) == []
    assert PeerProbe().listen(LOCAL, agent.port) == PortState(agent.port)
    assert PeerProbe().listen(LOCAL, foreign).problem.startswith(f"another program has port {foreign}:")
    assert "Cannot assign requested address" in PeerProbe().listen("192.0.2.1", free).problem


def node_at(address: str) -> Node:
    return {"NodeID": f"{address}-0123456789", "NodeManagerHostname": f"host-{address}", "NodeManagerAddress": address}


class ActorsHere:
    """The actors of `NodeActors` as objects of this process. That of `silent` does not answer."""

    silent = ""

    def __init__(self, ray: Any, nodes: Iterable[Node], actor_class: Callable[[], Any]) -> None:
        self.actors = {node["NodeID"]: actor_class() for node in nodes}

    def call(
        self, method: str, asked: Iterable[tuple[Node, tuple[Any, ...]]], timeout_s: float
    ) -> Iterator[tuple[Node, Any]]:
        for node, arguments in asked:
            if node["NodeManagerAddress"] == self.silent:
                yield node, TimeoutError(f"no answer in {timeout_s:.0f} s")
            else:
                yield node, getattr(self.actors[node["NodeID"]], method)(*arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Three nodes with addresses of their own."""
    monkeypatch.setattr(peer_checks, "NodeActors", ActorsHere)
    return [node_at(f"127.0.0.{number}") for number in (2, 3, 4)]


def test_nodes_try_each_other_over_sockets(three: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    nodes = [(node, port) for node in three]
    with closing(ChunkServer(NoChunks(), "127.0.0.3", port)):  # an agent is there
        assert [check.outcome for check in peer_checks.check_peers(None, nodes)] == ["ok"]
        assert serves_chunks("127.0.0.3", port, 1.0)
    with socket.socket() as other_program:
        other_program.bind(("127.0.0.3", port))
        taken, rest = peer_checks.check_peers(None, nodes)
    assert (taken.name, taken.outcome) == ("peers host-127.0.0.3 127.0.0.", "warn")
    assert rest == Check("peers", "ok", f"4 connections between 3 nodes at TCP port {port}")
    monkeypatch.setattr(ActorsHere, "silent", "127.0.0.4")
    silent, rest = peer_checks.check_peers(None, nodes)
    assert (silent.outcome, silent.detail) == ("warn", "not checked: no answer in 60 s")
    assert "2 connections between 2 nodes" in rest.detail
    with pytest.raises(ConnectionRefusedError):
        serves_chunks("127.0.0.2", port, 1.0)


# a real cluster

DOCTOR = """
import json
import cluster
from cluster.doctor.doctor import check_cluster

def checked():
    print("checks", json.dumps([check.as_dict() for check in check_cluster(None)]), flush=True)

checked()
input()
checked()
input()
with cluster.load(sys.argv[1], tensor_parallel_size=2, device="cpu"):
    checked()
    input()
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_nodes_of_a_real_cluster_try_each_other(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    write_tiny_llama(tmp_path / "llama")
    settings = {"PEER_PORT": port, "ARENA_BYTES": "48MiB", "CPU_RANKS_PER_NODE": 1, "ALLOWED_SCHEMES": "any"}
    with HeadCluster(**{f"LONGSHORE_{name}": str(value) for name, value in settings.items()}) as there:
        client = there.client(DOCTOR, str(tmp_path / "llama"))

        def found() -> list[Check]:
            checks = [Check(**check) for check in json.loads(said(client, "checks"))]
            return [check for check in checks if check.name.startswith("peers")]

        def go_on() -> None:
            assert client.stdin is not None
            print(file=client.stdin, flush=True)

        all_well = [Check("peers", "ok", f"2 connections between 2 nodes at TCP port {port}")]
        assert found() == all_well  # no agent runs yet
        with socket.create_server((WORKER_IP, port)):
            go_on()
            taken, rest = found()
        assert taken.detail.startswith(f"another program has port {port}:")
        assert rest.detail.startswith("1 connections between 2 nodes")
        go_on()
        assert found() == all_well
        assert [serves_chunks(address, port, 5.0) for address in (HEAD_IP, WORKER_IP)] == [True, True]  # the agents
        go_on()
        assert client.wait(120) == 0
