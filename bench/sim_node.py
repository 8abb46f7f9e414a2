"""One node in simulated time: the project's own ledger, queue and cache, and ranks that act as a RankLoader does.

NodeLedger (real, on a ChunkCache without memory) <-- RankHello, RankUpdate (real messages) -- SimRank
SimRank: `threads` requests at once (bench.sim_flows), one copy at a time to its device
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from actors.node.node_ledger import NodeLedger
from bench.huge_model import node_job
from bench.sim_flows import Network, NodeLink, WorkerFlows
from cluster.messages import Commit, LeaseOrder, Orders, RankHello, RankUpdate
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
    jitter: float = 0.0  # the latency varies by this fraction, either way
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
        seed: int = 0,
    ) -> None:
        """`ranks`: rank of the plan -> chunk -> bytes that it copies (see `place_bytes`)."""
        self.network = network
        self.rates = rates
        self.copies = copies
        self.chance = random.Random(seed)
        self.sizes: list[int] = plan.chunks.sizes_bytes().tolist()
        self.link = NodeLink(rates.nic_bytes_s, copies)
        network.nodes.append(self.link)
        self.ledger = NodeLedger(ChunkCache(rates.arena_slots), slot_bytes, chance=random.Random(seed))
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
    """The work of `actors.rank.rank_work` and the loops of `actors.rank.executor`, as events."""

    def __init__(self, node: SimNode, rank: int, index: int, chunk_place_bytes: dict[int, int]) -> None:
        self.node, self.rank = node, rank
        self.left = False  # it has everything and has reported it
        self.fetched_bytes = 0
        self.placed_bytes = 0
        self.flows = WorkerFlows(node.link, node.rates.worker_bytes_s / (1 if index else node.rates.slow_worker))
        node.link.workers.append(self.flows)
        self._place_bytes = chunk_place_bytes
        self._process = ProcessId(rank + 1, 1)
        self._numbers = itertools.count(1)
        self._leases: deque[LeaseOrder] = deque()
        self._readable: deque[tuple[int, int]] = deque()
        self._requests = 0  # under way
        self._placing = False
        self._unplaced = 0
        self._placed = 0
        self._commits: list[Commit] = []
        self._placed_now: list[int] = []
        self._returned: list[str] = []
        self._talking = False  # a message is on its way to the agent, or waits there for orders
        self._waits_with: RankUpdate | None = None
        self._report_number = 0  # counts messages, so that an old timer does nothing

    def join(self) -> None:
        hello = RankHello(LOAD, 1, self.rank, 0, self._process, number=next(self._numbers))
        self.node.ledger.join(hello, self.node.network.now_s)
        self._report()

    def _maybe_report(self) -> None:
        """Report several results a message, as RankWork does, but at once when there is nothing else to do."""
        if self._talking or self.left:
            return
        if self._finished:  # chunks fetched for others go with the last message; leases not begun are returned
            self._returned += [lease.lease_id for lease in self._leases]
            self._leases.clear()
            if not self._requests:
                self._report()
            return
        results = len(self._commits) + len(self._placed_now)
        nothing_left = not (self._in_hand or self._unplaced)
        if nothing_left or results >= self.node.rates.threads:
            self._report()

    def _report(self) -> None:
        self._talking = True
        self._report_number += 1
        rates, leaving = self.node.rates, self._finished and not self._in_hand
        idle = not (self._in_hand or self._unplaced or self._commits or self._placed_now)
        update = RankUpdate(
            LOAD,
            1,
            self.rank,
            0,
            self._process,
            number=next(self._numbers),
            committed=tuple(self._commits),
            placed=tuple(self._placed_now),
            returned=tuple(self._returned),
            want_leases=0 if self._finished else max(0, 2 * rates.threads - self._in_hand),
            wait_s=1.0 if idle and not leaving else 0.0,
            leaving=leaving,
        )
        self._commits, self._placed_now, self._returned = [], [], []
        self.node.network.after(rates.exchange_s, lambda: self._arrives(update))

    def _arrives(self, update: RankUpdate) -> None:
        node = self.node
        orders, moved = node.ledger.exchange(update, node.network.now_s)
        if update.leaving:
            self.left = True
            self._talking = False
            node.finished_s = node.network.now_s
        elif orders is None and update.wait_s:
            self._waits_with = update
        else:
            self._obey(orders or Orders())
        if moved:
            node.notify()

    def poll(self) -> None:
        """Take the orders for a message that waits at the agent."""
        if self._waits_with is None:
            return
        orders = self.node.ledger.orders_for(self._waits_with, self.node.network.now_s)
        if orders is not None:
            self._waits_with = None
            self._obey(orders)

    def _obey(self, orders: Orders) -> None:
        if orders.stop is not None:
            raise orders.stop
        self._talking = False
        self._leases.extend(orders.leases)
        self._readable.extend(orders.readable)
        self._unplaced += len(orders.readable)
        self._fetch()
        self._place()
        self._maybe_report()
        if not self._talking and not self.left:
            number = self._report_number
            self.node.network.after(self.node.rates.heartbeat_s, lambda: self._heartbeat(number))

    def _heartbeat(self, number: int) -> None:
        if number == self._report_number and not self._talking and not self.left:
            self._report()

    def _fetch(self) -> None:
        rates, network = self.node.rates, self.node.network
        while self._leases and self._requests < rates.threads and not self._finished:
            lease = self._leases.popleft()
            self._requests += 1
            latency_s = rates.latency_s * (1 + rates.jitter * (2 * self.node.chance.random() - 1))
            network.after(latency_s, self._begins(lease))

    def _begins(self, lease: LeaseOrder) -> Callable[[], None]:
        size_bytes = self.node.sizes[lease.chunk]

        def done() -> None:
            self._requests -= 1
            self.fetched_bytes += size_bytes
            self._commits.append(Commit(lease.lease_id, lease.chunk))
            self._fetch()
            self._maybe_report()

        return lambda: self.node.network.request(self.flows, size_bytes, done)

    def _place(self) -> None:
        if self._placing or not self._readable:
            return
        self._placing = True
        chunks = [self._readable.popleft()[0] for _ in range(min(PLACE_BATCH, len(self._readable)))]
        moved_bytes = sum(self._place_bytes[chunk] for chunk in chunks)
        self.node.network.after(moved_bytes / self.node.rates.pcie_bytes_s, lambda: self._placed_chunks(chunks))

    def _placed_chunks(self, chunks: list[int]) -> None:
        self._placing = False
        self._unplaced -= len(chunks)
        self._placed += len(chunks)
        self._placed_now += chunks
        self.placed_bytes += sum(self._place_bytes[chunk] for chunk in chunks)
        self._place()
        self._maybe_report()

    @property
    def _in_hand(self) -> int:
        return len(self._leases) + self._requests

    @property
    def _finished(self) -> bool:
        return self._placed == len(self._place_bytes)


def place_bytes(plan: LoadPlan, rank: int) -> dict[int, int]:
    """Return the bytes of each chunk that the rank copies, from its real read items."""
    items = expand_read_items(plan.ranks[rank].slices, plan.chunks)
    found = np.zeros(len(plan.chunks), np.int64)
    np.add.at(found, items.chunk, items.run_bytes * items.count)
    return {int(chunk): int(found[chunk]) for chunk in np.flatnonzero(found)}
