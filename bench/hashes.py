"""The cost of each hash on this machine's CPU: `python -m bench.hashes`.

    warm   pieces of 1 MiB that are in the core's cache, as on the data path, which hashes what it has just read
    cold   chunks of 8 MiB out of memory, as in a second pass over a chunk

Each with one thread and with two, which hash different bytes. GB/s is wall time, CPU s/GB what all threads used.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Sequence
from itertools import cycle

import numpy as np

from bench.contenders.buffers import in_threads
from bench.harness.report import markdown_table
from bench.options import new_parser, positive_float, positive_int
from storage.checksum import HASH_NAMES, MANIFEST_HASH_NAMES, new_hasher

WARM_PIECE_BYTES = 1 << 20
COLD_CHUNK_BYTES = 8 << 20
COLD_CHUNKS = 64  # of each thread: more than a core's share of any cache
_THREADS = (1, 2)

# (hash, "warm" or "cold", threads) -> (GB/s, CPU s/GB)
Costs = dict[tuple[str, str, int], tuple[float, ...]]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the table."""
    parser = new_parser("bench.hashes", __doc__)
    parser.add_argument("--seconds", type=positive_float, default=0.2, help="of one measurement")
    parser.add_argument("--rounds", type=positive_int, default=5, help="whose median counts")
    options = parser.parse_args(arguments)
    print(table(measure_hashes(options.seconds, options.rounds)))


def measure_hashes(seconds: float, rounds: int) -> Costs:
    """Return medians of every hash in every case. Rounds are interleaved, so that a busy moment hits all of them."""
    random = np.random.default_rng(1)
    warm = [random.integers(0, 256, WARM_PIECE_BYTES, np.uint8).data for _ in _THREADS]
    cold = [np.tile(random.integers(0, 256, COLD_CHUNK_BYTES, np.uint8), COLD_CHUNKS).data for _ in _THREADS]
    cases = [
        (name, memory, pieces, threads)
        for name in sorted(HASH_NAMES, key=lambda name: (name not in MANIFEST_HASH_NAMES, name))
        for memory, pieces in (("warm", warm), ("cold", cold))
        for threads in _THREADS
    ]
    found: list[list[tuple[float, float]]] = [[] for _ in cases]
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for (name, _, pieces, threads), costs in zip(cases, found, strict=True):
            costs.append(_measure(name, pieces[:threads], seconds))
    medians = [tuple(map(statistics.median, zip(*costs, strict=True))) for costs in found]
    return {(name, memory, threads): each for (name, memory, _, threads), each in zip(cases, medians, strict=True)}


def table(costs: Costs) -> str:
    """Return a table in Markdown, a hash per line."""
    cases = [(memory, threads) for memory in ("warm", "cold") for threads in _THREADS]
    titles = [f"{memory}, {threads} thread{'s' * (threads > 1)}" for memory, threads in cases]
    rows = []
    for name in dict.fromkeys(name for name, _, _ in costs):
        found = (costs[name, memory, threads] for memory, threads in cases)
        rows.append([name, *(f"{gb_per_s:.2f} ({cpu_s_per_gb:.2f})" for gb_per_s, cpu_s_per_gb in found)])
    return markdown_table(["GB/s (CPU s/GB)", *titles], rows)


def _measure(name: str, memories: Sequence[memoryview], seconds: float) -> tuple[float, float]:
    """Hash each memory again and again in a thread of its own. Returns (GB/s, CPU s/GB) of all of them."""
    found: list[tuple[int, float, float]] = []
    ready, todo = threading.Barrier(len(memories)), iter(memories)

    def work() -> None:
        hasher, memory = new_hasher(name), next(todo)
        pieces = cycle([memory[at : at + COLD_CHUNK_BYTES] for at in range(0, len(memory), COLD_CHUNK_BYTES)])
        hasher.update(next(pieces))
        ready.wait()
        begun_s, end_s, total = time.thread_time(), time.perf_counter() + seconds, 0
        while time.perf_counter() < end_s:
            piece = next(pieces)
            hasher.update(piece)
            total += len(piece)
        hasher.digest()
        found.append((total, time.thread_time() - begun_s, time.perf_counter() - end_s + seconds))

    in_threads(len(memories), work)
    hashed_bytes, cpu_s, wall_s = zip(*found, strict=True)
    gigabytes = sum(hashed_bytes) / 1e9
    return gigabytes / max(wall_s), sum(cpu_s) / gigabytes


if __name__ == "__main__":
    main()
