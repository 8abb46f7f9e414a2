"""The options of the command about device maps: `--device-map`, `--max-memory`, `--offload-folder`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cluster.device_map.options import GivenMap
from cluster.errors import ConfigError

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
