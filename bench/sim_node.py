"""One node in simulated time: the project's own ledger, queue, cache and ranks.

NodeLedger (real, on a ChunkCache without memory) <-- RankHello, RankUpdate (real messages) -- SimRank
SimRank: a real RankState; requests, one copy at a time to its device
StoreRank: its requests go to the store (bench.sim_flows); those between nodes are in bench.sim_peers
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.node.node_ledger import NodeLedger
from actors.rank.state import FetchedChunk, Next, RankIdentity, RankState
from bench.huge_model import node_job
from bench.sim_flows import Clock, Network, NodeLink, WorkerFlows
from cluster.messages import Commit, JoinReply, LeaseOrder, Orders, RankUpdate
from cluster.planning.packed_plan import pack_shared
from cluster.planning.plan import LoadPlan
from cluster.planning.read_items import expand_read_items
from storage.arena.chunk_cache import ChunkCache
from storage.host.processes import ProcessId

PLACE_BATCH = 8  # as in actors.rank.executor
LOAD = "load"
GB = 1e9


@dataclass(frozen=True)
class Rates:
    """The stated rates, in bytes and seconds, and the sizes of a node."""

    nic_bytes_s: float = 12.5 * GB  # of a node: 100 Gbit/s
    store_bytes_s: float = 1000 * GB  # all connections together
    connection_bytes_s: float = 0.1 * GB  # of one
    worker_bytes_s: float = 2 * GB  # a worker process takes in and verifies
    pcie_bytes_s: float = 25 * GB  # of each device
    latency_s: float = 0.03  # of a request, to its first byte
    peer_latency_s: float = 0.0002  # of a request to another node, to its first byte
    exchange_s: float = 0.001  # a message of a rank to its agent, and the answer
    heartbeat_s: float = 1.0
    threads: int = 32  # requests at once, per rank
    arena_slots: int = 1024
    slow_worker: float = 1.0  # times that the first worker is slower


class SimAgent:
    """A node's agent, and its ranks."""

    def __init__(self, clock: Clock, rates: Rates, sizes: list[int], slot_bytes: int) -> None:
        """`sizes`: bytes of each chunk of the model."""
        self.clock = clock
        self.rates = rates
        self.sizes = sizes
        self.ledger = NodeLedger(ChunkCache(rates.arena_slots), slot_bytes, chance=random.Random(0))
        self.ranks: Sequence[SimRank] = ()
        self.finished_s = 0.0

    @property
    def complete(self) -> bool:
        return all(rank.left for rank in self.ranks)

    def notify(self) -> None:
        """Let ranks that wait for orders ask again after a change, as threads in the agent do."""
        for rank in self.ranks:
            rank.poll()


class SimNode(SimAgent):
    """Simulates `copies` equal nodes with these ranks of the plan."""

    def __init__(
        self,
        network: Network,
        plan: LoadPlan,
        ranks: Mapping[int, dict[int, int]],
        rates: Rates,
        slot_bytes: int,
        copies: int = 1,
    ) -> None:
        """`ranks`: rank of the plan -> chunk -> bytes that it copies (see `place_bytes`)."""
        super().__init__(network, rates, plan.chunks.sizes_bytes().tolist(), slot_bytes)
        self.copies = copies
        self.link = NodeLink(rates.nic_bytes_s, copies)
        network.nodes.append(self.link)
        self.ranks = [
            StoreRank(self, rank, network, self._flows(index), places)
            for index, (rank, places) in enumerate(ranks.items())
        ]
        self._job = node_job(pack_shared(plan), tuple(ranks))

    def _flows(self, index: int) -> WorkerFlows:
        flows = WorkerFlows(self.link, self.rates.worker_bytes_s / (1 if index else self.rates.slow_worker))
        self.link.workers.append(flows)
        return flows

    def begin(self) -> None:
        """Give the agent its job, then let the ranks join."""
        self.ledger.begin(self._job, 0.0)
        for rank in self.ranks:
            rank.join()


class SimRank:
    """A rank: the real `RankState`, with its requests, copies and messages as events of the clock."""

    def __init__(self, node: SimAgent, rank: int, chunk_place_bytes: dict[int, int]) -> None:
        self.node, self.rank = node, rank
        self.left = False  # it has everything and has reported it
        self.fetched_bytes = 0  # from the store
        rates = node.rates
        self.state = RankState(
            RankIdentity(LOAD, 1, rank, 0, ProcessId(rank + 1, 1)),
            len(chunk_place_bytes),
            rates.threads,
            itertools.count(1),
            heartbeat_s=rates.heartbeat_s,
            requests=rates.threads,
        )
        self._place_bytes = chunk_place_bytes
        self._talking = False  # a message is on its way to the agent, or waits there for orders
        self._waits_with: RankUpdate | None = None
        self._wakes_s = math.inf

    @property
    def placed_bytes(self) -> int:
        return self.state.placed_bytes

    def join(self) -> None:
        node, hello = self.node, self.state.hello()
        known = node.ledger.join(hello, node.clock.now_s) is True
        reply = JoinReply("", known=known, batch=node.ledger.batch(hello))
        self.state.welcomed(hello, reply, node.clock.now_s)
        self._act()

    def poll(self) -> None:
        """Take the orders for a message that waits at the agent."""
        if self._waits_with is None:
            return
        update = self._waits_with
        orders = self.node.ledger.orders_for(update, self.node.clock.now_s)
        if orders is not None:
            self._waits_with = None
            self._obey(update, orders)

    def _act(self) -> None:
        """Start the requests, the copy and the message that may start now."""
        state, clock, now_s = self.state, self.node.clock, self.node.clock.now_s
        while (lease := state.next_lease(now_s)) is not None:
            self._fetch(lease)
        if not state.copying and (chunks := state.next_chunks(PLACE_BATCH, now_s)):
            sizes_bytes = {chunk: self._place_bytes[chunk] for chunk, _ in chunks}
            copy_s = sum(sizes_bytes.values()) / self.node.rates.pcie_bytes_s
            clock.after(copy_s, lambda: self._copied(sizes_bytes))
        if state.finished and not state.draining:
            state.drain(now_s, finish=True)
        if self._talking or self.left:
            return
        due_s = state.update_due_s
        if due_s <= now_s:
            self._send()
        elif due_s < self._wakes_s:
            self._wakes_s = due_s
            clock.at(due_s, self._wake)

    def _wake(self) -> None:
        self._wakes_s = math.inf
        self._act()

    # -- messages ----------------------------------------------------------------------------------------------

    def _send(self) -> None:
        self._talking = True
        leaving = self.state.finished and self.state.drained
        self.state.store_takes(self._store_s())
        update = self.state.update(self.node.clock.now_s, leaving=leaving)
        self.node.clock.after(self.node.rates.exchange_s, lambda: self._arrives(update))

    def _arrives(self, update: RankUpdate) -> None:
        node = self.node
        orders, moved = node.ledger.exchange(update, node.clock.now_s)
        if orders is None and update.wait_s:
            self._waits_with = update
        else:
            self._obey(update, orders or Orders())
        if moved:
            node.notify()

    def _obey(self, update: RankUpdate, orders: Orders) -> None:
        self._talking = False
        orders = replace(orders, requests=0)  # the number of requests is stated, not searched for
        if self.state.answered(update, orders, self.node.clock.now_s) is Next.LEFT:
            self.left = True
            self.node.finished_s = self.node.clock.now_s
        else:
            self._act()

    # -- requests and copies -----------------------------------------------------------------------------------

    def _fetch(self, lease: LeaseOrder) -> None:
        """Begin the request for a chunk."""
        raise NotImplementedError

    def _store_s(self) -> float | None:
        """Return the time that a chunk from the store takes now. None: it is not known."""
        return None

    def _copied(self, sizes_bytes: dict[int, int]) -> None:
        self.state.chunks_placed(sizes_bytes, self.node.clock.now_s)
        self._act()


class StoreRank(SimRank):
    """A rank that reads everything from the store."""

    def __init__(
        self, node: SimAgent, rank: int, network: Network, flows: WorkerFlows, chunk_place_bytes: dict[int, int]
    ) -> None:
        super().__init__(node, rank, chunk_place_bytes)
        self.flows = flows
        self._network = network

    def _fetch(self, lease: LeaseOrder) -> None:
        size_bytes, begun_s = self.node.sizes[lease.chunk], self._network.now_s

        def done() -> None:
            now_s = self._network.now_s
            self.fetched_bytes += size_bytes
            result = FetchedChunk(lease.lease_id, Commit(lease.lease_id, lease.chunk))
            self.state.fetch_ended(result, size_bytes, now_s - begun_s, now_s)
            self._act()

        self._network.after(self.node.rates.latency_s, lambda: self._network.request(self.flows, size_bytes, done))


def place_bytes(plan: LoadPlan, rank: int) -> dict[int, int]:
    """Return the bytes of each chunk that the rank copies, from its real read items."""
    items = expand_read_items(plan.ranks[rank].slices, plan.chunks)
    found = np.zeros(len(plan.chunks), np.int64)
    np.add.at(found, items.chunk, items.run_bytes * items.count)
    return {int(chunk): int(found[chunk]) for chunk in np.flatnonzero(found)}
