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

Nodes that began before are in no tree. They are *lenders*: those of earlier attempts of the load, where ranks join or
were moved, and those of older loads of the same revision. The home of a chunk asks those that needed it too, before it
reads the store. They never ask the nodes of a later attempt or load. So nodes do not wait in a circle here either.

The circle turns by the golden ratio from chunk to chunk (Knuth, The Art of Computer Programming 3, section 6.4, on
multiplicative hashing). So every node sends about every FAN_OUT-th chunk FAN_OUT times, and never many in a row. With
an order drawn at random for each chunk, nodes would have too much to send at one time and nothing at another: in a
simulation of 256 nodes that took 1.3 times as long.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cluster.messages import Members, NodePeer, PeerSource
from cluster.planning.packed_plan import SharedTables, unpack_shared
from storage.peers import Peer

FAN_OUT = 3
MOST_SOURCES = 3  # nodes that are asked for one chunk, before it comes from the store
MOST_LEFT_OUT = 16  # of the nodes that are left out, so many are reported
LEFT_OUT_S = 30.0  # a node that does not answer is asked again after this time
# Work of one node to find out what the others need: chunks times ranks with different parts; 10^8 take 10 to 20 s. With
# more, as where 1,024 nodes share out a model of 1T parameters, nodes form blocks, and each block reads the store once.
MOST_NEEDS = 100_000_000
# The same for the lenders: 10^7 take 1 to 2 s. What the others may have is unknown, and they are asked for any chunk.
MOST_LENT_NEEDS = 10_000_000
MOST_MISSES = 32  # a lender that had none of so many chunks, the first ones, keeps nothing: it is left out for a while
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


class _Lenders:
    """The nodes of older loads, and of earlier attempts of this one, which may have its chunks."""

    def __init__(self, load_id: str, node_id: str, attempt: int, tables: SharedTables) -> None:
        """`attempt`: of the nodes that this one shares chunks with."""
        self._load_id, self._node_id, self._attempt, self._tables = load_id, node_id, attempt, tables
        self._known: dict[tuple[str, Hashable], NDArray[np.uint8]] = {}  # (load, parts) -> a bit for each chunk
        self._of_load: dict[str, SharedTables | None] = {load_id: tables}
        self._left_needs = MOST_LENT_NEEDS
        self._groups: list[list[PeerSource]] = []  # nodes that may have the same chunks
        self._needs = np.zeros((0, 0), np.uint8)
        self._found: dict[bytes, tuple[PeerSource, ...]] = {}  # by the groups that have a chunk
        self._out: dict[Peer, float] = {}  # nodes that failed, and until when
        self._empty: dict[Peer, float] = {}  # nodes that keep nothing, and until when they are left out
        self._misses: Counter[Peer] = Counter()  # of nodes that have given nothing yet
        self._given: set[Peer] = set()  # nodes that had a chunk
        self.peers: frozenset[Peer] = frozenset()

    def use(self, members: Members) -> None:
        """Take over which nodes there are."""
        own = next((node.peer for node in members.nodes if node.node_id == self._node_id), None)
        earlier = [node for node in members.nodes if node.attempt < self._attempt]
        groups: dict[tuple[str, Hashable], dict[PeerSource, None]] = {}
        for load_id, key, nodes, packed in (
            (self._load_id, members.key, earlier, b""),
            *((each.load_id, each.key, each.nodes, each.tables) for each in members.older),
        ):
            if load_id not in self._of_load:
                self._of_load[load_id] = self._unpacked(packed)
            for node in nodes:
                if node.peer is not None and node.peer != own:
                    where = load_id, self._parts(load_id, node.ranks)
                    groups.setdefault(where, {})[PeerSource(node.peer, load_id, key)] = None
        self._groups = [list(sources) for sources in groups.values()]
        self._needs = np.array([self._known[where] for where in groups], np.uint8)
        self._found.clear()
        self.peers = frozenset(source.peer for sources in self._groups for source in sources)

    def _unpacked(self, packed: bytes) -> SharedTables | None:
        """Return the tables of an older load; None: they are unknown, or have other chunks."""
        tables = unpack_shared(packed) if packed else None
        return tables if tables is not None and len(tables.chunks) == len(self._tables.chunks) else None

    def _parts(self, load_id: str, ranks: Sequence[int]) -> Hashable:
        """Return a value that is equal for nodes of the load which may have the same chunks, once these are known."""
        tables, chunks = self._of_load[load_id], len(self._tables.chunks)
        parts = None if tables is None else tables.parts(ranks)
        if (load_id, parts) not in self._known and tables is not None and self._left_needs >= chunks * len(ranks):
            self._left_needs -= chunks * len(ranks)
            self._known[load_id, parts] = _needed(tables, ranks)
        elif (load_id, parts) not in self._known:
            parts = None
            self._known[load_id, parts] = np.full(-(-chunks // 8), 255, np.uint8)
        return parts

    def sources(self, chunk: int) -> list[PeerSource]:
        """Return nodes that may have the chunk, to be asked in this order."""
        if not self._groups:
            return []
        key = np.packbits((self._needs[:, chunk >> 3] >> (7 - (chunk & 7))) & 1).tobytes()
        lenders = self._found.get(key)
        if lenders is None:
            bits = np.unpackbits(np.frombuffer(key, np.uint8), count=len(self._groups))
            having = itertools.chain.from_iterable(self._groups[at] for at in np.flatnonzero(bits))
            if len(self._found) >= _KEPT_ORDERS:
                self._found.clear()
            lenders = self._found[key] = tuple(having)
        turned = (lenders[(chunk + at) % len(lenders)] for at in range(len(lenders)))
        asked = (source for source in turned if source.peer not in self._out and source.peer not in self._empty)
        return list(itertools.islice(asked, MOST_SOURCES))

    def answered(self, sources: Sequence[PeerSource], gave: int, now_s: float) -> None:
        """Note that of these nodes the one at `gave` had a chunk, and none before it. -1: it came from the store."""
        if 0 <= gave < len(sources):
            self._given.add(sources[gave].peer)
        self._misses.update(source.peer for source in (sources[:gave] if gave >= 0 else sources))
        for peer in (source.peer for source in sources if source.peer not in self._given):
            if self._misses[peer] >= MOST_MISSES:
                self._empty[peer] = now_s + LEFT_OUT_S

    def leave_out(self, peer: Peer, until_s: float) -> None:
        """Ask this node for nothing until then, if it is one of them."""
        if peer in self.peers:
            self._out[peer] = until_s

    @property
    def left_out(self) -> Iterable[Peer]:
        """The nodes that failed."""
        return self._out.keys()

    def forget(self, now_s: float) -> None:
        """Ask again the nodes whose time is over."""
        self._out = {peer: until_s for peer, until_s in self._out.items() if until_s >= now_s}
        self._empty = {peer: until_s for peer, until_s in self._empty.items() if until_s >= now_s}


class PeerRoutes:
    """The ways of one load's chunks between its nodes, as one of them sees them."""

    def __init__(
        self, members: Members, load_id: str, node_id: str, tables: SharedTables, ranks: Collection[int] = ()
    ) -> None:
        """
        Args:
            node_id: This node's.
            ranks: Those that begin here now. They say with which nodes this one shares chunks, if it has others too.
        """
        own = [node for node in members.nodes if node.node_id == node_id]
        attempt = max(own, key=lambda node: (not {*ranks}.isdisjoint(node.ranks), node.attempt)).attempt if own else 1
        self._lenders = _Lenders(load_id, node_id, attempt, tables)
        self._lenders.use(members)
        groups = _groups([node for node in members.nodes if node.attempt == attempt], node_id, tables)
        nodes = sorted(itertools.chain(*groups), key=lambda node: (node.peer is None, _hash(node.node_id)))
        self._nodes = nodes
        self._key, self._load_id = members.key, load_id
        self.filled = {node.node_id for node in nodes if node.filled}
        self._index = {node.node_id: at for at, node in enumerate(nodes)}
        self._own = self._index.get(node_id, -1)
        self._serving = sum(node.peer is not None for node in nodes)
        self._group = np.zeros(len(nodes), np.int64)  # of each node
        self._needs = np.zeros((len(groups), -(-len(tables.chunks) // 8)), np.uint8)  # a bit for each chunk
        for number, group in enumerate(groups):
            self._group[[self._index[node.node_id] for node in group]] = number
            self._needs[number] = _needed(tables, group[0].ranks)
        self._orders: dict[bytes, _Order] = {}
        self._found: dict[int, tuple[_Order, int, int | None]] = {}  # by chunk; each is looked for some ten times
        self._left_out: dict[int, float] = {}  # nodes that did not answer this one, and until when
        self._bypassed: dict[int, float] = {}  # nodes that others left out, and until when
        self._handing_over: dict[int, float] = {}  # nodes that asked this one instead of the store, and until when
        self._hands_nothing: set[int] = set()  # nodes that are left out, and read their own chunks from the store

    @property
    def alone(self) -> bool:
        """True when there is no other node to read from."""
        return len(self._nodes) < 2 and not self._lenders.peers

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
        return named or self._lenders.sources(chunk)

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

    def answered(self, sources: Sequence[PeerSource], gave: int, now_s: float) -> None:
        """Note that of these nodes the one at `gave` had a chunk, and none before it. -1: it came from the store."""
        if sources and sources[0].peer in self._lenders.peers and self.node_at(sources[0].peer) == "":
            self._lenders.answered(sources, gave, now_s)

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
            slow = {node for node, until_s in self._left_out.items() if until_s < math.inf} - self._hands_nothing
            slow |= self._handing_over.keys()
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
        self._lenders.leave_out(source.peer, until_s)
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
        failed = itertools.chain((peer for peer in for_a_while if peer is not None), self._lenders.left_out)
        return tuple(itertools.islice(failed, MOST_LEFT_OUT))

    def update(self, members: Members) -> None:
        """Take over where nodes serve chunks now: an agent was restarted, or a node is lost and no member any more."""
        self._lenders.use(members)
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

    def did_not_ask(self, node_id: str, chunk: int) -> None:
        """Note that another node did not ask for a chunk in time. One before this one has read it from the store."""
        order, turn, own = self._find(chunk)
        place = order.place(self._index[node_id], turn)
        if own is not None and place is not None and place < own:
            self._hands_nothing.add(self._index[node_id])

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
        self._hands_nothing &= self._left_out.keys()
        over = self._handing_over
        self._handing_over = {node: until_s for node, until_s in over.items() if until_s >= now_s}
        self._lenders.forget(now_s)

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


def _needed(tables: SharedTables, ranks: Iterable[int]) -> NDArray[np.uint8]:
    """Return a bit for each chunk: whether one of the ranks touches it."""
    needed = np.zeros(len(tables.chunks), bool)
    for rank in ranks:
        needed[tables.chunk_ids(rank)] = True
    return np.packbits(needed)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
