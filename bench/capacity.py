"""Cores, link and memory that a node needs for a rate, from measured loads: `python -m bench.capacity [--json FILE]`.

A load costs processor seconds that do not depend on its size, and some for each GB. Both follow from warm loads of two
sizes in the results of `bench.run`. The rest is arithmetic with the assumptions that are options here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness.report import markdown_table
from bench.harness.rounds import REPOSITORY
from bench.options import new_parser, positive_float, write_json

RATES_GB_S = (1.0, 5.0, 12.5, 50.0)
CONNECTION_GB_S = 0.1  # of one connection to the store
CHUNK_BYTES = 8 << 20
WIRE_BITS = 8 * 1538 / 1448  # bits on an Ethernet of 1,500-byte frames for each byte of an answer
# Bytes of memory traffic for each byte loaded: the card writes, the kernel's copy out of the socket reads and writes,
# the hash reads what is in the processor's cache, and a copy out of the arena reads and writes.
ARENA_TRAFFIC, DIRECT_TRAFFIC = 5, 3
# title, contender, scene and the suffix of its cases
PATHS = (
    ("through the arena, BLAKE3", "longshore_arena", "tp4/http", ""),
    ("through the arena, not verified", "longshore_arena", "tp4/http", "_unverified"),
    ("direct, BLAKE3", "longshore_direct", "fsdp4/http", ""),
    ("direct, not verified", "longshore_direct", "fsdp4/http", "_unverified"),
    ("through the arena, BLAKE3, TLS", "longshore_arena", "tp4/https", ""),
    ("direct, BLAKE3, TLS", "longshore_direct", "fsdp4/https", ""),
)


@dataclass(frozen=True, slots=True)
class PathCost:
    """The processor time of loads on one path."""

    title: str
    fixed_cpu_s: float  # of a load of no bytes
    cpu_s_per_gb: float


def path_costs(results: Mapping[str, Any]) -> list[PathCost]:
    """Return the cost of each path that was measured with two sizes. `results`: as results.json has them."""
    cases = {entry["id"]: entry["cases"] for entry in results["entries"]}
    costs = []
    for title, contender, scene, suffix in PATHS:
        found = cases.get(f"{contender}@{scene}", {})
        whole, part = found.get(f"warm{suffix}"), found.get(f"part{suffix}")
        if whole and part and whole["bytes"] > part["bytes"]:
            slope = (whole["cpu_s"] - part["cpu_s"]) / (whole["bytes"] - part["bytes"]) * 1e9
            costs.append(PathCost(title, part["cpu_s"] - slope * part["bytes"] / 1e9, slope))
    return costs


def cores_table(costs: Sequence[PathCost], rates: Sequence[float]) -> str:
    """Return the cores that each path keeps busy at each rate, in Markdown."""
    rows = [
        (
            cost.title,
            f"{cost.fixed_cpu_s:.2f}",
            f"{cost.cpu_s_per_gb:.2f}",
            *(f"{rate * cost.cpu_s_per_gb:.1f}" for rate in rates),
        )
        for cost in costs
    ]
    return markdown_table(("path", "CPU s a load", "CPU s/GB", *(f"cores at {rate:g} GB/s" for rate in rates)), rows)


def node_table(rates: Sequence[float], connection_gb_s: float) -> str:
    """Return link, requests and memory of a node at each rate, in Markdown."""
    rows = []
    for rate in rates:
        requests = max(1, round(rate / connection_gb_s))
        in_flight = f"{requests * CHUNK_BYTES / 2**30:.2f} GiB"
        traffic = f"{rate * ARENA_TRAFFIC:g} / {rate * DIRECT_TRAFFIC:g} GB/s"
        rows.append((f"{rate:g} GB/s", f"{rate * WIRE_BITS:.1f} Gbit/s", str(requests), in_flight, traffic))
    head = ("rate", "on the wire", "requests in flight", "chunks in flight", "memory traffic, arena / direct")
    return markdown_table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. Returns 0; 2 when there are no results."""
    parser = new_parser("bench.capacity", __doc__)
    results = REPOSITORY / "bench" / "out" / "results.json"
    parser.add_argument("--results", type=Path, default=results, help="what bench.run wrote")
    parser.add_argument("--rates", type=positive_float, nargs="+", default=RATES_GB_S, help="GB/s of a node")
    connection = "GB/s that the store sends on one connection"
    parser.add_argument("--connection", type=positive_float, default=CONNECTION_GB_S, help=connection)
    options = parser.parse_args(arguments)
    try:
        costs = path_costs(json.loads(options.results.read_text()))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"no results of bench.run in {options.results}: {error}")
    print(f"{cores_table(costs, options.rates)}\n\n{node_table(options.rates, options.connection)}")
    write_json(options.json, [asdict(cost) for cost in costs])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
