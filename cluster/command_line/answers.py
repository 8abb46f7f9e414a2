"""How a verb answers: one JSON document, JSON lines, or a table, on stdout. A reader that left is no failure."""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


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
    """Whether stdout is a pipe that nobody reads any more; for verbs that may have nothing to write for a long time."""
    poller = select.poll()
    try:
        poller.register(sys.stdout.fileno(), select.POLLERR)
        found = poller.poll(0)
    except (OSError, ValueError):  # no file at all
        return False
    return any(event & select.POLLERR for _, event in found)


def _forget_stdout() -> None:
    """What is still buffered goes nowhere; else Python would try, fail and complain at the very end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
