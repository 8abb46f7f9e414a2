"""The verbs about a running cluster and their options: status, events, logs, release, demo, serve, doctor."""

from __future__ import annotations

import argparse

from cluster.command_line import cluster_commands as commands
from cluster.command_line import watch_commands
from cluster.command_line.arguments import (
    Verbs,
    add_address,
    add_store,
    add_verb,
    count,
    interval_of,
    number_from_0,
    port_of,
    size_of,
)
from cluster.command_line.completion import SHELLS, run_completion
from cluster.command_line.help_texts import LOAD
from cluster.command_line.log_commands import run_logs


def add_cluster_verbs(verbs: Verbs) -> None:
    status = add_verb(verbs, "status", commands.run_status)
    status.add_argument(
        "--watch",
        nargs="?",
        type=interval_of,
        const=1.0,
        metavar="SECONDS",
        help="go on until Ctrl-C, with a look at the cluster so often (default: every second)",
    )
    add_address(status)

    events = add_verb(verbs, "events", watch_commands.run_events, "LOAD")
    events.add_argument("--follow", action="store_true", help="go on until the load is over")
    events.add_argument(
        "--until",
        choices=("end", "ready"),
        help="what to follow it to: until it has failed or was released (as --follow does), or until it is ready",
    )
    events.add_argument(
        "--after", type=number_from_0, default=0, metavar="N", help="only events with a higher number (default: all)"
    )
    add_address(events)

    logs = add_verb(verbs, "logs", run_logs)
    logs.add_argument("load", nargs="?", metavar="LOAD", help="only what is about this one, or those that begin so")
    logs.add_argument("--rank", type=number_from_0, metavar="N", help="only what is about this rank, or by its worker")
    logs.add_argument("--node", metavar="HOST", help="only of this node: its name, IP address, or Ray's id of it")
    logs.add_argument("--tail", type=count, metavar="N", help="only the last N lines (default: all)")
    logs.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    add_address(logs)

    release = add_verb(verbs, "release", commands.run_release)
    release.add_argument("model_id", nargs="?", metavar="MODEL_ID", help=LOAD)
    release.add_argument("--all", action="store_true", help="every model")
    release.add_argument("--force", action="store_true", help="also when somebody still holds it")
    release.add_argument("--warm", action="store_true", help="workers of released models that wait for the next load")
    release.add_argument("--shutdown", action="store_true", help="then end Longshore in this cluster, caches included")
    add_address(release)

    demo = add_verb(verbs, "demo", commands.run_demo)
    demo.add_argument("--size", type=size_of, default=None, metavar="BYTES", help="of the model (default: 1 GB)")
    demo.add_argument(
        "--write", metavar="FOLDER", help="only write the checkpoint, into this new folder, and leave it there"
    )

    serve = add_verb(verbs, "serve", commands.run_serve)
    serve.add_argument("--host", metavar="ADDRESS", help="to listen on (default: 127.0.0.1; others need a token)")
    serve.add_argument("--port", type=port_of, metavar="PORT", help="to listen on (default: 8000)")
    add_address(serve)

    doctor = add_verb(verbs, "doctor", commands.run_doctor)
    doctor.add_argument("uri", nargs="?", metavar="URI", help="a model or bucket that should be readable")
    doctor.add_argument(
        "--bandwidth",
        action="store_true",
        help="read from the store for 5 seconds, on all nodes at once, at most 4 GiB each (needs URI)",
    )
    add_address(doctor)
    add_store(doctor)


def add_completion(verbs: Verbs, parser: argparse.ArgumentParser) -> None:
    """`parser`: what is completed."""
    completion = add_verb(verbs, "completion", run_completion)
    completion.add_argument("shell", choices=SHELLS, help="whose script")
    completion.set_defaults(parser=parser)
