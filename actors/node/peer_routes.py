"""Decides from which other node a node of a load reads a chunk. Pure.

The nodes that need a chunk form a tree. Every node computes the same trees from the same list of nodes, so nobody has
to say them:

    order of the nodes that need chunk c:   n4 n1 n6 n0 n2 n3 n5      a circle of all nodes, turned by c
    n4 is its home and reads the store      |  +--+--+                 order[i] reads from order[(i - 1) // FAN_OUT]
                                            +-----+  n1 n6 n0 read from n4, and n2 n3 n5 from n1

A node that does not answer is left out. What it would have sent comes from the next node on the way to the home. When
none is left there, the first node in the order reads the store in place of the home. A node asks only nodes before it
in the order, whatever it takes for left out. So nodes never wait for each other in a circle.

A home whose store alone is slow hands its chunks over: it refuses them to all others, and asks its *heirs*, the nodes
after it in the order. The first of them reads the store in its place, as if it did not answer. Nobody waits for a chunk
at the node that has handed it over. So there is no circle either.

Nodes that serve nothing come last in the order, and nobody reads from them.

The circle turns by the golden ratio from chunk to chunk (Knuth, The Art of Computer Programming 3, section 6.4, on
multiplicative hashing). So every node sends about every FAN_OUT-th chunk FAN_OUT times, and never many in a row. With
an order drawn at random for each chunk, nodes would have too much to send at one time and nothing at another: in a
simulation of 256 nodes that took 1.3 times as long.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cluster.messages import Members, NodePeer, PeerSource
from cluster.planning.packed_plan import SharedTables
from storage.peers import Peer

FAN_OUT = 3
MOST_SOURCES = 3  # nodes that are asked for one chunk, before it comes from the store
MOST_LEFT_OUT = 16  # of the nodes that are left out, so many are reported
LEFT_OUT_S = 30.0  # a node that does not answer is asked again after this time
# Work of one node to find out what the others need: chunks times ranks with different parts; 10^8 take 10 to 20 s. With
# more, as where 1,024 nodes share out a model of 1T parameters, nodes form blocks, and each block reads the store once.
MOST_NEEDS = 100_000_000
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_KEPT_ORDERS = 512


class _Order:
    """The nodes that need a chunk: those that serve, then those that do not. As indexes into the list of all nodes."""

    def __init__(self, needing: NDArray[np.int64], serving: int) -> None:
        """`serving`: number of the nodes that serve, which come first in the list of all."""
        self._needing = needing
        self.serving = int(np.searchsorted(needing, serving))

    def turn(self, chunk: int) -> int:
        """Return by how many places the order of that chunk is turned."""
        return ((chunk + 1) * _GOLDEN % (1 << 64) * self.serving) >> 64

    def place(self, node: int, turn: int) -> int | None:
        """Return the node's place in the order; None if it does not need the chunk."""
        at = int(np.searchsorted(self._needing, node))
        if at == len(self._needing) or int(self._needing[at]) != node:
            return None
        return (at - turn) % self.serving if at < self.serving else at

    def node(self, place: int, turn: int) -> int:
        """Return the node at that place."""
        return int(self._needing[(place + turn) % self.serving if place < self.serving else place])

    def before(self, place: int) -> Iterator[int]:
        """Iterate over the places from which a node at that place may read, the nearest first, the home at the end."""
        if place >= self.serving > 0:
            place %= self.serving
            yield place
        while 0 < place < self.serving:
            place = (place - 1) // FAN_OUT
            yield place

    def after(self, place: int) -> Iterator[int]:
        """Iterate over the places of the nodes that read from a node at that place."""
        if place < self.serving:
            yield from range(FAN_OUT * place + 1, min(self.serving, FAN_OUT * place + FAN_OUT + 1))
            yield from range(place + self.serving, len(self._needing), self.serving)


class PeerRoutes:
    """The ways of one load's chunks between its nodes, as one of them sees them."""

    def __init__(self, members: Members, load_id: str, node_id: str, tables: SharedTables) -> None:
        """`node_id`: this node's."""
        groups = _groups(members.nodes, node_id, tables)
        nodes = sorted(itertools.chain(*groups), key=lambda node: (node.peer is None, _hash(node.node_id)))
        self._nodes = nodes
        self._key, self._load_id = members.key, load_id
        own = next((node.peer for node in members.nodes if node.node_id == node_id), None)
        self._lenders = tuple(lender for lender in members.lenders if lender.peer != own)
        self._index = {node.node_id: at for at, node in enumerate(nodes)}
        self._own = self._index.get(node_id, -1)
        self._serving = sum(node.peer is not None for node in nodes)
        self._group = np.zeros(len(nodes), np.int64)  # of each node
        self._needs = np.zeros((len(groups), -(-len(tables.chunks) // 8)), np.uint8)  # a bit for each chunk
        for number, group in enumerate(groups):
            self._group[[self._index[node.node_id] for node in group]] = number
            needed = np.zeros(len(tables.chunks), bool)
            for rank in group[0].ranks:
                needed[tables.chunk_ids(rank)] = True
            self._needs[number] = np.packbits(needed)
        self._orders: dict[bytes, _Order] = {}
        self._found: dict[int, tuple[_Order, int, int | None]] = {}  # by chunk; each is looked for some ten times
        self._left_out: dict[int, float] = {}  # nodes that did not answer this one, and until when
        self._lenders_out: dict[Peer, float] = {}  # the same of lenders
        self._bypassed: dict[int, float] = {}  # nodes that others left out, and until when
        self._handing_over: dict[int, float] = {}  # nodes that asked this one instead of the store, and until when

    @property
    def alone(self) -> bool:
        """True when there is no other node to read from."""
        return len(self._nodes) < 2 and not self._lenders

    @property
    def hops(self) -> int:
        """Number of hops from a chunk's home to the last node of its tree, if all nodes need it."""
        return hops(self._serving)

    def sources(self, chunk: int) -> list[PeerSource]:
        """Return the nodes to ask for the chunk, in this order; none: this node reads the store.

        After the nodes on the way to the home comes the one that reads the store if all of them fail.
        """
        order, turn, place = self._find(chunk)
        if place is None:
            return []
        found = [at for at in order.before(place) if order.node(at, turn) not in self._left_out][:MOST_SOURCES]
        before = range(min(place, order.serving))
        next_home = (at for at in before if at not in found and order.node(at, turn) not in self._left_out)
        named = self._named(order, turn, [*found, *itertools.islice(next_home, 1)])
        named[len(found) :] = [replace(source, in_place=bool(found)) for source in named[len(found) :]]
        return named or self._borrow(chunk)

    def heirs(self, chunk: int) -> list[PeerSource]:
        """Return the nodes to ask, in this order, if this node is to read the store and hands the chunk over."""
        order, turn, place = self._find(chunk)
        if place is None or any(order.node(at, turn) not in self._left_out for at in range(min(place, order.serving))):
            return []
        after = range(place + 1, order.serving)
        return self._named(order, turn, [at for at in after if order.node(at, turn) not in self._left_out])

    def _named(self, order: _Order, turn: int, places: Sequence[int]) -> list[PeerSource]:
        """Return the nodes at the first of these places."""
        peers = (self._nodes[order.node(at, turn)].peer for at in places[:MOST_SOURCES])
        return [PeerSource(peer, self._load_id, self._key) for peer in peers if peer is not None]

    def _borrow(self, chunk: int) -> list[PeerSource]:
        """Return nodes of other loads that may have the chunk. Only its home asks them, as it would ask the store."""
        lenders = [lender for lender in self._lenders if lender.peer not in self._lenders_out]
        return [lenders[(chunk + at) % len(lenders)] for at in range(min(len(lenders), MOST_SOURCES))]

    def askers(self, chunk: int) -> set[str]:
        """Return the ids of the nodes that will read the chunk from this one, if all goes well."""
        order, turn, own = self._find(chunk)
        if own is None or own >= order.serving:
            return set()
        skipped = self._left_out.keys() | self._bypassed.keys() | self._handing_over.keys()
        to_see = list(order.after(own))
        handed_over: list[int] = []  # nodes that ask this one instead of the store, or that may soon
        if skipped and all(order.node(at, turn) in skipped for at in range(own)):  # this node is in place of the home
            to_see += [after for at in range(own) for after in order.after(at) if after != own]
            slow = {node for node, until_s in self._left_out.items() if until_s < math.inf} | self._handing_over.keys()
            handed_over = [order.node(at, turn) for at in range(own) if order.node(at, turn) in slow]
        found: set[int] = set()
        while to_see:
            if (at := to_see.pop()) in found:
                continue
            found.add(at)
            if order.node(at, turn) in skipped:
                to_see += order.after(at)
        after = [order.node(at, turn) for at in found if at > own]
        return {self._nodes[node].node_id for node in (*after, *handed_over)}

    def leave_out(self, source: PeerSource, until_s: float) -> None:
        """Ask this node for nothing until then."""
        if any(lender.peer == source.peer for lender in self._lenders):
            self._lenders_out[source.peer] = until_s
        for at, node in enumerate(self._nodes):
            if node.peer == source.peer:
                self._left_out[at] = until_s

    def node_at(self, peer: Peer) -> str:
        """Return the id of the node of the load that serves chunks there. Empty: it is of another load."""
        return next((node.node_id for node in self._nodes if node.peer == peer), "")

    @property
    def reachable(self) -> set[str]:
        """Ids of the nodes that are not left out."""
        return {node.node_id for at, node in enumerate(self._nodes) if at not in self._left_out}

    @property
    def leaves_out_many(self) -> bool:
        """True when so many nodes are left out that slow ones are better than none."""
        return len(self._left_out) > max(1, len(self._nodes) // 8)

    @property
    def left_out(self) -> tuple[Peer, ...]:
        """The first of the nodes that failed and are asked for nothing for a while, at most MOST_LEFT_OUT.

        Nodes that the coordinator knows to be lost are not among them.
        """
        for_a_while = (self._nodes[at].peer for at, until_s in self._left_out.items() if until_s < math.inf)
        failed = itertools.chain((peer for peer in for_a_while if peer is not None), self._lenders_out)
        return tuple(itertools.islice(failed, MOST_LEFT_OUT))

    def update(self, members: Members) -> None:
        """Take over where nodes serve chunks now: an agent was restarted, or a node is lost and no member any more."""
        now = {node.node_id: node.peer for node in members.nodes}
        for at, node in enumerate(self._nodes[: self._serving]):
            peer = now.get(node.node_id)
            if peer is None:
                self._left_out[at] = math.inf
            elif peer != node.peer:
                self._nodes[at] = replace(node, peer=peer)
                self._left_out.pop(at, None)

    def asked_by(self, node_id: str, chunk: int, now_s: float, *, hands_over: bool = False) -> None:
        """Another node asks for the chunk. If others would have it for that node, then it leaves them out.

        `hands_over`: that node is to read the store, and this one does it instead.
        """
        order, turn, own = self._find(chunk)
        asker = self._index.get(node_id, -1)
        place = order.place(asker, turn)
        if place is None or own is None:
            return
        if hands_over:
            self._handing_over[asker] = now_s + LEFT_OUT_S
            return
        for at in order.before(place):
            if at == own:
                return
            self._bypassed[order.node(at, turn)] = now_s + LEFT_OUT_S

    def is_member(self, node_id: str) -> bool:
        """Return whether the other node takes part in the load since it began."""
        return node_id in self._index

    def may_wait(self, node_id: str, chunk: int, *, hands_over: bool = False) -> bool:
        """Return whether another node may wait here for the chunk: it comes after this one, or `hands_over` the chunk.

        Nobody here waits for a node that is not among these. It came later, or belongs to a later load.
        """
        order, turn, own = self._find(chunk)
        if own is None or node_id not in self._index:
            return own is not None
        place = order.place(self._index[node_id], turn)
        return place is not None and (own < place or hands_over)

    def forget(self, now_s: float) -> None:
        """Ask again the nodes whose time is over."""
        self._left_out = {node: until_s for node, until_s in self._left_out.items() if until_s >= now_s}
        self._bypassed = {node: until_s for node, until_s in self._bypassed.items() if until_s >= now_s}
        over = self._handing_over
        self._handing_over = {node: until_s for node, until_s in over.items() if until_s >= now_s}
        self._lenders_out = {peer: until_s for peer, until_s in self._lenders_out.items() if until_s >= now_s}

    def _find(self, chunk: int) -> tuple[_Order, int, int | None]:
        """Return the chunk's order, its turn, and this node's place in it."""
        if (found := self._found.get(chunk)) is not None:
            return found
        if len(self._found) >= _KEPT_ORDERS:
            self._found.clear()
        needs = (self._needs[:, chunk >> 3] >> (7 - (chunk & 7))) & 1
        key = np.packbits(needs).tobytes()
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= _KEPT_ORDERS:
                self._orders.clear()
            order = self._orders[key] = _Order(np.flatnonzero(needs[self._group]), self._serving)
        turn = order.turn(chunk)
        found = self._found[chunk] = order, turn, order.place(self._own, turn)
        return found


def hops(nodes: int) -> int:
    """Return the number of hops from the first to the last node of a tree of so many nodes."""
    found, place = 0, nodes - 1
    while place > 0:
        found, place = found + 1, (place - 1) // FAN_OUT
    return found


def _groups(nodes: Sequence[NodePeer], node_id: str, tables: SharedTables) -> list[list[NodePeer]]:
    """Return the nodes with which this one shares chunks. Those that hold the same parts of the model are a group."""
    groups: dict[Hashable, list[NodePeer]] = {}
    for node in nodes:
        if node.ranks:
            groups.setdefault(tables.parts(node.ranks), []).append(node)
    found = list(groups.values())
    if not found:
        return []
    most = max(1, MOST_NEEDS // max(1, len(tables.chunks) * max(len(group[0].ranks) for group in found)))
    own = next((at for at, group in enumerate(found) if any(node.node_id == node_id for node in group)), 0)
    first = own - own % most
    return found[first : first + most]


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
