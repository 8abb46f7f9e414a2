"""What the verbs' options have in common: values, and the groups that several verbs take."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from cluster.command_line.help_texts import PAGES, description_of, epilog_of
from cluster.errors import ConfigError
from cluster.fit.options import MODES, STRICT, GivenMap
from cluster.units import parse_bytes

CREDENTIALS = (  # broken by hand: argparse fills no descriptions here
    "Credentials come from the environment, the AWS profile or the machine's role,\nnever from arguments."
)

MOST_PORT = 65535
LEAST_INTERVAL_S = 0.1  # between two looks at a cluster

Verbs = Any  # what `add_subparsers` returns
Run = Callable[[argparse.Namespace], int]


def add_verb(verbs: Verbs, name: str, run: Run, target: str = "") -> argparse.ArgumentParser:
    """A verb with its page of help and the options that all have; `target`: its first argument."""
    page = PAGES[name]
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=page.summary,
        description=description_of(page),
        epilog=epilog_of(page),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if target:
        verb.add_argument(target.lower(), metavar=target, help=page.target)
    verb.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verb.set_defaults(run=run)
    return verb


def add_trusted(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--revision", metavar="HEX", help="refuse every other revision of the model (64 digits)")
    verb.add_argument(
        "--trusted-key",
        action="append",
        metavar="KEY",
        help="refuse a manifest that is not signed with this public key (base64 or a file, :NAME behind it where the "
        "key is trusted for that model alone; may be given again; default: LONGSHORE_TRUSTED_KEYS)",
    )
    add_signed_name(verb, "it must be signed under this name")


def add_signed_name(verb: argparse.ArgumentParser, what: str) -> None:
    verb.add_argument("--signed-name", metavar="NAME", help=f"{what} (default: the path without scheme and bucket)")


def trusted_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"trusted_keys": args.trusted_key, "signed_name": args.signed_name, "revision": args.revision}


def add_address(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster (default: RAY_ADDRESS, else a local one)"
    )


def add_store(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("store", CREDENTIALS)
    group.add_argument("--endpoint-url", metavar="URL", help="of an S3-compatible server")
    group.add_argument("--region", metavar="NAME", help="of the bucket (default: as the environment says)")
    group.add_argument("--profile", metavar="NAME", help="named profile of the AWS configuration")
    group.add_argument("--anonymous", action="store_true", help="send unsigned requests (public buckets)")


def store_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "endpoint_url": args.endpoint_url,
        "region": args.region,
        "profile": args.profile,
        "anonymous": args.anonymous,
    }


def count(text: str) -> int:
    """A whole number from 1 on. Raises ArgumentTypeError, as the others do."""
    return _whole(text, "a whole number from 1 on", least=1)


def number_from_0(text: str) -> int:
    return _whole(text, "a whole number from 0 on")


def port_of(text: str) -> int:
    return _whole(text, f"a port from 1 to {MOST_PORT}", least=1, most=MOST_PORT)


def _whole(text: str, what: str, least: int = 0, most: float = math.inf) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def seconds_of(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def interval_of(text: str) -> float:
    seconds = seconds_of(text)
    if seconds < LEAST_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is less than {LEAST_INTERVAL_S} s")
    return seconds


def size_of(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


MAX_FILE_BYTES = 64 << 20


def add_device_map(verb: argparse.ArgumentParser) -> None:
    """Of a verb that plans a load."""
    group = verb.add_argument_group("device map", "One rank with several devices, as Hugging Face Accelerate has it.")
    group.add_argument(
        "--device-map",
        metavar="MAP",
        help="auto, balanced, balanced_low_0, sequential; or modules and devices: 'model.layers.0=0,lm_head=cpu', "
        "or a JSON file of them",
    )
    group.add_argument(
        "--max-memory",
        metavar="LIMITS",
        help="of each device: '0=20GB,1=20GB,cpu=60GB' (default: what the node has); alone: with --device-map auto",
    )
    group.add_argument(
        "--offload-folder",
        metavar="FOLDER",
        help="new or empty, on the node that loads: for what has no room elsewhere",
    )


def device_map_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `cluster.load` and `cluster.plan`. Raises ConfigError."""
    given = args.device_map
    return {
        "device_map": None if given is None else _device_map(given),
        "max_memory": None if args.max_memory is None else _pairs("--max-memory", args.max_memory),
        "offload_folder": args.offload_folder,
    }


def _device_map(given: str) -> GivenMap:
    if given.endswith(".json"):
        return _read_file(given)
    return _pairs("--device-map", given) if "=" in given else given


def _pairs(option: str, given: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in given.split(","):
        name, equals, value = entry.strip().rpartition("=")
        if not equals or not value:
            raise ConfigError(f"{option}: {entry!r:.100} is not NAME=VALUE")
        if name in found:
            raise ConfigError(f"{option} names {name!r:.100} twice")
        found[name] = value
    return found


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--device-map: cannot read {path!r:.200}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(device, str | int) for device in found.values()):
        raise ConfigError(f"--device-map: {path!r:.200} is no JSON object of modules and devices")
    return found


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
