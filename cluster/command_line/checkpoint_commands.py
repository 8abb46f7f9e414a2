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

from cluster.command_line.answers import FAILED, INTEGRITY, OK, answer, exit_code
from cluster.command_line.arguments import (
    Verbs,
    add_address,
    add_device_map,
    add_fit,
    add_fit_ahead,
    add_signed_name,
    add_store,
    add_trusted,
    add_verb,
    count,
    device_map_options,
    fit_ahead_options,
    fit_options,
    seconds_of,
    size_of,
    store_options,
    trusted_options,
)
from cluster.command_line.progress import byte_counter, display_on, load_counter, say_on
from cluster.errors import DoesNotFit
from cluster.layouts.mesh import Layout


def run_load(args: argparse.Namespace) -> int:
    """Load, report; the model stays in the cluster unless --no-keep."""
    from cluster import client
    from cluster.command_line.tables import load_table

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
    from cluster.command_line.tables import plan_table
    from cluster.planning.preview import plan as plan_ahead

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
    from cluster.client import sign
    from cluster.command_line.tables import cell

    signed = sign(args.uri, args.key, signed_name=args.signed_name, **store_options(args))
    said = f"{signed.uri}: revision {signed.revision} is signed as {signed.name} with key {signed.key_id}"
    answer(args, signed.as_dict(), lambda: cell(said))
    return OK


def run_keygen(args: argparse.Namespace) -> int:
    """Make a pair of keys; the private one is only written."""
    from cluster.client import generate_key
    from cluster.command_line.tables import cell

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


# Those of `cluster.precision.recipes` and `cluster.request`, which import numpy and more; a test compares them.
DTYPES = ("auto", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32")
SCHEMES = ("fp8", "fp8_tensor", "int8", "int4", "nf4")
PLACEMENTS = ("auto", "via_arena", "direct")


def add_checkpoint_verbs(verbs: Verbs) -> None:
    load = add_verb(verbs, "load", run_load, "URI")
    _add_sizes(load)
    _add_precision(load)
    add_device_map(load)
    add_fit(load)
    load.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the tensors go (auto: GPU if any)",
    )
    load.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stay resident when this command has ended (default: yes)",
    )
    load.add_argument(
        "--wait-for-resources",
        type=seconds_of,
        default=0.0,
        metavar="SECONDS",
        help="wait that long for enough GPUs, for which an autoscaler may start nodes; 0 refuses at once (default)",
    )
    load.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="auto",
        help="chunks through the node's arena (cached), direct into a rank's host memory, or auto: direct when the "
        "arena is too small to keep them (default)",
    )
    add_trusted(load)
    load.add_argument("--timeout", type=seconds_of, metavar="SECONDS", help="give up after that long")
    add_address(load)
    add_store(load)

    plan = add_verb(verbs, "plan", run_plan, "URI")
    _add_sizes(plan)
    _add_precision(plan)
    add_device_map(plan)
    add_fit_ahead(plan)
    add_trusted(plan)
    plan.add_argument(
        "--ranks-per-node", type=count, default=None, metavar="N", help="for the stats per node (default: all)"
    )
    plan.add_argument("--rank", type=int, metavar="N", help="show its part of every tensor too")
    add_store(plan)

    publish = add_verb(verbs, "publish", run_publish, "SOURCE")
    publish.add_argument(
        "dest",
        nargs="?",
        metavar="DEST",
        help="copy the model there, publish the copy (default: in place)",
    )
    publish.add_argument(
        "--hash",
        choices=("blake3", "xxh3_128"),
        default="blake3",
        help="of the chunks (xxh3_128 is faster, finds accidents only, and cannot be signed)",
    )
    publish.add_argument(
        "--chunk-size", type=size_of, default=None, metavar="BYTES", help="1MiB to 16MiB (default: 8MiB)"
    )
    publish.add_argument("--force", action="store_true", help="replace a manifest that is there already")
    publish.add_argument(
        "--amax", action="store_true", help="record the largest value of each row: loads that quantize then read less"
    )
    publish.add_argument("--sign-key", metavar="FILE", help="sign the manifest with this private key")
    add_signed_name(publish, "name to sign it under")
    add_store(publish)

    verify = add_verb(verbs, "verify", run_verify, "URI")
    add_trusted(verify)
    add_store(verify)

    sign = add_verb(verbs, "sign", run_sign, "URI")
    sign.add_argument("--key", metavar="FILE", required=True, help="private key, as `longshore keygen` makes it")
    add_signed_name(sign, "name to sign it under")
    add_store(sign)

    add_verb(verbs, "keygen", run_keygen, "FILE")


def _add_sizes(verb: argparse.ArgumentParser) -> None:
    for short, name, what in (
        ("--tp", "tensor_parallel_size", "ranks that share every layer"),
        ("--fsdp", "fsdp_size", "ranks that hold a part of dimension 0 of every tensor"),
        ("--dp", "data_parallel_size", "replicas"),
        ("--pp", "pipeline_parallel_size", "stages of consecutive layers"),
        ("--ep", "expert_parallel_size", "parts of the experts, spread over the ranks of --tp and --dp"),
        ("--vocabulary-multiple", "", "pad embedding and head with zeros to a multiple of this"),
    ):
        flags = [short, f"--{name.replace('_', '-')}"] if name else [short]
        dest = name or "vocabulary_multiple"
        verb.add_argument(*flags, dest=dest, type=count, default=1, metavar="N", help=what)
    verb.add_argument(
        "--etp",
        "--expert-tensor-parallel-size",
        dest="expert_tensor_parallel_size",
        type=count,
        default=0,
        metavar="N",
        help="ways in which each expert is cut (default: --tp divided by --ep)",
    )
    verb.add_argument(
        "--layout-rules",
        metavar="FILE",
        help='JSON of patterns of tensor names to rules, {"**.gate.weight": "replicate"}; before the family\'s own',
    )


def _add_precision(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="cast floating-point tensors on their way in (auto: as stored)"
    )
    verb.add_argument(
        "--quantization",
        choices=SCHEMES,
        help="quantize linear layers and experts on their way in (fp8, int8: a scale per row; int4: per 128 weights; "
        "nf4: bitsandbytes', per 64)",
    )
    verb.add_argument(
        "--skip-quantization",
        action="append",
        metavar="PATTERN",
        help="leave these tensors as they are; 'default' stands for embeddings, heads, routers and towers (may be "
        "given again; default: default)",
    )
