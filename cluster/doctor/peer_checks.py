"""Checks that nodes reach each other where they serve chunks (`LONGSHORE_PEER_PORT`). Functions that judge are pure.

check_peers --NodeActors--> PeerProbe on each node: listens where no agent does, then connects to other nodes
            --what they found--> judge_ports, judge_reach --> Check

Without a listener a refused connection proves little, because many firewalls refuse as well. So where no agent has the
port, the probe listens there while the others connect.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cluster.doctor.host_checks import Check, name_of
from cluster.joining.node_tasks import Node, NodeActors, why_no_answer
from storage.errors import StoreError
from storage.peers import Asker, NoChunk
from storage.peers.chunk_server import ChunkServer
from storage.peers.peer_client import serves_chunks
from storage.stores.requests import host_and_port

MOST_TARGETS = 15  # nodes that one node connects to
SHOWN = 5  # nodes that a check names, and checks of single nodes
CONNECT_S = 3.0
START_S = 60.0  # an actor starts a Python process
CALL_S = 20.0
INSTEAD = "from the store instead"


@dataclass(frozen=True, slots=True)
class PeerNode:
    """A node, and the place where it serves chunks by its settings."""

    name: str
    host: str
    port: int  # 0: any, -1: it serves none

    def __str__(self) -> str:
        return host_and_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class PortState:
    """The port of a node while it is checked."""

    port: int  # where a chunk server listens
    problem: str = ""  # why none listens; empty: one does


class NoChunks:
    """A `ChunkShelf` without chunks. A server of it answers every request as an agent answers a stranger's."""

    node = ""

    def load_key(self, load_id: str) -> None:
        """See `ChunkShelf`."""

    def take(self, load_id: str, chunk: int, asker: Asker, wait_s: float) -> NoChunk:
        """See `ChunkShelf`."""
        return NoChunk.MISSING


class PeerProbe:
    """Listens for other nodes and connects to them. An actor on each node."""

    def __init__(self) -> None:
        self._server: ChunkServer | None = None

    def start(self) -> None:
        """Return when the actor's process runs."""

    def listen(self, host: str, port: int) -> PortState:
        """Serve no chunks at this address until `close`, unless a chunk server is there already."""
        try:
            self._server = ChunkServer(NoChunks(), host, port)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                return PortState(port, error.message)
            if reach_problem(host, port):
                return PortState(port, f"another program has port {port}: it does not answer as Longshore does")
            return PortState(port)
        return PortState(self._server.port)

    def reach(self, targets: Sequence[tuple[str, int]]) -> list[str]:
        """Return for each address why it cannot be reached, or an empty text."""
        with ThreadPoolExecutor(max(1, len(targets))) as threads:
            return list(threads.map(lambda target: reach_problem(*target), targets))

    def close(self) -> None:
        """Free the port. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None


def reach_problem(host: str, port: int, timeout_s: float = CONNECT_S) -> str:
    """Return why no chunk server can be reached at this address, or an empty text."""
    try:
        answers = serves_chunks(host, port, timeout_s)
    except TimeoutError:
        return f"no connection in {timeout_s:g} s, as with a firewall that drops packets"
    except ConnectionRefusedError:
        return "connection refused, as with a firewall that rejects it"
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    return "" if answers else "what answers does not answer as Longshore"


def check_peers(ray: Any, nodes: Sequence[tuple[Node, int]]) -> Iterator[Check]:
    """Return the checks of nodes that serve each other chunks. `nodes`: each with its port by its settings."""
    if not nodes:
        return
    described = [PeerNode(name_of(node), node["NodeManagerAddress"], port) for node, port in nodes]
    serving, checks = choose_serving(described)
    yield from checks
    if len(serving) < 2:
        return
    peers, asked = [described[at] for at in serving], [nodes[at][0] for at in serving]
    states, reached, silent = probe_peers(ray, peers, asked)
    yield from (Check(f"peers {peers[at].name}", "warn", f"not checked: {why}") for at, why in silent.items())
    yield from judge_ports(peers, states)
    yield from judge_reach(peers, states, reached)


def probe_peers(
    ray: Any, peers: Sequence[PeerNode], nodes: Sequence[Node]
) -> tuple[dict[int, PortState], dict[tuple[int, int], str], dict[int, str]]:
    """Let nodes connect to each other. Ports are taken for as long as this lasts, some seconds at most.

    Returns:
        The state of each port; why one node does not reach another, or an empty text, by (asker, target); why a node
        gave no answer. Nodes are named by their places in `peers`.
    """
    place_of = {node["NodeID"]: at for at, node in enumerate(nodes)}
    silent: dict[int, str] = {}

    with NodeActors(ray, nodes, PeerProbe) as probes:

        def ask(method: str, arguments: Mapping[int, tuple[Any, ...]], timeout_s: float) -> dict[int, Any]:
            answers = {}
            asked = [(nodes[at], given) for at, given in arguments.items()]
            for node, answer in probes.call(method, asked, timeout_s):
                at = place_of[node["NodeID"]]
                if isinstance(answer, BaseException):
                    silent[at] = why_no_answer(answer)
                else:
                    answers[at] = answer
            return answers

        # All processes run before the first takes its port, so that ports are taken for a short time.
        started = ask("start", dict.fromkeys(range(len(nodes)), ()), START_S)
        states = ask("listen", {at: (peers[at].host, peers[at].port) for at in started}, CALL_S)
        rows = choose_targets(len(nodes))
        targets = {at: [to for to in rows[at] if to in states and not states[to].problem] for at in states}
        places = {at: ([(peers[to].host, states[to].port) for to in row],) for at, row in targets.items() if row}
        reached = {
            (at, to): problem
            for at, problems in ask("reach", places, CALL_S).items()
            for to, problem in zip(targets[at], problems, strict=True)
        }
        ask("close", dict.fromkeys(states, ()), CALL_S)
    return states, reached, silent


def choose_serving(nodes: Sequence[PeerNode]) -> tuple[list[int], list[Check]]:
    """Return the places of the nodes that can serve chunks, and checks about the others."""
    if all(node.port < 0 for node in nodes):
        detail = "nodes do not feed each other, because LONGSHORE_PEER_PORT is -1: each reads its chunks from the store"
        return [], [Check("peers", "skip", detail)]
    chosen: dict[tuple[str, int], int] = {}
    checks = []
    for at, node in enumerate(nodes):
        first = chosen.setdefault((node.host, node.port or -at), at) if node.port >= 0 else None
        if first == at:
            continue
        if first is None:
            detail, hint = "LONGSHORE_PEER_PORT is -1 there", "set it to the same port on all nodes"
        else:
            detail = f"{nodes[first].name} has the same address and LONGSHORE_PEER_PORT ({node})"
            hint = "start nodes of one host with LONGSHORE_PEER_PORT=0, or each with a port of its own"
        checks.append(Check(f"peers {node.name}", "warn", f"{detail}; others read its chunks {INSTEAD}", hint))
    if len(chosen) == 1:
        checks.append(Check("peers", "skip", f"{nodes[next(iter(chosen.values()))].name} has no other node to feed"))
    return list(chosen.values()), checks


def choose_targets(count: int, most: int = MOST_TARGETS) -> list[tuple[int, ...]]:
    """Return the nodes that each of `count` nodes connects to, as places in their list.

    Each connects to all others if they are at most `most`. Else each takes as many, at the same distances, which are
    spread over the list. So each node also is the target of as many.
    """
    tries = min(count - 1, most)
    distances = [1 + step * (count - 1) // tries for step in range(tries)]
    return [tuple((at + distance) % count for distance in distances) for at in range(count)]


def judge_ports(peers: Sequence[PeerNode], states: Mapping[int, PortState]) -> Iterator[Check]:
    """Return checks of the nodes where no chunk server can listen."""
    for at, state in states.items():
        if state.problem:
            detail = f"{state.problem}; other nodes read this node's chunks {INSTEAD}"
            hint = "free the port, or set LONGSHORE_PEER_PORT to another one, the same on all nodes"
            yield Check(f"peers {peers[at].name}", "warn", detail, hint)


def judge_reach(
    peers: Sequence[PeerNode], states: Mapping[int, PortState], reached: Mapping[tuple[int, int], str]
) -> Iterator[Check]:
    """Return a check of each node that does not reach another, or one check that all do."""
    if not reached:
        return
    ports = sorted({peers[to].port for _, to in reached})
    what = "free TCP ports" if 0 in ports else f"TCP port {' and '.join(map(str, ports))}"
    missed: dict[int, list[str]] = {}
    for (at, to), problem in reached.items():
        if problem:
            place = host_and_port(peers[to].host, states[to].port)
            missed.setdefault(at, []).append(f"{peers[to].name} at {place} ({problem})")
    hint = f"open {what} between the nodes of the cluster"
    if 0 in ports:
        hint = "set LONGSHORE_PEER_PORT to one port, and open that TCP port between the nodes of the cluster"
    for at, texts in islice(missed.items(), SHOWN):
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        detail = f"does not reach {', '.join(texts[:SHOWN])}{more}; it reads their chunks {INSTEAD}"
        yield Check(f"peers {peers[at].name}", "warn", detail, hint)
    tried = f"{len(reached)} connections between {len({at for pair in reached for at in pair})} nodes"
    if len(peers) - 1 > MOST_TARGETS:
        tried += f" (each node tried {MOST_TARGETS} others)"
    if not missed:
        yield Check("peers", "ok", f"{tried} at {what}")
    elif len(missed) > SHOWN:
        failed = sum(map(len, missed.values()))
        yield Check("peers", "warn", f"{failed} of {tried} failed; {SHOWN} nodes are above", hint)
