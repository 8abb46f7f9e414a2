"""Load time on 1 to 1,024 nodes, by discrete events and without sleeping: `python -m bench.simulate --help`.

The plan, the assignment of ranks, leases, cache and messages between ranks and agents are the project's own code, on a
virtual clock. Stated, not measured: the rates of store, connection, NIC, worker and PCIe, and that bandwidth is shared
max-min fairly. Not in it: starting processes, planning, failures, and the search for the number of requests.

Nodes of a replica layout (`--spread replicas`) are equal in everything, so one stands in for all that are: exact while
`--jitter` is 0. With `--spread fsdp` nodes differ in their slices, and `--sample` of them stand in for all.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.arguments import first_line, float_from_zero, output_file, positive_float, positive_int
from bench.huge_model import DenseShape, dense_index
from bench.sim_flows import Network
from bench.sim_node import NodeRates, SimNode, place_bytes
from cluster.errors import ConfigError, PlanError
from cluster.fit.needs import min_slots
from cluster.layouts.mesh import Layout
from cluster.planning.make_plan import build_load_plan, needed_chunks
from cluster.planning.plan import LoadPlan
from cluster.scheduling.topology import NodeInfo, assign_ranks, ranks_by_node

MIB = 1 << 20
GB = 1e9


@dataclass(frozen=True)
class Rates:
    """What is stated; bytes and seconds."""

    nic_bytes_s: float = 12.5 * GB  # of a node: 100 Gbit/s
    store_bytes_s: float = 1000 * GB  # all connections together
    connection_bytes_s: float = 0.1 * GB  # of one
    worker_bytes_s: float = 2 * GB  # a worker process takes in and verifies
    pcie_bytes_s: float = 25 * GB  # of each device
    latency_s: float = 0.03  # of a request, to its first byte
    exchange_s: float = 0.001  # a message of a rank to its agent, and the answer
    heartbeat_s: float = 1.0


@dataclass(frozen=True)
class Case:
    """One simulated load. `slow_node`, `slow_worker`: how many times slower one NIC, or one worker, is."""

    nodes: int
    ranks_per_node: int = 8
    spread: str = "replicas"  # every node loads all of the model; "fsdp": all nodes together do
    threads: int = 32  # requests at once, per rank
    arena_slots: int = 1024
    slow_node: float = 1.0
    slow_worker: float = 1.0
    jitter: float = 0.0
    sample: int = 4
    stand_ins: bool = True  # False: simulate every single node
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What came out."""

    nodes: int
    load_s: float  # until the last rank of the last node has everything
    others_s: float  # the same without the slow node
    ideal_s: float  # of the bottleneck alone
    bottleneck: str
    efficiency: float  # ideal_s / load_s
    store_bytes: int  # all nodes together
    store_rate_bytes_s: float
    slow_worker_share: float  # of its node's bytes that the slow worker fetched; an equal share when there is none
    longest_request_s: float
    messages_per_node: int  # from ranks to their agent
    exact: bool  # every node was simulated, or stood for by one that is equal to it


class Model:
    """A model, and what is worked out of it once for many cases."""

    def __init__(self, shape: DenseShape, chunk_bytes: int) -> None:
        self.shape = shape
        self.chunk_bytes = chunk_bytes
        self.index = dense_index(shape, chunk_bytes=chunk_bytes)
        self._places: dict[tuple[Layout, int], dict[int, int]] = {}

    def plan(self, layout: Layout) -> LoadPlan:
        return build_load_plan(self.index, layout, None, self.shape.config())

    def places(self, plan: LoadPlan, rank: int) -> dict[int, int]:
        """`place_bytes`, once for all replicas of any number."""
        one_replica = replace(plan.cut.layout, data_parallel_size=1)
        key = one_replica, rank % one_replica.ranks
        if key not in self._places:
            self._places[key] = place_bytes(plan, rank)
        return self._places[key]


def simulate(model: Model, case: Case, rates: Rates) -> Result:
    """One load. Same input, same result."""
    replicas = case.spread == "replicas"
    plan = model.plan(Layout(case.ranks_per_node, *((1, case.nodes) if replicas else (case.nodes, 1))))
    infos = [NodeInfo(f"{node}", f"{node}", case.ranks_per_node, case.ranks_per_node) for node in range(case.nodes)]
    rank_nodes = assign_ranks(infos, plan.cut.layout, "cuda", case.ranks_per_node)
    by_node = ranks_by_node(rank_nodes)
    odd = case.slow_node != 1 or case.slow_worker != 1  # node 0 is the slow one, or has the slow worker
    exact, groups = _stand_ins(case, replicas, odd)
    network = Network(rates.store_bytes_s, rates.connection_bytes_s)
    nodes = []
    for number, copies in groups:
        is_odd = odd and number == 0
        workers = [rates.worker_bytes_s] * case.ranks_per_node
        workers[0] /= case.slow_worker if is_odd else 1
        node_rates = NodeRates(
            nic_bytes_s=rates.nic_bytes_s / (case.slow_node if is_odd else 1),
            worker_bytes_s=tuple(workers),
            pcie_bytes_s=rates.pcie_bytes_s,
            threads=case.threads,
            latency_s=rates.latency_s,
            jitter=case.jitter,
            exchange_s=rates.exchange_s,
            heartbeat_s=rates.heartbeat_s,
            arena_slots=case.arena_slots,
            slot_bytes=model.chunk_bytes,
        )
        places = {rank: model.places(plan, rank) for rank in by_node[number]}
        nodes.append(SimNode(network, plan, places, node_rates, copies, case.seed * 100_003 + number))
    for node in nodes:
        node.begin()
    network.run()
    if not all(node.complete for node in nodes):
        raise RuntimeError("the simulated load came to a standstill")
    return _result(case, rates, plan, nodes, (exact and case.jitter == 0) or len(nodes) == case.nodes)


def _stand_ins(case: Case, replicas: bool, odd: bool) -> tuple[bool, list[tuple[int, int]]]:
    """(whether they are equal to all that they stand for, [(number of a node, how many are like it)])."""
    if not case.stand_ins:
        return True, [(node, 1) for node in range(case.nodes)]
    first = 1 if odd else 0
    alone = [(0, 1)] if odd else []
    count = case.nodes - first
    if not count:
        return True, alone
    if replicas:
        return True, [*alone, (first, count)]
    picked = sorted(random.Random(case.seed).sample(range(first, case.nodes), min(case.sample, count)))
    shares = [count // len(picked) + (place < count % len(picked)) for place in range(len(picked))]
    return count == len(picked), [*alone, *zip(picked, shares, strict=True)]


def _result(case: Case, rates: Rates, plan: LoadPlan, nodes: Sequence[SimNode], exact: bool) -> Result:
    load_s = max(node.finished_s for node in nodes)
    odd = case.slow_node != 1
    store_bytes = sum(rank.fetched_bytes * node.copies for node in nodes for rank in node.ranks)
    ideals: dict[str, float] = {"store": store_bytes / rates.store_bytes_s}

    def at_least(name: str, seconds: float) -> None:
        ideals[name] = max(ideals.get(name, 0.0), seconds)

    for node in nodes:
        chunks = needed_chunks(plan, [rank.rank for rank in node.ranks])
        needed = int(plan.chunks.sizes_bytes()[chunks].sum())
        at_least("NIC", needed / node.rates.nic_bytes_s)
        request_s = len(chunks) * rates.latency_s + needed / rates.connection_bytes_s
        at_least("connections", request_s / (len(node.ranks) * case.threads))
        at_least("workers", needed / sum(node.rates.worker_bytes_s))
        for rank in node.ranks:
            at_least("PCIe", rank.placed_bytes / node.rates.pcie_bytes_s)
    bottleneck = max(ideals, key=lambda name: ideals[name])
    first = nodes[0]
    return Result(
        nodes=case.nodes,
        load_s=load_s,
        others_s=max((node.finished_s for node in nodes[1:]), default=load_s) if odd else load_s,
        ideal_s=ideals[bottleneck],
        bottleneck=bottleneck,
        efficiency=ideals[bottleneck] / load_s,
        store_bytes=store_bytes,
        store_rate_bytes_s=store_bytes / load_s,
        slow_worker_share=first.ranks[0].fetched_bytes / sum(rank.fetched_bytes for rank in first.ranks),
        longest_request_s=max(node.longest_request_s for node in nodes),
        messages_per_node=max(node.messages for node in nodes),
        exact=exact,
    )


def table(rows: Sequence[tuple[str, Result]]) -> str:
    """The stats, as Markdown."""
    lines = [
        "| case | nodes | load | ideal | limit | efficiency | store out | slow worker's share | exact |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows:
        lines.append(
            f"| {name} | {row.nodes:,} | {row.load_s:.2f} s | {row.ideal_s:.2f} s | {row.bottleneck} "
            f"| {row.efficiency:.2f} | {row.store_rate_bytes_s / GB:,.0f} GB/s | {row.slow_worker_share:.3f} "
            f"| {'yes' if row.exact else 'sample'} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description=summary,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--nodes", type=positive_int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--ranks-per-node", type=positive_int, default=8)
    parser.add_argument("--spread", choices=("replicas", "fsdp"), default="replicas")
    parser.add_argument("--nic", type=positive_float, default=Rates.nic_bytes_s / GB, help="GB/s of a node")
    parser.add_argument("--store", type=positive_float, default=Rates.store_bytes_s / GB, help="GB/s of the store")
    parser.add_argument(
        "--connection", type=positive_float, default=Rates.connection_bytes_s / GB, help="GB/s of a connection"
    )
    parser.add_argument(
        "--worker", type=positive_float, default=Rates.worker_bytes_s / GB, help="GB/s that a worker verifies"
    )
    parser.add_argument("--pcie", type=positive_float, default=Rates.pcie_bytes_s / GB, help="GB/s to each device")
    parser.add_argument("--latency-ms", type=float_from_zero, default=Rates.latency_s * 1e3, help="to the first byte")
    parser.add_argument(
        "--exchange-ms", type=float_from_zero, default=Rates.exchange_s * 1e3, help="rank to agent and back"
    )
    parser.add_argument("--threads", type=positive_int, default=Case.threads, help="requests at once, per rank")
    parser.add_argument("--arena-slots", type=positive_int, default=Case.arena_slots)
    parser.add_argument("--chunk-mib", type=positive_int, default=8)
    parser.add_argument(
        "--layers", type=positive_int, default=DenseShape.layers, help="of a model shaped like Llama 70B"
    )
    parser.add_argument(
        "--slow", type=positive_float, default=4.0, help="how many times slower the slow NIC or worker is"
    )
    parser.add_argument("--jitter", type=float_from_zero, default=0.0, help="of the latency, as a fraction")
    parser.add_argument(
        "--sample", type=positive_int, default=Case.sample, help="nodes that stand in for all, with fsdp"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, help="write the stats to this file")
    args = parser.parse_args(arguments)
    if args.arena_slots < (least := min_slots(args.ranks_per_node)):
        parser.error(f"argument --arena-slots: {args.ranks_per_node} ranks on a node need {least} or more")
    rates = Rates(
        nic_bytes_s=args.nic * GB,
        store_bytes_s=args.store * GB,
        connection_bytes_s=args.connection * GB,
        worker_bytes_s=args.worker * GB,
        pcie_bytes_s=args.pcie * GB,
        latency_s=args.latency_ms / 1e3,
        exchange_s=args.exchange_ms / 1e3,
    )
    model = Model(DenseShape(layers=args.layers), args.chunk_mib * MIB)
    even = Case(
        nodes=1,
        ranks_per_node=args.ranks_per_node,
        spread=args.spread,
        threads=args.threads,
        arena_slots=args.arena_slots,
        jitter=args.jitter,
        sample=args.sample,
        seed=args.seed,
    )
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
            except (ConfigError, PlanError) as error:  # a model of that shape cannot be cut that way
                parser.error(f"{nodes} nodes of {args.ranks_per_node} ranks: {first_line(error)}")
    print(f"{model.index.size_bytes / GB:.1f} GB in {len(model.index.chunks):,} chunks, {args.spread}\n")
    print(table(rows))
    print(f"\nsimulated in {time.perf_counter() - begun_s:.0f} s")
    if args.json:
        data: dict[str, Any] = {
            "model_bytes": model.index.size_bytes,
            "chunks": len(model.index.chunks),
            "rates": asdict(rates),
            "case": asdict(even),
            "rows": [{"case": name, **asdict(row)} for name, row in rows],
        }
        args.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
