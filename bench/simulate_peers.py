"""Time of a load whose nodes feed each other, simulated: `python -m bench.simulate_peers --help`.

Every node needs the whole model and has one rank. Agents, leases, trees, messages and ranks are the project's own code
on a virtual clock (`bench.sim_peers`). Stated, not measured: the rates of links and store, and latencies. Not in it:
starting processes, planning, the processor time of copies and digests, nodes that replace others.

The limit of a fan-out is the time of the model over the slowest link, and one chunk's time for each hop of the tree.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.node.peer_routes import hops
from bench.harness.report import markdown_table
from bench.options import new_parser, positive_float, positive_int
from bench.sim_node import GB, Rates
from bench.sim_peers import Cluster, ReplicaTables

CHUNK_BYTES = 8 << 20
SLOW = 4.0  # times that a slow node's link is slower
STANDSTILL_S = 600.0  # beyond ten times the limit


@dataclass(frozen=True)
class PeerCase:
    """One simulated load. `slow_up`, `slow_down`: the slow nodes are slow in sending, in receiving.

    `store_delay_s`: requests of the last node to the store take so much longer. `lends`: see `Cluster`.
    """

    nodes: int
    chunks: int
    slow_share: float = 0.0
    slow_up: bool = True
    slow_down: bool = False
    lost_every_s: float = 0.0  # a node is lost so often; 0: none
    store_delay_s: float = 0.0
    lends: bool = False
    filled: int = 0  # nodes that had the model before the others came, and keep nothing of it

    @property
    def hops(self) -> int:
        """Hops from a chunk's home to the last node of its tree."""
        return hops(self.nodes)

    def limit_s(self, rates: Rates) -> float:
        """Return the time of the model over the slowest link, and a chunk's time for each hop."""
        model_s = self.chunks * CHUNK_BYTES / min(rates.store_bytes_s, rates.nic_bytes_s)
        return model_s + self.hops * CHUNK_BYTES / rates.nic_bytes_s


@dataclass(frozen=True)
class PeerResult:
    """The result of one simulated load."""

    load_s: float  # until the last healthy node has everything
    slow_s: float  # until the last slow node has; 0: there is none
    limit_s: float
    store_share: float  # bytes from the store / size of the model
    uplink_use: float  # mean of the healthy nodes
    lost: int  # nodes
    causes: dict[str, int]  # requests to other nodes that brought nothing, by cause

    @property
    def efficiency(self) -> float:
        return self.limit_s / self.load_s


def simulate_peers(case: PeerCase, rates: Rates, *, lease_deadline_s: float = 3600.0) -> PeerResult:
    """Simulate one load. Same input, same result."""
    slow = max(1, round(case.nodes * case.slow_share)) if case.slow_share else 0
    slow_speed = 1 / SLOW if case.slow_up else 1.0, 1 / SLOW if case.slow_down else 1.0
    tables = ReplicaTables.of_size(case.chunks, CHUNK_BYTES)
    speeds = [slow_speed] * slow + [(1.0, 1.0)] * (case.nodes - slow)
    cluster = Cluster(tables, rates, speeds, lease_deadline_s, lends=case.lends, filled=case.filled)
    cluster.nodes[-1].store_latency_s += case.store_delay_s
    limit_s = case.limit_s(rates)
    if case.lost_every_s:
        first_s, number = min(case.lost_every_s, limit_s / 2), 0
        while (when_s := first_s + number * case.lost_every_s) < limit_s and number < case.nodes - 1:
            cluster.clock.at(when_s, functools.partial(_lose, cluster, cluster.nodes[case.nodes - 1 - number]))
            number += 1
    cluster.run(10 * limit_s + STANDSTILL_S)
    measured = cluster.nodes[slow + case.filled : case.nodes - bool(case.store_delay_s)]
    healthy = [node for node in measured if not node.is_dead]
    load_s = max(node.finished_s for node in healthy)
    causes: dict[str, int] = {}
    for node in cluster.nodes:
        for cause, count in node.rank.causes.items():
            causes[cause] = causes.get(cause, 0) + count
    return PeerResult(
        load_s=load_s,
        slow_s=max((node.finished_s for node in cluster.nodes[:slow]), default=0.0),
        limit_s=limit_s,
        store_share=sum(node.rank.fetched_bytes for node in cluster.nodes) / (case.chunks * CHUNK_BYTES),
        uplink_use=sum(node.up.busy_s for node in healthy) / len(healthy) / load_s,
        lost=sum(node.is_dead for node in cluster.nodes),
        causes=causes,
    )


def _lose(cluster: Cluster, node: object) -> None:
    for each in cluster.nodes:
        if each is node and not each.complete:
            each.die()


CASES: dict[str, dict[str, object]] = {
    "even": {},
    "slow-sending": {"slow_share": 0.01},
    "slow": {"slow_share": 0.01, "slow_down": True},
    "lost": {"lost_every_s": 60.0},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print the table."""
    parser = new_parser("bench.simulate_peers", __doc__)
    parser.add_argument("--nodes", type=positive_int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256], help="one or more")
    parser.add_argument("--chunks", type=positive_int, default=400, help="of 8 MiB, in the model")
    parser.add_argument("--cases", choices=list(CASES), nargs="+", default=["even"], help="what is wrong with nodes")
    parser.add_argument("--nic", type=positive_float, default=1.25, help="GB/s of a node, each way")
    parser.add_argument("--store", type=positive_float, default=1.25, help="GB/s of the store")
    parser.add_argument("--latency-ms", type=float, default=5.0, help="of the store, to the first byte")
    parser.add_argument("--slots", type=positive_int, default=64, help="of a node's window")
    args = parser.parse_args(arguments)
    rates = Rates(
        nic_bytes_s=args.nic * GB,
        store_bytes_s=args.store * GB,
        latency_s=args.latency_ms * 1e-3,
        arena_slots=args.slots,
        threads=16,
    )
    head = (
        "case",
        "nodes",
        "hops",
        "load",
        "limit",
        "efficiency",
        "slow nodes",
        "store bytes / model",
        "uplinks in use",
    )
    rows = []
    for name in args.cases:
        for nodes in args.nodes if name == "even" else [nodes for nodes in args.nodes if nodes > 1]:
            begun_s = time.perf_counter()
            case = PeerCase(nodes, args.chunks, **CASES[name])  # type: ignore[arg-type]
            row = simulate_peers(case, rates)
            slow = f"{row.slow_s:.2f} s" if row.slow_s else ""
            times = (f"{row.load_s:.2f} s", f"{row.limit_s:.2f} s", f"{row.efficiency:.3f}", slow)
            rows.append((name, f"{nodes:,}", f"{case.hops}", *times, f"{row.store_share:.2f}", f"{row.uplink_use:.2f}"))
            took_s = time.perf_counter() - begun_s
            print(f"{rows[-1]} {row.causes} lost {row.lost}: simulated in {took_s:.0f} s", flush=True)
    print()
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
