"""Verbs about a running cluster: status, release, serve, doctor, demo. Each returns its exit code.

As in `cluster.command_line.checkpoint_commands`, what a verb needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.command_line import watch_commands
from cluster.command_line.answers import FAILED, OK, answer, print_json, reader_left, write
from cluster.command_line.arguments import (
    STORE,
    Verbs,
    add_address,
    add_options,
    add_verb,
    count,
    given_options,
    interval_of,
    number_from_0,
    port_of,
    seconds_of,
    size_of,
)
from cluster.command_line.help_texts import LOAD, SHELLS, run_completion
from cluster.command_line.progress import StagedDisplay, byte_counter, load_counter, write_line
from cluster.command_line.watch_commands import watch_status
from cluster.errors import ClusterLost, ConfigError, ModelNotFound
from cluster.units import printable, show_bytes
from longshore.installation import check_packages
from storage.errors import LongshoreError

if TYPE_CHECKING:
    from cluster.client import Released
    from cluster.telemetry.process_logs import LogLine


def run_status(args: argparse.Namespace) -> int:
    """Show the models and nodes of a cluster; with --watch until interrupted."""
    from cluster import client
    from cluster.command_line.tables import status_table

    if args.watch is not None:
        return watch_status(args)

    status = client.status(args.address)
    answer(args, status.as_dict(), lambda: status_table(status))
    return OK


def run_release(args: argparse.Namespace) -> int:
    """Free one model or --all, end idle workers with --warm; --shutdown ends coordinator, agents and arenas too."""
    from cluster import client
    from cluster.command_line.tables import cell
    from cluster.command_line.watch_commands import full_id

    if (args.model_id is None) != (args.all or args.warm or args.shutdown):
        raise ConfigError("name one model, or say --all", hint="`longshore status` lists the models")
    wanted = [args.model_id] if args.model_id is not None else []
    if args.all:
        wanted = [model.progress.model_id for model in client.status(args.address).models]
    elif wanted:
        wanted = [full_id(args.model_id, client.status(args.address))]
    results, failed = _release_each(wanted, args)
    warm = client.release_warm(address=args.address) if args.warm else 0
    if args.shutdown:
        client.shutdown(args.address)
    lines = [str(result) for result in results]
    if not lines and (failed or args.all):
        lines.append("nothing was released" if failed else "nothing to release")
    lines += [f"{warm} idle worker groups ended"] * args.warm
    lines += ["longshore ended in this cluster, with all its models"] * args.shutdown
    document = {
        "released": [result.model_id for result in results if result.freed],
        "held": {result.model_id: result.holders for result in results if not result.freed},
        "failed": {model_id: str(error) for model_id, error in failed.items()},
        "worker_groups_ended": warm,
        "shutdown": args.shutdown,
    }
    answer(args, document, lambda: cell("; ".join(lines)))
    return FAILED if failed else OK


def _release_each(
    model_ids: Sequence[str], args: argparse.Namespace
) -> tuple[list[Released], dict[str, LongshoreError]]:
    """Release each model. With --all, report one that fails and go on, and ignore one that has ended meanwhile.

    Raises ClusterLost: nobody answers for the others either.
    """
    from cluster import client

    results, failed = [], {}
    for model_id in model_ids:
        try:
            results.append(client.release(model_id, force=args.force, address=args.address))
        except ClusterLost:
            raise
        except LongshoreError as error:
            if not args.all:
                raise
            if not isinstance(error, ModelNotFound):
                failed[model_id] = error
                write_line(sys.stderr, f"longshore: {model_id}: {error}")
    return results, failed


def run_update(args: argparse.Namespace) -> int:
    """Update a resident model in place, and print the report."""
    from cluster import client
    from cluster.command_line.tables import cell
    from cluster.command_line.watch_commands import full_id

    model_id = full_id(args.model, client.status(args.address))
    report = client.update(
        model_id,
        args.uri,
        revision=args.revision,
        streaming=args.streaming,
        signed_name=args.signed_name,
        timeout_s=args.timeout,
        address=args.address,
        **{**given_options(args, STORE), "anonymous": args.anonymous or None},  # without it: as for the model
    )
    answer(args, report.as_dict(), lambda: cell(str(report)))
    return OK


def run_scale(args: argparse.Namespace) -> int:
    """Change the number of replicas of a resident model, and print the report."""
    from cluster import client
    from cluster.command_line.tables import cell
    from cluster.command_line.watch_commands import full_id

    model_id = full_id(args.model, client.status(args.address))
    report = client.scale(model_id, args.replicas, timeout_s=args.timeout, address=args.address)
    answer(args, report.as_dict(), lambda: cell(str(report)))
    return OK


def run_demo(args: argparse.Namespace) -> int:
    """The whole way on this machine (`cluster.command_line.demo`); with --write its checkpoint alone, to keep."""
    if args.write is not None:
        return _write_model(args)
    from cluster.command_line import demo
    from cluster.command_line.tables import demo_table

    with StagedDisplay(sys.stderr) as display:
        report = demo.run(
            args.size,
            say=display.say,
            show_load=load_counter(display),
            show_publish=byte_counter(display, "publish"),
        )
    answer(args, report.as_dict(), lambda: demo_table(report))
    return OK


def _write_model(args: argparse.Namespace) -> int:
    from cluster.command_line.demo import write_demo_model
    from cluster.command_line.tables import cell

    written = write_demo_model(args.write, args.size)
    text = f"{written.folder}: a Llama of random values, {show_bytes(written.size_bytes)} in {written.shards} shards"
    answer(args, written.as_dict(), lambda: cell(text))
    return OK


def run_doctor(args: argparse.Namespace) -> int:
    """Check what a person would check by hand; 1 when a check failed. Raises InvalidUri, ConfigError."""
    from cluster.command_line.tables import checks_table
    from cluster.doctor.doctor import run_checks
    from cluster.request import StoreOptions

    if args.uri is not None:
        StoreOptions(**given_options(args, STORE)).resolve(args.uri)  # a URI that cannot be meant is no finding
    elif args.bandwidth:
        raise ConfigError("--bandwidth needs a URI to read from", hint="longshore doctor s3://bucket/model --bandwidth")
    checks = run_checks(args.uri, address=args.address, bandwidth=args.bandwidth, **given_options(args, STORE))
    failed = [check.name for check in checks if check.outcome == "fail"]
    document = {"ok": not failed, "checks": [check.as_dict() for check in checks]}
    answer(args, document, lambda: checks_table(checks))
    return FAILED if failed else OK


def run_serve(args: argparse.Namespace) -> int:
    """Serve until interrupted; the token comes from LONGSHORE_HTTP_TOKEN, never from an argument."""
    check_packages("serving")
    serving = importlib.import_module("serving.command")  # the one seam that points there, by name

    def say(url: str) -> None:
        if args.json:
            print_json({"url": url})
        else:
            write_line(sys.stderr, f"longshore: {url} (Ctrl-C ends it)")

    serving.serve_until_interrupted(args.host, args.port, args.address, say)
    return OK


LOOK_S = 1.0


def run_logs(args: argparse.Namespace) -> int:
    """Print lines of all nodes by time; with --follow until interrupted. Raises ClusterLost, PackageMissing."""
    from cluster.telemetry.process_logs import LogCollector, LogFilter

    collector = LogCollector(args.address, LogFilter(args.load, args.rank), args.node)
    lines = collector.collect()
    reported = _report_silent(collector.silent, {})
    lines = lines[-args.tail :] if args.tail is not None else lines
    if args.json and not args.follow:
        print_json({"lines": [line.as_dict() for line in lines], "silent_nodes": collector.silent})
        return OK
    going_on = _put(lines, as_json=args.json)
    if not lines and not args.follow:
        write_line(sys.stderr, "longshore: nothing that was asked for is in the logs")
    while args.follow and going_on and not reader_left():
        time.sleep(LOOK_S)
        going_on = _put(collector.collect(), as_json=args.json)
        reported = _report_silent(collector.silent, reported)
    return OK


def line_of(line: LogLine) -> str:
    """`host-a rank 3 | 2026-11-22T09:30:15.123Z WARNING ...`; nothing in a line commands a terminal."""
    return printable(f"{line.host} {line.process} | {line.text}")


def _put(lines: list[LogLine], *, as_json: bool) -> bool:
    """False when nobody reads any more."""
    return write("".join(f"{json.dumps(line.as_dict()) if as_json else line_of(line)}\n" for line in lines))


def _report_silent(silent: dict[str, str], reported: dict[str, str]) -> dict[str, str]:
    """Nodes that did not answer, each once."""
    for host, why in silent.items():
        if host not in reported:
            write_line(sys.stderr, f"longshore: no logs of {host}: {why}")
    return dict(silent)


def add_cluster_verbs(verbs: Verbs) -> None:
    """Add the verbs that show or change a running cluster."""
    status = add_verb(verbs, "status", run_status)
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

    update = add_verb(verbs, "update", run_update, "MODEL")
    update.add_argument("uri", nargs="?", metavar="URI", help="of the new revision (default: the model's own)")
    update.add_argument("--streaming", action="store_true", help="stage nothing; a failure breaks the model")
    update.add_argument("--timeout", type=seconds_of, metavar="SECONDS", help="then stop waiting for it")
    add_address(update)
    add_options(update, (*STORE, "revision", "signed_name"))

    scale = add_verb(verbs, "scale", run_scale, "MODEL")
    scale.add_argument("replicas", type=count, metavar="N", help="of the model, all together")
    scale.add_argument("--timeout", type=seconds_of, metavar="SECONDS", help="then stop waiting for it")
    add_address(scale)

    release = add_verb(verbs, "release", run_release)
    release.add_argument("model_id", nargs="?", metavar="MODEL_ID", help=LOAD)
    release.add_argument("--all", action="store_true", help="every model")
    release.add_argument("--force", action="store_true", help="also when somebody still holds it")
    release.add_argument("--warm", action="store_true", help="workers of released models that wait for the next load")
    release.add_argument("--shutdown", action="store_true", help="then end Longshore in this cluster, caches included")
    add_address(release)

    demo = add_verb(verbs, "demo", run_demo)
    demo.add_argument("--size", type=size_of, default=None, metavar="BYTES", help="of the model (default: 1 GB)")
    demo.add_argument(
        "--write", metavar="FOLDER", help="only write the checkpoint, into this new folder, and leave it there"
    )

    serve = add_verb(verbs, "serve", run_serve)
    serve.add_argument("--host", metavar="ADDRESS", help="to listen on (default: 127.0.0.1; others need a token)")
    serve.add_argument("--port", type=port_of, metavar="PORT", help="to listen on (default: 8000)")
    add_address(serve)

    doctor = add_verb(verbs, "doctor", run_doctor)
    doctor.add_argument("uri", nargs="?", metavar="URI", help="a model or bucket that should be readable")
    doctor.add_argument(
        "--bandwidth",
        action="store_true",
        help="read from the store for 5 seconds, on all nodes at once, at most 4 GiB each (needs URI)",
    )
    add_address(doctor)
    add_options(doctor, STORE)


def add_completion(verbs: Verbs, parser: argparse.ArgumentParser) -> None:
    """`parser`: what is completed."""
    completion = add_verb(verbs, "completion", run_completion)
    completion.add_argument("shell", choices=SHELLS, help="whose script")
    completion.set_defaults(parser=parser)
