"""One node in simulated time: the project's own ledger, queue, cache and ranks.

NodeLedger (real, on a ChunkCache without memory) <-- RankHello, RankUpdate (real messages) -- SimRank
SimRank: a real RankState; requests (bench.sim_flows), one copy at a time to its device
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from actors.node.node_ledger import NodeLedger
from actors.rank.state import FetchedChunk, Next, RankIdentity, RankState
from bench.huge_model import node_job
from bench.sim_flows import Network, NodeLink, WorkerFlows
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
    exchange_s: float = 0.001  # a message of a rank to its agent, and the answer
    heartbeat_s: float = 1.0
    threads: int = 32  # requests at once, per rank
    arena_slots: int = 1024
    slow_worker: float = 1.0  # times that the first worker is slower


class SimNode:
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
        self.network = network
        self.rates = rates
        self.copies = copies
        self.sizes: list[int] = plan.chunks.sizes_bytes().tolist()
        self.link = NodeLink(rates.nic_bytes_s, copies)
        network.nodes.append(self.link)
        self.ledger = NodeLedger(ChunkCache(rates.arena_slots), slot_bytes, chance=random.Random(0))
        self.ranks = [SimRank(self, rank, index, places) for index, (rank, places) in enumerate(ranks.items())]
        self.finished_s = 0.0
        self._job = node_job(pack_shared(plan), tuple(ranks))

    def begin(self) -> None:
        """Give the agent its job, then let the ranks join."""
        self.ledger.begin(self._job, 0.0)
        for rank in self.ranks:
            rank.join()

    @property
    def complete(self) -> bool:
        return all(rank.left for rank in self.ranks)

    def notify(self) -> None:
        """Let ranks that wait for orders ask again after a change, as threads in the agent do."""
        for rank in self.ranks:
            rank.poll()


class SimRank:
    """A rank: the real `RankState`, with its requests, copies and messages as events of the network."""

    def __init__(self, node: SimNode, rank: int, index: int, chunk_place_bytes: dict[int, int]) -> None:
        self.node, self.rank = node, rank
        self.left = False  # it has everything and has reported it
        self.fetched_bytes = 0
        self.flows = WorkerFlows(node.link, node.rates.worker_bytes_s / (1 if index else node.rates.slow_worker))
        node.link.workers.append(self.flows)
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
        known = node.ledger.join(hello, node.network.now_s) is True
        reply = JoinReply("", known=known, batch=node.ledger.batch(hello))
        self.state.welcomed(hello, reply, node.network.now_s)
        self._act()

    def poll(self) -> None:
        """Take the orders for a message that waits at the agent."""
        if self._waits_with is None:
            return
        update = self._waits_with
        orders = self.node.ledger.orders_for(update, self.node.network.now_s)
        if orders is not None:
            self._waits_with = None
            self._obey(update, orders)

    def _act(self) -> None:
        """Start the requests, the copy and the message that may start now."""
        state, network, now_s = self.state, self.node.network, self.node.network.now_s
        while (lease := state.next_lease(now_s)) is not None:
            network.after(self.node.rates.latency_s, self._request(lease))
        if not state.copying and (chunks := state.next_chunks(PLACE_BATCH, now_s)):
            sizes_bytes = {chunk: self._place_bytes[chunk] for chunk, _ in chunks}
            copy_s = sum(sizes_bytes.values()) / self.node.rates.pcie_bytes_s
            network.after(copy_s, lambda: self._copied(sizes_bytes))
        if state.finished and not state.draining:
            state.drain(now_s, finish=True)
        if self._talking or self.left:
            return
        due_s = state.update_due_s
        if due_s <= now_s:
            self._send()
        elif due_s < self._wakes_s:
            self._wakes_s = due_s
            network.at(due_s, self._wake)

    def _wake(self) -> None:
        self._wakes_s = math.inf
        self._act()

    # -- messages ----------------------------------------------------------------------------------------------

    def _send(self) -> None:
        self._talking = True
        leaving = self.state.finished and self.state.drained
        update = self.state.update(self.node.network.now_s, leaving=leaving)
        self.node.network.after(self.node.rates.exchange_s, lambda: self._arrives(update))

    def _arrives(self, update: RankUpdate) -> None:
        node = self.node
        orders, moved = node.ledger.exchange(update, node.network.now_s)
        if orders is None and update.wait_s:
            self._waits_with = update
        else:
            self._obey(update, orders or Orders())
        if moved:
            node.notify()

    def _obey(self, update: RankUpdate, orders: Orders) -> None:
        self._talking = False
        orders = replace(orders, requests=0)  # the number of requests is stated, not searched for
        if self.state.answered(update, orders, self.node.network.now_s) is Next.LEFT:
            self.left = True
            self.node.finished_s = self.node.network.now_s
        else:
            self._act()

    # -- requests and copies -----------------------------------------------------------------------------------

    def _request(self, lease: LeaseOrder) -> Callable[[], None]:
        size_bytes, begun_s = self.node.sizes[lease.chunk], self.node.network.now_s

        def done() -> None:
            now_s = self.node.network.now_s
            self.fetched_bytes += size_bytes
            result = FetchedChunk(lease.lease_id, Commit(lease.lease_id, lease.chunk))
            self.state.fetch_ended(result, size_bytes, now_s - begun_s, now_s)
            self._act()

        return lambda: self.node.network.request(self.flows, size_bytes, done)

    def _copied(self, sizes_bytes: dict[int, int]) -> None:
        self.state.chunks_placed(sizes_bytes, self.node.network.now_s)
        self._act()


def place_bytes(plan: LoadPlan, rank: int) -> dict[int, int]:
    """Return the bytes of each chunk that the rank copies, from its real read items."""
    items = expand_read_items(plan.ranks[rank].slices, plan.chunks)
    found = np.zeros(len(plan.chunks), np.int64)
    np.add.at(found, items.chunk, items.run_bytes * items.count)
    return {int(chunk): int(found[chunk]) for chunk in np.flatnonzero(found)}
