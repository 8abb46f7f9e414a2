"""The seconds of a load that moves few bytes: `python -m bench.startup [--rounds N]`.

    cold         new worker processes; coordinator and agent run
    warm         the workers of the model before take it over (`Config.warm_workers_s`)
    resident     the model is loaded already and is handed out

Starts a Ray cluster of its own on this machine, reads local files, and prints medians over the rounds. Every cold and
warm round loads a model of other bytes, so that nothing comes from the arena. Each round also starts as many empty Ray
actors as a load has ranks, because no worker can start in less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

import cluster
from bench.harness.report import markdown_table
from bench.options import new_parser, positive_int
from cluster.client import release_warm
from cluster.command_line.demo import write_llama_checkpoint
from cluster.joining.connection import disconnect

SHAPE: Any = dict(hidden=512, layers=2, intermediate=1408, heads=8, kv_heads=2, vocab=4000, shards=3)
WARM_S = 600.0
HEADINGS = ("case", "call to READY", "plan", "to first byte", "first to last byte", "last byte to READY")
FIELDS = ("total_s", "plan_s", "first_byte_s", "load_s", "ready_after_last_byte_s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = new_parser("bench.startup", __doc__)
    parser.add_argument("--rounds", type=positive_int, default=7, help="whose median counts")
    parser.add_argument("--ranks", type=positive_int, default=2, help="of a load")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="longshore-startup-") as folder:
        measure(Path(folder), options.rounds, options.ranks)


def measure(folder: Path, rounds: int, ranks: int) -> None:
    """Measure every case `rounds` times, and print the medians."""
    options: dict[str, Any] = {"tensor_parallel_size": ranks, "device": "cpu", "progress": False}
    cases: dict[str, list[tuple[float, ...]]] = {"cold": [], "warm": [], "resident": []}
    empty_s: list[float] = []
    first = stored(folder, 0)
    begun_s = time.monotonic()
    config = cluster.Config(warm_workers_s=WARM_S)
    model = cluster.load(first, address="local", config=config, **options)
    first_s = time.monotonic() - begun_s
    try:
        model.release()
        for number in range(rounds):
            release_warm()
            empty_s.append(empty_actors_s(ranks))
            cases["cold"].append(timed(stored(folder, 2 * number + 1), options))
            cases["warm"].append(timed(stored(folder, 2 * number + 2), options))
            with cluster.load(first, **options):
                cases["resident"].append(timed(first, options))
    finally:
        disconnect()
    medians = {case: [statistics.median(each) for each in zip(*times, strict=True)] for case, times in cases.items()}
    print(f"medians of {rounds} rounds, {ranks} ranks; milliseconds")
    rows = [(case, *(f"{seconds * 1e3:.0f}" for seconds in times)) for case, times in medians.items()]
    rows[-1] = (*rows[-1][:2], *"----")  # resident: only handed out
    rows.append((f"{ranks} empty Ray actors", f"{statistics.median(empty_s) * 1e3:.0f}", *"----"))
    rows.append(("first load, the start of Ray included", f"{first_s * 1e3:.0f}", *"----"))
    print(markdown_table(HEADINGS, rows))


def stored(folder: Path, seed: int) -> str:
    """Publish a checkpoint of bytes that no other seed has. Returns its path."""
    place = folder / str(seed)
    write_llama_checkpoint(place, **SHAPE, seed=seed)
    cluster.publish(str(place))
    return str(place)


def timed(uri: str, options: dict[str, Any]) -> tuple[float, ...]:
    """Load and release. Returns the client's seconds and those of the report."""
    begun_s = time.monotonic()
    model = cluster.load(uri, **options)
    report = replace(model.report, total_s=time.monotonic() - begun_s)
    model.release()
    return tuple(getattr(report, name) for name in FIELDS)


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


if __name__ == "__main__":
    main()
