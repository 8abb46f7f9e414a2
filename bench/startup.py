"""The seconds of a load that moves few bytes: `python -m bench.startup [--rounds N] [--json FILE]`.

    cold         new worker processes; coordinator and agent run
    warm         the workers of the model before take it over (`Config.warm_workers_s`)
    arena fresh  warm workers, every chunk of the larger model in the arena, into fresh memory
    arena kept   the same into the memory that the workers kept of the load before
    resident     the model is loaded already and is handed out

Starts a Ray cluster of its own on this machine, reads local files, prints medians over the rounds and writes JSON.
Every cold and warm round loads a model of other bytes, so that nothing comes from the arena. Each round also starts as
many empty Ray actors as a load has ranks, because no worker can start in less.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

import cluster
from bench.harness.report import markdown_table
from bench.options import new_parser, positive_int, write_json
from cluster.client import release_warm
from cluster.command_line.demo import write_llama_checkpoint
from cluster.joining.connection import disconnect

SMALL: Any = dict(hidden=512, layers=2, intermediate=1408, heads=8, kv_heads=2, vocab=4000, shards=3)
LARGE: Any = dict(hidden=2048, layers=4, intermediate=5632, heads=16, kv_heads=8, vocab=32000, shards=4)
WARM_S = 600.0
HEADINGS = ("case", "call to READY", "plan", "to first byte", "first to last byte", "last byte to READY", "GB/s")
CASES = ("cold", "warm", "arena fresh", "arena kept", "resident")
FIELDS = ("total_s", "plan_s", "first_byte_s", "load_s", "ready_after_last_byte_s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = new_parser("bench.startup", __doc__)
    parser.add_argument("--rounds", type=positive_int, default=7, help="whose median counts")
    parser.add_argument("--ranks", type=positive_int, default=2, help="of a load")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="longshore-startup-") as folder:
        found = measure(Path(folder), options.rounds, options.ranks)
    show(found)
    write_json(options.json, found)


def measure(folder: Path, rounds: int, ranks: int) -> dict[str, Any]:
    """Measure every case `rounds` times. Returns medians."""
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "device": "cpu", "progress": False}
    first = stored(folder, SMALL, 0)
    begun_s = time.monotonic()
    config = cluster.Config(warm_workers_s=WARM_S)
    model = cluster.load(first, address="local", config=config, **options)
    first_s = time.monotonic() - begun_s
    try:
        model.release()
        large, through_arena = stored(folder, LARGE, 0), {**options, "placement": "via_arena"}
        cluster.load(large, **through_arena).release()
        cases: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
        empty_s: list[float] = []
        for number in range(rounds):
            release_warm()
            empty_s.append(empty_actors_s(ranks))
            cases["cold"].append(timed(stored(folder, SMALL, 2 * number + 1), options))
            cases["warm"].append(timed(stored(folder, SMALL, 2 * number + 2), options))
            cases["arena fresh"].append(timed(large, through_arena))
            cases["arena kept"].append(timed(large, through_arena))
            with cluster.load(first, **options):
                cases["resident"].append(timed(first, options))
    finally:
        disconnect()
    medians = {
        case: {name: statistics.median(timing[name] for timing in timings) for name in timings[0]}
        for case, timings in cases.items()
    }
    return {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "rounds": rounds,
        "ranks": ranks,
        "first_load_with_cluster_start_s": first_s,
        "empty_actors_s": statistics.median(empty_s),
        "cases": medians,
        "memory_copy": copy_rates(int(cases["arena kept"][0]["placed_bytes"])),
    }


def stored(folder: Path, shape: dict[str, Any], seed: int) -> str:
    """Publish a checkpoint of bytes that no other seed has. Returns its path."""
    place = folder / f"{shape['hidden']}-{seed}"
    write_llama_checkpoint(place, **shape, seed=seed)
    cluster.publish(str(place))
    return str(place)


def timed(uri: str, options: dict[str, Any]) -> dict[str, float]:
    """Load and release. Returns the client's seconds and those of the report."""
    begun_s = time.monotonic()
    model = cluster.load(uri, **options)
    report = replace(model.report, total_s=time.monotonic() - begun_s)
    model.release()
    return {name: float(getattr(report, name)) for name in (*FIELDS, "placed_bytes")}


class Empty:
    """An actor that does nothing."""

    def hello(self) -> None:
        """Answer once the process has started."""


def empty_actors_s(count: int) -> float:
    """Return the seconds until `count` new Ray actors have answered."""
    begun_s = time.monotonic()
    actors: list[Any] = [ray.remote(Empty).options(num_cpus=0).remote() for _ in range(count)]
    ray.get([actor.hello.remote() for actor in actors])
    took_s = time.monotonic() - begun_s
    for actor in actors:
        ray.kill(actor)
    return took_s


def copy_rates(size_bytes: int) -> dict[str, float]:
    """Return the GB/s of one thread that copies as many bytes into fresh memory, then into the same again."""
    source = np.ones(size_bytes, np.uint8)
    rates, target = {}, np.empty_like(source)
    for name in ("fresh", "touched"):
        begun_s = time.monotonic()
        np.copyto(target, source)
        rates[f"{name}_gb_per_s"] = size_bytes / (time.monotonic() - begun_s) / 1e9
    return rates


def show(found: dict[str, Any]) -> None:
    """Print the table, as docs/benchmarks.md has it."""
    print(f"medians of {found['rounds']} rounds, {found['ranks']} ranks; milliseconds")
    rows = []
    for name, case in found["cases"].items():
        shown = FIELDS[:1] if name == "resident" else FIELDS
        times = (f"{case[field] * 1e3:.0f}" if field in shown else "-" for field in FIELDS)
        rate = "-" if name == "resident" else f"{case['placed_bytes'] / case['total_s'] / 1e9:.2f}"
        rows.append((name, *times, rate))
    print(markdown_table(HEADINGS, rows))
    beyond_s = found["cases"]["cold"]["first_byte_s"] - found["empty_actors_s"]
    print(
        f"{found['ranks']} empty Ray actors: {found['empty_actors_s']:.2f} s; cold first byte beyond: {beyond_s:.2f} s"
    )
    copies = found["memory_copy"]
    print(f"copy by one thread: {copies['fresh_gb_per_s']:.2f} GB/s fresh, {copies['touched_gb_per_s']:.2f} touched")
    print(f"first load, the start of Ray included: {found['first_load_with_cluster_start_s']:.1f} s")


if __name__ == "__main__":
    main()
