"""The cost of metrics for a coordinator: `python -m bench.metrics_cost --help`.

Heartbeats of made-up agents, as large as those of 8 ranks that load, are taken in, and the result is scraped as
Prometheus does it, through prometheus-client. No Ray, no network: seconds are this process's own CPU.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest

from actors.metrics_server import PageCollector
from bench.harness.report import markdown_table
from bench.options import new_parser, positive_int
from cluster.messages import AgentBeat, LoadBeat, RankBeat
from cluster.scheduling.load_state import LoadState, RankLife
from cluster.telemetry.counters import ClusterMetrics, LoadView
from cluster.telemetry.stats import SOURCES, ArenaUse, LoadCounters, NodeMemory, NodeStats, StageTimes
from storage.arena.chunk_cache import CacheStats
from storage.disk.tier import DiskStats
from storage.host.memory import GpuMemory

CASES = ((1, 1), (16, 4), (64, 4), (256, 1), (1024, 1))  # nodes; models, each with a rank on every GPU
RANKS = 8  # of a model on a node
GB = 10**9


@dataclass(frozen=True, slots=True)
class Cost:
    """The measurements of one case."""

    nodes: int
    models: int
    beat_bytes: int  # of one heartbeat, pickled
    beat_s: float  # to take one in
    copy_s: float  # of the coordinator's loop, at each scrape
    scrape_s: float  # of another thread of its process, at each scrape
    series: int
    answer_bytes: int


def measure(nodes: int, models: int, rounds: int) -> Cost:
    """Take in `rounds` heartbeats of every node, each larger than before. Then scrape three times, for the median."""
    metrics = ClusterMetrics()
    names = [f"model-{number}" for number in range(models)]
    for name in names:
        life = (RankLife(),) * (RANKS * nodes)
        hosts = tuple(f"host-{node:03}" for node in range(nodes) for _ in range(RANKS))
        metrics.load(LoadView(f"{name}-1", name, LoadState.LOADING, life, hosts, nodes * 100 * GB), 0.0)
    beats = [_beat(node, names, number) for number in range(1, rounds + 1) for node in range(nodes)]
    begun_s = time.process_time()
    for beat in beats:
        metrics.received(beat, 0.0)
    beat_s = (time.process_time() - begun_s) / len(beats)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PageCollector(metrics.snapshot))
    copies, scrapes, text = [], [], b""
    for _ in range(3):
        begun_s = time.process_time()
        metrics.snapshot()
        copied_s = time.process_time()
        text = generate_latest(registry)
        copies.append(copied_s - begun_s)
        scrapes.append(time.process_time() - copied_s)
    series = sum(1 for line in text.splitlines() if line and not line.startswith(b"#"))
    size_bytes = len(pickle.dumps(beats[-1], protocol=5))
    return Cost(nodes, models, size_bytes, beat_s, sorted(copies)[1], sorted(scrapes)[1], series, len(text))


def _beat(node: int, models: Sequence[str], number: int) -> AgentBeat:
    counters = LoadCounters(
        {source: number * GB for source in SOURCES},
        {source: number * 1000 for source in SOURCES},
        verified_chunks=number * 1000,
        retries={"reset": number, "throttled": number},
        leases_granted=number * 1000,
        stages=StageTimes(fetch_s=number * 12.3456, verify_s=number * 1.2345, place_s=number * 2.3456),
    )
    loads = tuple(LoadBeat(f"{name}-1", 1, 100 * GB, None, False, name) for name in models)
    ranks = tuple(
        RankBeat(f"{name}-1", 1, rank, 0, 1000 + rank, number * GB, 0.1, requests=4, allowed_requests=8, own_bytes=GB)
        for name in models
        for rank in range(RANKS * node, RANKS * (node + 1))
    )
    gpus = tuple(GpuMemory(140 * GB, 40 * GB) for _ in range(RANKS))
    memory = NodeMemory(500 * GB, 2000 * GB, 30 * GB, 64 * GB, GB // 10, gpus)
    cache = CacheStats(
        4096, 4096, 96, 32, 3968, 0, 64, 64 * GB, hits=number, misses=number, committed=9, evicted=number, expired=0,
        duplicates=0, quarantined=0,
    )  # fmt: skip
    stats = NodeStats(cache, DiskStats(1000 * GB, 100 * GB, 12_000, 1000, 10, 1), memory)
    arena = ArenaUse(64 * GB, 32 * GB, 1, 0)
    return AgentBeat(
        f"{node:056x}",
        f"host-{node:03}",
        f"incarnation-{node:03}",
        loads,
        ranks,
        arena,
        number=number,
        counters=dict.fromkeys(models, counters),
        stats=stats,
    )


def table(costs: Sequence[Cost]) -> str:
    """Return the costs in Markdown."""
    head = ("nodes", "models", "a heartbeat", "to take it in", "a scrape: series", "answer", "the loop", "the thread")
    rows = []
    for cost in costs:
        beat, answer = f"{cost.beat_bytes / 1e3:.1f} kB", f"{cost.answer_bytes / 1e6:.2f} MB"
        first = (str(cost.nodes), str(cost.models), beat, _ms(cost.beat_s))
        rows.append((*first, f"{cost.series:,}", answer, _ms(cost.copy_s), _ms(cost.scrape_s)))
    return markdown_table(head, rows)


def _ms(seconds: float) -> str:
    """Show milliseconds with two significant digits."""
    ms = seconds * 1e3
    return f"{ms:.{max(0, 1 - math.floor(math.log10(ms))) if ms > 0 else 0}f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = new_parser("bench.metrics_cost", __doc__, json_option=False)
    parser.add_argument("--nodes", type=positive_int, help="one case of your own, beside --models")
    parser.add_argument("--models", type=positive_int, default=1, help="each with a rank on every GPU")
    parser.add_argument("--rounds", type=positive_int, default=20, help="heartbeats of each node")
    args = parser.parse_args(arguments)
    cases = [(args.nodes, args.models)] if args.nodes else CASES
    print(table([measure(nodes, models, args.rounds) for nodes, models in cases]))


if __name__ == "__main__":
    main()
