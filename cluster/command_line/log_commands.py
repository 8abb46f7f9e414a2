"""What `longshore logs` does. Returns its exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from cluster.command_line.answers import print_json, reader_left, write
from cluster.command_line.exit_codes import OK
from cluster.command_line.progress import say_on
from cluster.units import printable

if TYPE_CHECKING:
    from cluster.process_logs.log_lines import LogLine

LOOK_S = 1.0


def run_logs(args: argparse.Namespace) -> int:
    """Print lines of all nodes by time; with --follow until interrupted. Raises ClusterLost, PackageMissing."""
    from cluster.process_logs.collecting import LogCollector
    from cluster.process_logs.log_lines import LogFilter

    collector = LogCollector(args.address, LogFilter(args.load, args.rank), args.node)
    lines = collector.collect()
    told = _tell_silent(collector.silent, {})
    lines = lines[-args.tail :] if args.tail is not None else lines
    if args.json and not args.follow:
        print_json({"lines": [line.as_dict() for line in lines], "silent_nodes": collector.silent})
        return OK
    going_on = _put(lines, as_json=args.json)
    if not lines and not args.follow:
        say_on(sys.stderr, "longshore: nothing that was asked for is in the logs")
    while args.follow and going_on and not reader_left():
        time.sleep(LOOK_S)
        going_on = _put(collector.collect(), as_json=args.json)
        told = _tell_silent(collector.silent, told)
    return OK


def line_of(line: LogLine) -> str:
    """`host-a rank 3 | 2026-11-22T09:30:15.123Z WARNING ...`; nothing in a line commands a terminal."""
    return printable(f"{line.host} {line.process} | {line.text}")


def _put(lines: list[LogLine], *, as_json: bool) -> bool:
    """False when nobody reads any more."""
    return write("".join(f"{json.dumps(line.as_dict()) if as_json else line_of(line)}\n" for line in lines))


def _tell_silent(silent: dict[str, str], told: dict[str, str]) -> dict[str, str]:
    """Nodes that did not answer, each once."""
    for host, why in silent.items():
        if host not in told:
            say_on(sys.stderr, f"longshore: no logs of {host}: {why}")
    return dict(silent)
