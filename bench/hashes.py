"""What each hash of the project costs on this machine's CPU: `python -m bench.hashes [--json FILE]`.

    warm   pieces of 1 MiB that the core has in its cache: as the data path hashes what it has just read
    cold   chunks of 8 MiB out of memory: what a second pass over a chunk would cost

Each with one thread and with two, which hash different bytes. GB/s is wall time, CPU s/GB what all threads used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from bench.arguments import output_file, positive_float, positive_int
from storage.checksum import HASH_NAMES, MANIFEST_HASH_NAMES, new_hasher

WARM_PIECE_BYTES = 1 << 20
COLD_CHUNK_BYTES = 8 << 20
_CACHES_OVER = 2  # cold: this many times the largest cache, between the two times that a byte is hashed
_LEAST_COLD_BYTES, _MOST_COLD_BYTES = 128 << 20, 1 << 30  # of one thread
_THREADS = (1, 2)

Pieces = Callable[[int], Iterator[memoryview]]  # of a thread, endless


@dataclass(frozen=True, slots=True)
class HashCost:
    """One hash in one of the cases."""

    name: str
    memory: str  # "warm" or "cold"
    threads: int
    gb_per_s: float
    cpu_s_per_gb: float


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hashes", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=positive_float, default=0.2, help="of one measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=positive_int, default=5, help="whose median counts (default: %(default)s)")
    parser.add_argument("--json", type=output_file, help="write the stats there too")
    options = parser.parse_args(arguments)
    costs = measure_hashes(options.seconds, options.rounds, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(costs))
    if options.json:
        found = {"cpu_count": os.cpu_count(), "hashes": [asdict(cost) for cost in costs]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure_hashes(seconds: float, rounds: int, say: Callable[[str], None] = lambda _: None) -> list[HashCost]:
    """Every hash in every case, rounds interleaved so that a busy moment hits all of them; medians.

    `say` is told of every round that begins.
    """
    cold_bytes = _cold_bytes()
    random = np.random.default_rng(1)
    chunk = random.integers(0, 256, COLD_CHUNK_BYTES, np.uint8)
    cold = np.tile(chunk, max(_THREADS) * cold_bytes // COLD_CHUNK_BYTES).data
    warm = [random.integers(0, 256, WARM_PIECE_BYTES, np.uint8).data for _ in range(max(_THREADS))]

    def cold_pieces(thread: int) -> Iterator[memoryview]:
        own = cold[thread * cold_bytes : (thread + 1) * cold_bytes]
        return cycle([own[at : at + COLD_CHUNK_BYTES] for at in range(0, cold_bytes, COLD_CHUNK_BYTES)])

    def warm_pieces(thread: int) -> Iterator[memoryview]:
        return cycle([warm[thread]])

    cases: list[tuple[str, str, Pieces, int]] = [
        (name, memory, pieces, threads)
        for name in sorted(HASH_NAMES, key=lambda name: (name not in MANIFEST_HASH_NAMES, name))
        for memory, pieces in (("warm", warm_pieces), ("cold", cold_pieces))
        for threads in _THREADS
    ]
    found: list[list[HashCost]] = [[] for _ in cases]
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}: {len(cases)} measurements of {seconds:g} s")
        for (name, memory, pieces, threads), costs in zip(cases, found, strict=True):
            costs.append(_measure(name, memory, pieces, threads, seconds))
    return [
        HashCost(
            name,
            memory,
            threads,
            statistics.median(cost.gb_per_s for cost in costs),
            statistics.median(cost.cpu_s_per_gb for cost in costs),
        )
        for (name, memory, _, threads), costs in zip(cases, found, strict=True)
    ]


def table(costs: list[HashCost]) -> str:
    """In Markdown, a hash per line."""
    by_case = {(cost.name, cost.memory, cost.threads): cost for cost in costs}
    cases = [(memory, threads) for memory in ("warm", "cold") for threads in _THREADS]
    titles = [f"{memory}, {threads} thread{'s' * (threads > 1)}" for memory, threads in cases]
    lines = [f"| GB/s (CPU s/GB) | {' | '.join(titles)} |", "|---|" + "---|" * len(cases)]
    for name in dict.fromkeys(cost.name for cost in costs):
        row = [by_case[name, memory, threads] for memory, threads in cases]
        lines.append(f"| {name} | " + " | ".join(f"{c.gb_per_s:.2f} ({c.cpu_s_per_gb:.2f})" for c in row) + " |")
    return "\n".join(lines)


def _measure(name: str, memory: str, pieces: Pieces, threads: int, seconds: float) -> HashCost:
    hashed_bytes, cpu_s = [0] * threads, [0.0] * threads
    ready = threading.Barrier(threads + 1)

    def work(thread: int) -> None:
        hasher, own = new_hasher(name), pieces(thread)
        hasher.update(next(own))
        ready.wait()
        began_s, end_s, total = time.thread_time(), time.perf_counter() + seconds, 0
        while time.perf_counter() < end_s:
            piece = next(own)
            hasher.update(piece)
            total += len(piece)
        hasher.digest()
        hashed_bytes[thread], cpu_s[thread] = total, time.thread_time() - began_s

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    began_s = time.perf_counter()
    for worker in workers:
        worker.join()
    gigabytes = sum(hashed_bytes) / 1e9
    return HashCost(name, memory, threads, gigabytes / (time.perf_counter() - began_s), sum(cpu_s) / gigabytes)


def _cold_bytes() -> int:
    """Memory of one thread that no cache holds."""
    caches = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K"):
            caches.append(int(text[:-1]) << 10)
    wanted = max(max(caches) * _CACHES_OVER, _LEAST_COLD_BYTES)
    return min(wanted, _MOST_COLD_BYTES) // COLD_CHUNK_BYTES * COLD_CHUNK_BYTES


if __name__ == "__main__":
    sys.exit(main())
