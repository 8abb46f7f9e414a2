"""The options of the command about fit: `--fit`, `--memory`, what stays free, rates, and the picture."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.fit.options import MODES, STRICT
from cluster.units import parse_bytes


def add_fit(verb: argparse.ArgumentParser) -> Any:
    """Of a verb that plans a load; returns the group."""
    group = verb.add_argument_group("fit", "Whether the devices' memory holds the model.")
    group.add_argument(
        "--fit",
        choices=MODES,
        default=STRICT,
        help="strict: refuse what does not fit, and say what would (default); auto: take the first of as given, "
        "bfloat16, fp8, int8, int4 that fits",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="PART",
        help="of each GPU's memory that may be in use in all, 0 to 1",
    )
    group.add_argument("--reserve", metavar="BYTES", help="kept free on each GPU, or on each host for CPU ranks: 2GB")
    return group


def add_fit_ahead(verb: argparse.ArgumentParser) -> None:
    """Of `longshore plan`, which has no cluster to ask."""
    group = add_fit(verb)
    group.add_argument("--memory", metavar="SIZES", help='of the devices: "4x24GB" (default: the GPUs of this machine)')
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of a Ray cluster that is asked for its GPUs and what its nodes have of the model; auto: the one here",
    )
    group.add_argument("--host-memory", metavar="BYTES", help="for offload, where one GPU is too small: 60GB")
    stages = {"store": "out of the store", "network": "into a node", "disk": "off a node's disk"}
    for name, what in {**stages, "place": "into a rank's memory"}.items():
        group.add_argument(f"--{name}-rate", metavar="RATE", help=f"{what}: 5GB/s or 40Gbit/s, for the expected time")
    group.add_argument("--measured", metavar="FILE", help="rates of an earlier load: what `longshore load --json` said")
    group.add_argument("--picture", metavar="FILE.svg", help="draw ranks against layers")


def fit_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `cluster.load` and `cluster.plan`. Raises ConfigError."""
    return {
        "fit": args.fit,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "reserve_bytes": None if args.reserve is None else parse_bytes(args.reserve),
    }


def fit_ahead_options(args: argparse.Namespace) -> dict[str, Any]:
    """The same of `cluster.plan` alone."""
    rates = ("store_rate", "network_rate", "disk_rate", "place_rate", "measured")
    names = ("memory", "address", "host_memory", *rates, "picture")
    return {**fit_options(args), **{name: getattr(args, name) for name in names}}
