"""What the verbs about one checkpoint do: load, plan, publish, verify, sign, keygen. Each returns its exit code.

With `--json` one document goes to stdout and nothing else; progress always goes to stderr. The client is
imported when a verb runs, so `longshore --help` needs neither Ray nor a network.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from cluster.command_line.answers import answer
from cluster.command_line.arguments import store_options, trusted_options
from cluster.command_line.device_map_arguments import device_map_options
from cluster.command_line.exit_codes import FAILED, INTEGRITY, OK, exit_code
from cluster.command_line.fit_arguments import fit_ahead_options, fit_options
from cluster.command_line.progress import byte_counter, display_on, load_counter, say_on
from cluster.errors import DoesNotFit
from cluster.layouts.mesh import Layout


def run_load(args: argparse.Namespace) -> int:
    """Load, report; the model stays in the cluster unless --no-keep."""
    from cluster import client
    from cluster.command_line.load_tables import load_table

    with display_on(sys.stderr) as display, _says_what_goes_on():
        model = client.load(
            args.uri,
            **_sizes(args),
            **_precision(args),
            **device_map_options(args),
            **fit_options(args),
            **store_options(args),
            device=args.device,
            keep=args.keep,
            address=args.address,
            wait_for_resources_s=args.wait_for_resources,
            placement=args.placement,
            timeout_s=args.timeout,
            **trusted_options(args),
            progress=load_counter(display),
        )
    with model:  # this command's hold on it ends here; `keep` is what makes it stay
        report = model.report
        answer(args, report.as_dict(), lambda: load_table(report))
        if args.keep and model.ends_with_process:
            say_on(
                sys.stderr,
                "longshore: no Ray cluster was running, so a local one was started; it ends now, and the model with it "
                "(ray start --head starts one that stays)",
            )
    return OK


@contextlib.contextmanager
def _says_what_goes_on() -> Iterator[None]:
    """When the block is interrupted: what of the load goes on in the cluster, and how to look at it and end it."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ["nothing was asked of the cluster yet"]):
            say_on(sys.stderr, f"longshore: {note}")
        raise


def run_plan(args: argparse.Namespace) -> int:
    """Show what would be loaded where; ends as a load that is refused when it does not fit."""
    from cluster.command_line.plan_table import plan_table
    from cluster.preview.plan_ahead import plan as plan_ahead

    plan = plan_ahead(
        args.uri,
        ranks_per_node=args.ranks_per_node,
        rank=args.rank,
        **trusted_options(args),
        **_sizes(args),
        **_precision(args),
        **device_map_options(args),
        **fit_ahead_options(args),
        **store_options(args),
    )
    answer(args, plan.as_dict(), lambda: plan_table(plan))
    return exit_code(DoesNotFit("")) if plan.fit is not None and plan.fit.fits is False else OK


def run_publish(args: argparse.Namespace) -> int:
    """Write a manifest, after a copy when there is a destination."""
    from cluster import client
    from cluster.command_line.tables import publish_table

    with display_on(sys.stderr) as display:
        report = client.publish(
            args.source,
            args.dest,
            hash_name=args.hash,
            chunk_bytes=args.chunk_size,
            force=args.force,
            amax=args.amax,
            sign_key=args.sign_key,
            signed_name=args.signed_name,
            progress=byte_counter(display, "publish"),
            **store_options(args),
        )
    answer(args, report.as_dict(), lambda: publish_table(report))
    return OK


def run_verify(args: argparse.Namespace) -> int:
    """Compare what is stored with what was published; INTEGRITY when something differs, FAILED when nothing was."""
    from cluster import client
    from cluster.command_line.tables import verify_table

    with display_on(sys.stderr) as display:
        report = client.verify(
            args.uri, **trusted_options(args), progress=byte_counter(display, "verify"), **store_options(args)
        )
    answer(args, report.as_dict(), lambda: verify_table(report))
    if report.source == "headers":
        say_on(sys.stderr, f"longshore: {report.uri} is {report.notes[0]}")
        return FAILED
    return OK if report.ok else INTEGRITY


def run_sign(args: argparse.Namespace) -> int:
    """Sign the manifest that is there."""
    from cluster.command_line.tables import cell
    from cluster.signing import sign

    signed = sign(args.uri, args.key, signed_name=args.signed_name, **store_options(args))
    said = f"{signed.uri}: revision {signed.revision} is signed as {signed.name} with key {signed.key_id}"
    answer(args, signed.as_dict(), lambda: cell(said))
    return OK


def run_keygen(args: argparse.Namespace) -> int:
    """Make a pair of keys; the private one is only written."""
    from cluster.command_line.tables import cell
    from cluster.signing import generate_key

    made = generate_key(args.file)
    said = (
        f"private key: {made.path} (keep it)\npublic key: {made.public_path}, or in one word {made.public_key}\n"
        f"its id in signatures: {made.key_id}"
    )
    answer(args, made.as_dict(), lambda: cell(said))
    return OK


def _precision(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("dtype", "quantization", "skip_quantization")}


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    sizes = {field.name: getattr(args, field.name) for field in fields(Layout)}
    return {**sizes, "layout_rules": args.layout_rules}
