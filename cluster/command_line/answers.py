"""Prints a verb's answer to stdout: one JSON document, JSON lines, or a table. A reader that left is no failure."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.errors import (
    ClusterError,
    ClusterLost,
    ConfigError,
    ConvertError,
    DeviceUnavailable,
    ModelConfigError,
    ModelNotFound,
    NotEnoughResources,
    PackageMissing,
    PlanError,
    VersionMismatch,
)
from cluster.joining.patience import Terminated
from cluster.units import printable
from longshore.installation import PackageShadowed
from storage.errors import (
    ArenaError,
    CheckpointError,
    DependencyChanged,
    IntegrityError,
    InvalidKey,
    InvalidUri,
    LongshoreError,
    ManifestError,
    StoreError,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cluster.telemetry.chunk_map import LoadEvent


def answer(args: argparse.Namespace, document: dict[str, Any], table: Callable[[], RenderableType]) -> None:
    """The document with --json, else the table, which is only made then."""
    if args.json:
        print_json(document)
        return
    from cluster.command_line.tables import console_on

    console = console_on(sys.stdout)
    with console.capture() as captured:
        console.print(table(), soft_wrap=False)
    write(captured.get())


def print_json(document: dict[str, Any]) -> None:
    """One document, one line feed at its end."""
    write(json.dumps(document, indent=2, default=str) + "\n")


def print_json_line(document: dict[str, Any]) -> None:
    """One document on a line of its own, among others."""
    write(json.dumps(document, default=str) + "\n")


def write(text: str) -> bool:
    """Write to stdout. A reader that has seen enough and left (`| head`) changes no exit code: the work is done.

    False when it has left. Raises OSError for anything else, such as a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return False
    except OSError:
        _forget_stdout()
        raise
    return True


def reader_left() -> bool:
    """Return whether stdout is a pipe without a reader, for verbs that may write nothing for a long time."""
    poller = select.poll()
    try:
        poller.register(sys.stdout.fileno(), select.POLLERR)
        found = poller.poll(0)
    except (OSError, ValueError):  # no file at all
        return False
    return any(event & select.POLLERR for _, event in found)


def _forget_stdout() -> None:
    """Drop what is still buffered. Python would fail to write it at exit and print an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


OK = 0
FAILED = 1
USAGE = 2  # argparse's own
INTEGRITY = 6
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
TERMINATED = 143  # 128 + SIGTERM


@dataclass(frozen=True, slots=True)
class ExitCode:
    """One row: errors of these kinds, and kinds below them that no other row names, end with `code`."""

    code: int
    meaning: str
    errors: tuple[type[BaseException], ...] = ()


EXIT_CODES = (
    ExitCode(OK, "done"),
    ExitCode(FAILED, "the load, publish, check or call failed", (LongshoreError, Exception)),
    ExitCode(
        USAGE,
        "wrong arguments or settings, or no such model in the cluster",
        (ConfigError, ModelNotFound, InvalidUri, InvalidKey),
    ),
    ExitCode(
        3,
        "refused before anything moved: no loadable checkpoint there, does not fit, cannot be cut as asked",
        (PlanError, CheckpointError, ModelConfigError, ConvertError),
    ),
    ExitCode(
        4,
        "not enough GPUs, shared memory or other resources",
        (NotEnoughResources, DeviceUnavailable, ArenaError),
    ),
    ExitCode(
        5, "the store: unreachable, refused, no such bucket, an object that is missing or has changed", (StoreError,)
    ),
    ExitCode(INTEGRITY, "integrity: bytes or manifest are not the published ones", (IntegrityError, ManifestError)),
    ExitCode(
        7,
        "the cluster: lost, without the package, of another version, or our packages are shadowed",
        (ClusterError, ClusterLost, VersionMismatch, PackageMissing, PackageShadowed, DependencyChanged),
    ),
    ExitCode(
        INTERRUPTED, "interrupted with Ctrl-C; a load that was to stay goes on in the cluster", (KeyboardInterrupt,)
    ),
    ExitCode(TERMINATED, "ended with SIGTERM", (Terminated,)),
)
_CODE_OF = {kind: row.code for row in EXIT_CODES for kind in row.errors}


def exit_code(error: BaseException) -> int:
    """The code of the nearest class of `error` that the table names; 1 for what nobody foresaw."""
    return next((_CODE_OF[kind] for kind in type(error).__mro__ if kind in _CODE_OF), 1)


STYLES = {
    "rank_lost": "bold red",
    "moved": "yellow",
    "peer_left_out": "yellow",
    "rank_replaced": "yellow",
    "rank_ready": "green",
}


def time_of_day(at_s: float) -> str:
    """In this machine's time zone, to a tenth of a second."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s % 1 * 10)}"


def date_and_time(at_s: float) -> str:
    """UTC, as logs have it."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at_s))}.{int(at_s % 1 * 1000):03d}Z"


def what_of(event: LoadEvent) -> str:
    """Return an event's text in one line, whatever its message contains."""
    who = "" if event.rank is None else f"rank {event.rank}{f' on {event.host}' if event.host else ''}: "
    return printable(f"{who}{event.message}").replace("\n", "\\n")


def style_of(event: LoadEvent) -> str:
    """For a terminal; empty: as any other text."""
    return "bold red" if event.details.get("state") == "failed" else STYLES.get(event.kind, "")


def line_of_event(event: LoadEvent) -> str:
    """With its number, to go on from (`--after`)."""
    return f"{date_and_time(event.at_s)} {event.number:>5} {printable(event.kind):<13} {what_of(event)}"
