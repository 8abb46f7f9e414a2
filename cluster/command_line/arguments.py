"""Options of the verbs: those of `LoadOptions`, made from its fields, and the values that argparse reads."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import Field
from typing import Any

from cluster.command_line.help_texts import PAGES, description_of, epilog_of
from cluster.errors import ConfigError
from cluster.fit.options import GivenMap
from cluster.options import LOAD, LoadOptions, about, collect, options_of
from cluster.units import parse_bytes

CREDENTIALS = (  # broken by hand: argparse fills no descriptions here
    "Credentials come from the environment, the AWS profile or the machine's role,\nnever from arguments."
)

MOST_PORT = 65535
LEAST_INTERVAL_S = 0.1  # between two requests for a cluster's status

Verbs = Any  # what `add_subparsers` returns
Run = Callable[[argparse.Namespace], int]


def add_verb(verbs: Verbs, name: str, run: Run, target: str = "") -> argparse.ArgumentParser:
    """Add a verb with its help page and the options of every verb; `target`: its first argument."""
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


def add_signed_name(verb: argparse.ArgumentParser) -> None:
    """Add the option of a verb that signs."""
    verb.add_argument(
        "--signed-name", metavar="NAME", help="name to sign it under (default: the path without scheme and bucket)"
    )


def add_address(verb: argparse.ArgumentParser) -> None:
    """Add `--address` to a verb."""
    verb.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster (default: RAY_ADDRESS, else a local one)"
    )


def count(text: str) -> int:
    """Return a whole number from 1 on. Raises ArgumentTypeError, as the next functions do."""
    return _whole(text, "a whole number from 1 on", least=1)


def number_from_0(text: str) -> int:
    """Return a whole number from 0 on. Raises ArgumentTypeError for any other text."""
    return _whole(text, "a whole number from 0 on")


def port_of(text: str) -> int:
    """Return a TCP port from 1 to 65535. Raises ArgumentTypeError for any other text."""
    return _whole(text, f"a port from 1 to {MOST_PORT}", least=1, most=MOST_PORT)


def _whole(text: str, what: str, least: int = 0, most: float = math.inf) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def seconds_of(text: str) -> float:
    """Return a number of seconds. Raises ArgumentTypeError for any other text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def interval_of(text: str) -> float:
    """Return a number of seconds between two looks. Raises ArgumentTypeError for any other text."""
    seconds = seconds_of(text)
    if seconds < LEAST_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is less than {LEAST_INTERVAL_S} s")
    return seconds


def size_of(text: str) -> int:
    """Return the number of bytes of a size such as 2GB. Raises ArgumentTypeError for any other text."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


MAX_FILE_BYTES = 64 << 20


STORE = ("endpoint_url", "region", "profile", "anonymous")
TRUSTED = ("revision", "trusted_keys", "signed_name")
SECTIONS = {
    "device map": "One rank with several devices, as in Hugging Face Accelerate.",
    "fit": "Whether the devices' memory holds the model.",
    "store": CREDENTIALS,
}


def command_options(function: str) -> list[Field[Any]]:
    """Return the options that the verb for `cluster.load` or `cluster.plan` has."""
    return [one for one in options_of(function) if about(one).command]


def add_options(verb: argparse.ArgumentParser, names: Iterable[str]) -> dict[str, Any]:
    """Add options of `LoadOptions`; return the sections of the help by name."""
    wanted = set(names)
    sections: dict[str, Any] = {"": verb}
    for one in options_of(LOAD):
        if one.name in wanted:
            section = about(one).section
            if section not in sections:
                sections[section] = verb.add_argument_group(section, SECTIONS[section])
            sections[section].add_argument(*flags_of(one), dest=one.name, **{"help": about(one).help, **_reader(one)})
    return sections


def flags_of(one: Field[Any]) -> list[str]:
    """Return how the command line spells an option."""
    flag = about(one).flag or f"--{one.name.replace('_', '-')}"
    return [about(one).short, flag] if about(one).short else [flag]


def _reader(one: Field[Any]) -> dict[str, Any]:
    """Return how argparse reads an option, by its type."""
    told = about(one)
    if one.type == "bool":
        if told.command_default is None:
            return {"action": "store_true"}
        return {"action": argparse.BooleanOptionalAction, "default": told.command_default}
    if told.choices:
        return {"choices": told.choices, "default": one.default}
    how = {"metavar": told.metavar, "default": one.default}
    if str(one.type).startswith("Sequence"):
        return {**how, "action": "append", "help": f"{told.help} (may be given again)"}
    kinds: dict[Any, Any] = {"int": count, "float": seconds_of, "float | None": float}
    return {**how, "type": kinds.get(one.type)}


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of options by name, for a function that takes them as keywords."""
    return {name: getattr(args, name) for name in names}


def load_options(args: argparse.Namespace) -> LoadOptions:
    """Return the options of a load or plan. Raises ConfigError."""
    read: dict[str, Callable[[str], Any]] = {
        "reserve_bytes": parse_bytes,
        "device_map": _device_map,
        "max_memory": _max_memory,
    }
    given = {**vars(args), "model_uri": args.uri}
    texts = {name: given[name] for name in read if given[name] is not None}
    return collect(LoadOptions, {**given, **{name: read[name](text) for name, text in texts.items()}})


def _max_memory(given: str) -> dict[str, str]:
    return _pairs("--max-memory", given)


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


def add_plan_options(verb: argparse.ArgumentParser, group: Any) -> None:
    """Add the options of `longshore plan` alone; `group`: the section about memory."""
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
    verb.add_argument("--ranks-per-node", type=count, metavar="N", help="for the stats per node (default: all)")
    verb.add_argument("--rank", type=int, metavar="N", help="show its part of every tensor too")
