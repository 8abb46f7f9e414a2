"""What the verbs' options have in common: values, and the groups that several verbs take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from cluster.command_line.help_pages import description_of, epilog_of
from cluster.command_line.help_texts import PAGES
from cluster.errors import ConfigError
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
