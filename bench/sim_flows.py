"""Bytes in flight, as a fluid: every request gets its max-min fair share of each link on its way. No sleeping.

    request -- connection -- worker -- node's NIC -- store

The requests of one worker are alike, so they share one rate; a request is done when its worker's *served bytes per
request* have grown by its size. Nodes that are equal in everything stand in as one, `copies` times.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

SAME_MOMENT_S = 1e-9


def water_level(demands: Iterable[tuple[float, float]], capacity: float) -> float:
    """Return the rate L with which sum(count * min(cap, L)) fills `capacity`, infinite when all caps together do not.

    `demands`: (count, cap) of requests that are alike.
    """
    ordered = sorted(demands, key=lambda demand: demand[1])
    count_left = sum(count for count, _ in ordered)
    left = capacity
    for count, cap in ordered:
        if count_left * cap > left:
            return left / count_left
        left -= count * cap
        count_left -= count
    return math.inf


@dataclass(slots=True, eq=False)
class WorkerFlows:
    """The requests of one worker."""

    node: NodeLink
    worker_bytes_s: float  # what the worker can take in and verify
    served_bytes: float = 0.0  # per request, since the beginning
    rate: float = 0.0  # per request, now
    # (served when done, number, then)
    running: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class NodeLink:
    """A node's NIC and the workers behind it. `copies` nodes are like this one."""

    nic_bytes_s: float
    copies: int = 1
    workers: list[WorkerFlows] = field(default_factory=list)


class Clock:
    """Calls at given times, in order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timed: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, then: Callable[[], None]) -> None:
        """Call `then` at that time."""
        heapq.heappush(self._timed, (time_s, next(self._numbers), then))

    def after(self, delay_s: float, then: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, then)

    def run_while(self, goes_on: Callable[[], bool]) -> None:
        """Make the calls that are due, one after another, as long as it `goes_on` and there are any."""
        while self._timed and goes_on():
            self.now_s, _, then = heapq.heappop(self._timed)
            then()


class Network(Clock):
    """Events in order of time: requests that end, and calls at a given time."""

    def __init__(self, store_bytes_s: float, connection_bytes_s: float) -> None:
        super().__init__()
        self.nodes: list[NodeLink] = []
        self._store_bytes_s = store_bytes_s
        self._connection_bytes_s = connection_bytes_s
        self._stale = False  # requests began or ended since rates were set

    def request(self, worker: WorkerFlows, size_bytes: int, then: Callable[[], None]) -> None:
        """Begin to move bytes from the store to a worker. Calls `then` when they have arrived."""
        heapq.heappush(worker.running, (worker.served_bytes + size_bytes, next(self._numbers), then))
        self._stale = True

    def run(self) -> None:
        """Run until no event is left."""
        while True:
            if self._stale:
                self._set_rates()
            time_s = min(self._timed[0][0] if self._timed else math.inf, self._next_end_s())
            if time_s == math.inf:
                return
            self._move_to(max(time_s, self.now_s))
            for then in self._due():
                then()

    def _next_end_s(self) -> float:
        left_s = math.inf
        for node in self.nodes:
            for worker in node.workers:
                if worker.running:
                    left_s = min(left_s, (worker.running[0][0] - worker.served_bytes) / worker.rate)
        return self.now_s + left_s

    def _move_to(self, time_s: float) -> None:
        passed_s = time_s - self.now_s
        if passed_s > 0:
            for node in self.nodes:
                for worker in node.workers:
                    if worker.running:
                        worker.served_bytes += worker.rate * passed_s
        self.now_s = time_s

    def _due(self) -> list[Callable[[], None]]:
        """Return the calls that are due. Moments that differ by rounding only are one moment."""
        found = []
        for node in self.nodes:
            for worker in node.workers:
                while worker.running and worker.running[0][0] - worker.served_bytes <= worker.rate * SAME_MOMENT_S:
                    found.append(heapq.heappop(worker.running)[2])
        self._stale = self._stale or bool(found)
        while self._timed and self._timed[0][0] <= self.now_s + SAME_MOMENT_S:
            found.append(heapq.heappop(self._timed)[2])
        return found

    def _set_rates(self) -> None:
        """Set max-min fair rates: node, worker or connection hold back a request below the store's level."""
        self._stale = False
        of_store: list[tuple[float, float]] = []
        for node in self.nodes:
            busy = [worker for worker in node.workers if worker.running]
            for worker in busy:
                worker.rate = min(self._connection_bytes_s, worker.worker_bytes_s / len(worker.running))
            level = water_level(((len(worker.running), worker.rate) for worker in busy), node.nic_bytes_s)
            for worker in busy:
                worker.rate = min(worker.rate, level)
                of_store.append((len(worker.running) * node.copies, worker.rate))
        level = water_level(of_store, self._store_bytes_s)
        if level < math.inf:
            for node in self.nodes:
                for worker in node.workers:
                    worker.rate = min(worker.rate, level)
