"""What the verbs about a running cluster do: status, release, serve, doctor, demo. Each returns its exit code.

As in `cluster.command_line.checkpoint_commands`, what a verb needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.command_line.answers import answer, print_json
from cluster.command_line.arguments import store_options
from cluster.command_line.exit_codes import FAILED, OK
from cluster.command_line.progress import StagedDisplay, byte_counter, load_counter, say_on
from cluster.command_line.watch_commands import watch_status
from cluster.errors import ClusterLost, ConfigError, ModelNotFound
from cluster.units import show_bytes
from longshore.install_check import check_packages
from storage.errors import LongshoreError

if TYPE_CHECKING:
    from cluster.residents import Released


def run_status(args: argparse.Namespace) -> int:
    """Show the models and nodes of a cluster; with --watch until interrupted."""
    from cluster import residents
    from cluster.command_line.tables import status_table

    if args.watch is not None:
        return watch_status(args)

    status = residents.status(args.address)
    answer(args, status.as_dict(), lambda: status_table(status))
    return OK


def run_release(args: argparse.Namespace) -> int:
    """Free one model or --all, end idle workers with --warm; --shutdown ends coordinator, agents and arenas too."""
    from cluster import residents
    from cluster.command_line.model_names import full_id
    from cluster.command_line.tables import cell

    if (args.model_id is None) != (args.all or args.warm or args.shutdown):
        raise ConfigError("name one model, or say --all", hint="`longshore status` lists the models")
    wanted = [args.model_id] if args.model_id is not None else []
    if args.all:
        wanted = [model.progress.model_id for model in residents.status(args.address).models]
    elif wanted:
        wanted = [full_id(args.model_id, residents.status(args.address))]
    results, failed = _release_each(wanted, args)
    warm = residents.release_warm(address=args.address) if args.warm else 0
    if args.shutdown:
        residents.shutdown(args.address)
    said = [str(result) for result in results]
    if not said and (failed or args.all):
        said.append("nothing was released" if failed else "nothing to release")
    said += [f"{warm} idle gangs ended"] * args.warm
    said += ["longshore ended in this cluster, with all its models"] * args.shutdown
    document = {
        "released": [result.model_id for result in results if result.freed],
        "held": {result.model_id: result.holders for result in results if not result.freed},
        "failed": {model_id: str(error) for model_id, error in failed.items()},
        "gangs_ended": warm,
        "shutdown": args.shutdown,
    }
    answer(args, document, lambda: cell("; ".join(said)))
    return FAILED if failed else OK


def _release_each(
    model_ids: Sequence[str], args: argparse.Namespace
) -> tuple[list[Released], dict[str, LongshoreError]]:
    """What became of each model. With --all, one that fails is said and left, and one that ended meanwhile is nothing.

    Raises ClusterLost: nobody answers for the others either.
    """
    from cluster import residents

    results, failed = [], {}
    for model_id in model_ids:
        try:
            results.append(residents.release(model_id, force=args.force, address=args.address))
        except ClusterLost:
            raise
        except LongshoreError as error:
            if not args.all:
                raise
            if not isinstance(error, ModelNotFound):
                failed[model_id] = error
                say_on(sys.stderr, f"longshore: {model_id}: {error}")
    return results, failed


def run_demo(args: argparse.Namespace) -> int:
    """The whole way on this machine (`cluster.command_line.demo`); with --write its checkpoint alone, to keep."""
    if args.write is not None:
        return _write_model(args)
    from cluster.command_line import demo
    from cluster.command_line.load_tables import demo_table

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
    from cluster.command_line.demo_model import write_demo_model
    from cluster.command_line.tables import cell

    written = write_demo_model(args.write, args.size)
    said = f"{written.folder}: a Llama of random values, {show_bytes(written.size_bytes)} in {written.shards} shards"
    answer(args, written.as_dict(), lambda: cell(said))
    return OK


def run_doctor(args: argparse.Namespace) -> int:
    """Check what a person would check by hand; 1 when a check failed. Raises InvalidUri, ConfigError."""
    from cluster.command_line.tables import checks_table
    from cluster.doctor.doctor import run_checks
    from cluster.request import StoreOptions

    if args.uri is not None:
        StoreOptions(**store_options(args)).resolve(args.uri)  # a URI that cannot be meant is no finding
    elif args.bandwidth:
        raise ConfigError("--bandwidth needs a URI to read from", hint="longshore doctor s3://bucket/model --bandwidth")
    checks = run_checks(args.uri, address=args.address, bandwidth=args.bandwidth, **store_options(args))
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
            say_on(sys.stderr, f"longshore: {url} (Ctrl-C ends it)")

    serving.serve_until_interrupted(args.host, args.port, args.address, say)
    return OK
