"""Which node of a load reads a chunk from the store, for all nodes that need it. Pure.

Every needed chunk has a *home* among the nodes that need it. Every node computes the same homes from the same list of
nodes, so nobody has to say them. The home reads the store, and the others read the home.

    home(chunk) = the node with the highest score(node, chunk) among those that need the chunk

This is rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): homes are
spread evenly, and when a node leaves only the chunks whose home it was get another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.messages import NodePeer
from cluster.planning.packed_plan import SharedTables

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def scores(seeds: NDArray[np.uint64], chunk: int) -> NDArray[np.uint64]:
    """Return the score of each node, given by its seed, for the chunk: its state mixed as by SplitMix64's finalizer."""
    mixed = seeds + np.uint64((chunk + 1) * _GOLDEN % (1 << 64))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return found


def seed_of(node_id: str) -> int:
    """Return the number that stands for a node in scores."""
    return int.from_bytes(hashlib.blake2b(node_id.encode(), digest_size=8).digest(), "little")


class PeerHomes:
    """The homes of one load's chunks, as one of its nodes sees them."""

    def __init__(self, nodes: Sequence[NodePeer], node_id: str, tables: SharedTables) -> None:
        """`node_id`: this node's. Only nodes that serve chunks can be homes."""
        self._nodes = [node for node in nodes if node.peer is not None and node.ranks]
        self._own = next((at for at, node in enumerate(self._nodes) if node.node_id == node_id), None)
        self._seeds = np.array([seed_of(node.node_id) for node in self._nodes], np.uint64)
        self._homes: dict[int, NodePeer | None] = {}  # of chunks that were asked for
        self._needs = np.zeros((len(self._nodes), len(tables.chunks)), bool)
        known: dict[Hashable, NDArray[np.bool_]] = {}  # nodes with the same parts of the model need the same
        for at, node in enumerate(self._nodes):
            parts = tables.parts(node.ranks)
            if parts not in known:
                for rank in node.ranks:
                    self._needs[at][tables.chunk_ids(rank)] = True
                known[parts] = self._needs[at]
            self._needs[at] = known[parts]

    def home(self, chunk: int) -> NodePeer | None:
        """Return the chunk's home, if this node needs the chunk. None: this node reads the store."""
        if chunk not in self._homes:
            self._homes[chunk] = self._find_home(chunk)
        return self._homes[chunk]

    def _find_home(self, chunk: int) -> NodePeer | None:
        needing = np.flatnonzero(self._needs[:, chunk])
        if not len(needing) or (self._own is not None and not self._needs[self._own, chunk]):
            return None
        # Two equal scores of 64 bits: the first of them, on every node.
        at = int(needing[np.argmax(scores(self._seeds[needing], chunk))])
        return None if at == self._own else self._nodes[at]

    def askers(self, chunk: int) -> set[str]:
        """Return the ids of the nodes that will read the chunk from this one, if all goes well."""
        if self._own is None or not self._needs[self._own, chunk] or self.home(chunk) is not None:
            return set()
        own = self._nodes[self._own].node_id
        return {self._nodes[at].node_id for at in np.flatnonzero(self._needs[:, chunk]).tolist()} - {own}
