"""Load time on 1 to 1,024 nodes, by discrete events and without sleeping: `python -m bench.simulate --help`.

The plan, the assignment of ranks, leases, cache and messages between ranks and agents are the project's own code, on a
virtual clock. Stated, not measured: the rates of store, connection, NIC, worker and PCIe, and that bandwidth is shared
max-min fairly. Not in it: starting processes, planning, failures, and the search for the number of requests.

Every node loads all of the model. Such nodes are equal, so one stands in for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.harness.report import markdown_table
from bench.huge_model import DenseShape, dense_index
from bench.options import new_parser, positive_float, positive_int
from bench.sim_flows import Network
from bench.sim_node import GB, Rates, SimNode, place_bytes
from cluster.errors import ConfigError, PlanError
from cluster.fit.needs import min_slots
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan, needed_chunks
from cluster.planning.plan import LoadPlan
from cluster.scheduling.topology import NodeInfo, assign_ranks, ranks_by_node

CHUNK_BYTES = 8 << 20  # the most of one


@dataclass(frozen=True)
class Case:
    """One simulated load. `slow_node`, `slow_worker`: times that one NIC, or one worker, is slower."""

    nodes: int
    ranks_per_node: int = 8
    slow_node: float = 1.0
    slow_worker: float = 1.0
    stand_ins: bool = True  # False: simulate every single node


@dataclass(frozen=True)
class Result:
    """The result of one simulated load."""

    nodes: int
    load_s: float  # until the last rank of the last node has everything
    others_s: float  # the same without the slow node
    ideal_s: float  # of the bottleneck alone
    bottleneck: str
    efficiency: float  # ideal_s / load_s
    store_bytes: int  # all nodes together
    store_rate_bytes_s: float
    slow_worker_share: float  # of its node's bytes that the slow worker fetched; an equal share when there is none


class Model:
    """A model, and its plans, computed once for many cases."""

    def __init__(self, shape: DenseShape, chunk_bytes: int) -> None:
        self.shape = shape
        self.chunk_bytes = chunk_bytes
        self.index = dense_index(shape, chunk_bytes=chunk_bytes)
        self._places: dict[tuple[Layout, int], dict[int, int]] = {}

    def plan(self, layout: Layout) -> LoadPlan:
        return build_load_plan(self.index, layout, None, self.shape.config())

    def places(self, plan: LoadPlan, rank: int) -> dict[int, int]:
        """Return `place_bytes`, computed once for all replicas."""
        one_replica = replace(plan.cut.layout, data_parallel_size=1)
        key = one_replica, rank % one_replica.ranks
        if key not in self._places:
            self._places[key] = place_bytes(plan, rank)
        return self._places[key]


def simulate(model: Model, case: Case, rates: Rates) -> Result:
    """Simulate one load. Same input, same result."""
    plan = model.plan(Layout(case.ranks_per_node, 1, case.nodes))
    infos = [NodeInfo(f"{node}", f"{node}", case.ranks_per_node, case.ranks_per_node) for node in range(case.nodes)]
    rank_nodes = assign_ranks(infos, plan.cut.layout, "cuda", case.ranks_per_node)
    by_node = ranks_by_node(rank_nodes)
    odd = case.slow_node != 1 or case.slow_worker != 1  # node 0 is the slow one, or has the slow worker
    groups = [(node, 1) for node in range(case.nodes)]  # (number of a node, how many are like it)
    if case.stand_ins:
        alone = 1 if odd else 0
        groups = groups[:alone] + [(alone, case.nodes - alone)] * (case.nodes > alone)
    network = Network(rates.store_bytes_s, rates.connection_bytes_s)
    nodes = []
    for number, copies in groups:
        slow = replace(rates, nic_bytes_s=rates.nic_bytes_s / case.slow_node, slow_worker=case.slow_worker)
        places = {rank: model.places(plan, rank) for rank in by_node[number]}
        nodes.append(SimNode(network, plan, places, rates if number else slow, model.chunk_bytes, copies))
    for node in nodes:
        node.begin()
    network.run()
    if not all(node.complete for node in nodes):
        raise RuntimeError("the simulated load came to a standstill")
    return _result(case, rates, plan, nodes)


def _result(case: Case, rates: Rates, plan: LoadPlan, nodes: Sequence[SimNode]) -> Result:
    load_s = max(node.finished_s for node in nodes)
    store_bytes = sum(rank.fetched_bytes * node.copies for node in nodes for rank in node.ranks)
    ideals: dict[str, float] = {"store": store_bytes / rates.store_bytes_s}

    def at_least(name: str, seconds: float) -> None:
        ideals[name] = max(ideals.get(name, 0.0), seconds)

    for node in nodes:
        chunks = needed_chunks(plan, [rank.rank for rank in node.ranks])
        needed = int(plan.chunks.sizes_bytes()[chunks].sum())
        at_least("NIC", needed / node.rates.nic_bytes_s)
        request_s = len(chunks) * rates.latency_s + needed / rates.connection_bytes_s
        at_least("connections", request_s / (len(node.ranks) * rates.threads))
        at_least("workers", needed / sum(flows.worker_bytes_s for flows in node.link.workers))
        for rank in node.ranks:
            at_least("PCIe", rank.placed_bytes / node.rates.pcie_bytes_s)
    bottleneck = max(ideals, key=lambda name: ideals[name])
    first = nodes[0]
    return Result(
        nodes=case.nodes,
        load_s=load_s,
        others_s=max((node.finished_s for node in nodes[1:]), default=load_s) if case.slow_node != 1 else load_s,
        ideal_s=ideals[bottleneck],
        bottleneck=bottleneck,
        efficiency=ideals[bottleneck] / load_s,
        store_bytes=store_bytes,
        store_rate_bytes_s=store_bytes / load_s,
        slow_worker_share=first.ranks[0].fetched_bytes / sum(rank.fetched_bytes for rank in first.ranks),
    )


def table(rows: Sequence[tuple[str, Result]]) -> str:
    """Return the results in Markdown."""
    head = ("case", "nodes", "load", "ideal", "limit", "efficiency", "store out", "slow worker's share")
    shown = []
    for name, row in rows:
        times = (f"{row.load_s:.2f} s", f"{row.ideal_s:.2f} s", row.bottleneck, f"{row.efficiency:.2f}")
        rest = (f"{row.store_rate_bytes_s / GB:,.0f} GB/s", f"{row.slow_worker_share:.3f}")
        shown.append((name, f"{row.nodes:,}", *times, *rest))
    return markdown_table(head, shown)


# Option of the command line -> (field of Rates, its unit, type, help)
_RATES: dict[str, tuple[str, float, Callable[[str], float], str]] = {
    "nic": ("nic_bytes_s", GB, positive_float, "GB/s of a node"),
    "store": ("store_bytes_s", GB, positive_float, "GB/s of the store"),
    "connection": ("connection_bytes_s", GB, positive_float, "GB/s of a connection"),
    "worker": ("worker_bytes_s", GB, positive_float, "GB/s that a worker verifies"),
    "pcie": ("pcie_bytes_s", GB, positive_float, "GB/s to each device"),
    "latency-ms": ("latency_s", 1e-3, float, "to the first byte"),
    "exchange-ms": ("exchange_s", 1e-3, float, "rank to agent and back"),
    "threads": ("threads", 1, positive_int, "requests at once, per rank"),
    "arena-slots": ("arena_slots", 1, positive_int, "of a node"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print the table."""
    parser = new_parser("bench.simulate", __doc__)
    parser.add_argument("--nodes", type=positive_int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="one or more")
    for name, (field, unit, kind, text) in _RATES.items():
        value = getattr(Rates, field)
        parser.add_argument(f"--{name}", dest=field, type=kind, default=value / unit if unit != 1 else value, help=text)
    parser.add_argument("--ranks-per-node", type=positive_int, default=Case.ranks_per_node, help="one per GPU")
    parser.add_argument("--layers", type=positive_int, default=DenseShape.layers, help="of a model like Llama 70B")
    parser.add_argument("--slow", type=positive_float, default=4.0, help="times that the slow NIC or worker is slower")
    args = parser.parse_args(arguments)
    if args.arena_slots < (least := min_slots(args.ranks_per_node)):
        parser.error(f"argument --arena-slots: {args.ranks_per_node} ranks on a node need {least} or more")
    rates = Rates(**{field: getattr(args, field) * unit for field, unit, _, _ in _RATES.values()})
    model = Model(DenseShape(layers=args.layers), CHUNK_BYTES)
    even = Case(nodes=1, ranks_per_node=args.ranks_per_node)
    begun_s = time.perf_counter()
    rows = []
    for name, change in (
        ("even", {}),
        (f"one node's NIC {args.slow:g}x slower", {"slow_node": args.slow}),
        (f"one worker {args.slow:g}x slower", {"slow_worker": args.slow}),
    ):
        for nodes in args.nodes:
            try:
                rows.append((name, simulate(model, replace(even, nodes=nodes, **change), rates)))
            except (ConfigError, PlanError) as error:  # which goes on with a list of every tensor
                parser.error(str(error).partition("\n")[0][:200])
    print(f"{model.index.size_bytes / GB:.1f} GB in {len(model.index.chunks):,} chunks, on every node\n")
    print(table(rows))
    print(f"\nsimulated in {time.perf_counter() - begun_s:.0f} s")


if __name__ == "__main__":
    main()
