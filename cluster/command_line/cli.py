"""The command line: arguments in, exit code out. What the verbs do is in `cluster.command_line.commands`.

argv -> build_parser -> commands.run_<verb>(args) -> exit code
                        any error -> one line on stderr (and JSON on stdout) -> exit_codes.exit_code
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from cluster.command_line import commands
from cluster.command_line.device_map_arguments import add_device_map
from cluster.command_line.exit_codes import EXIT_CODES, USAGE, exit_code
from cluster.command_line.fit_arguments import add_fit, add_fit_ahead
from cluster.command_line.progress import say_on
from cluster.errors import ConfigError
from cluster.joining.interrupts import Terminated, sigterm_interrupts
from cluster.precision.recipes import DTYPES, SCHEMES
from cluster.request import PLACEMENTS
from cluster.units import parse_bytes
from longshore.version import __version__
from storage.errors import LongshoreError

CREDENTIALS = "Credentials come from the environment, the AWS profile or the machine's role, never from arguments."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and never raises."""
    parser = build_parser()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
    try:
        args = parser.parse_args(argv)
    except SystemExit as exit_:  # argparse has printed help, the version or what is wrong
        return exit_.code if isinstance(exit_.code, int) else USAGE
    try:
        with sigterm_interrupts():
            code: int = args.run(args)
            return code
    except KeyboardInterrupt as error:
        say_on(sys.stderr, f"longshore: {'terminated' if isinstance(error, Terminated) else 'interrupted'}")
        return exit_code(error)
    except Exception as error:
        return _failed(error, args)


def build_parser() -> argparse.ArgumentParser:
    """Every verb and its options."""
    parser = argparse.ArgumentParser(
        prog="longshore",
        description="Load model weights from object storage into a Ray cluster, every byte verified.",
        epilog="exit codes:\n" + "\n".join(f"  {row.code:>3}  {row.meaning}" for row in EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"longshore {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    load = _verb(verbs, "load", commands.run_load, "load a model into the cluster and keep it there", "URI")
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
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="wait that long for enough GPUs; 0 refuses at once (default)",
    )
    load.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="auto",
        help="chunks through the node's arena (cached), direct into a rank's host memory, or auto: direct when the "
        "arena is too small to keep them (default)",
    )
    _add_trusted(load)
    load.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="give up after that long")
    _add_address(load)
    _add_store(load)

    plan = _verb(verbs, "plan", commands.run_plan, "show what would be loaded where; moves no bytes", "URI")
    _add_sizes(plan)
    _add_precision(plan)
    add_device_map(plan)
    add_fit_ahead(plan)
    _add_trusted(plan)
    plan.add_argument(
        "--ranks-per-node", type=_count, default=None, metavar="N", help="for the figures per node (default: all)"
    )
    plan.add_argument("--rank", type=int, metavar="N", help="show its part of every tensor too")
    _add_store(plan)

    publish = _verb(verbs, "publish", commands.run_publish, "write a manifest with a digest of every chunk", "SOURCE")
    publish.add_argument(
        "dest",
        nargs="?",
        metavar="DEST",
        help="copy the model there, publish the copy (default: in place)",
    )
    publish.add_argument("--hash", choices=("blake3", "xxh3_128"), default="blake3", help="of the chunks")
    publish.add_argument(
        "--chunk-size", type=_size, default=None, metavar="BYTES", help="1MiB to 16MiB (default: 8MiB)"
    )
    publish.add_argument("--force", action="store_true", help="replace a manifest that is there already")
    publish.add_argument(
        "--amax", action="store_true", help="record the largest value of each row: loads that quantize then read less"
    )
    publish.add_argument("--sign-key", metavar="FILE", help="sign the manifest with this private key")
    _add_store(publish)

    verify = _verb(verbs, "verify", commands.run_verify, "read a published model and check every digest", "URI")
    _add_trusted(verify)
    _add_store(verify)

    sign = _verb(verbs, "sign", commands.run_sign, "sign the manifest of a published model", "URI")
    sign.add_argument("--key", metavar="FILE", required=True, help="private key, as `longshore keygen` makes it")
    _add_store(sign)

    _verb(verbs, "keygen", commands.run_keygen, "make a key to sign manifests with: FILE and FILE.pub", "FILE")

    status = _verb(verbs, "status", commands.run_status, "show the cluster's models and nodes")
    _add_address(status)

    release = _verb(verbs, "release", commands.run_release, "free resident models")
    release.add_argument("model_id", nargs="?", metavar="MODEL_ID", help="as `longshore status` shows it")
    release.add_argument("--all", action="store_true", help="every model")
    release.add_argument("--force", action="store_true", help="also when somebody still holds it")
    release.add_argument("--warm", action="store_true", help="workers of released models that wait for the next load")
    release.add_argument("--shutdown", action="store_true", help="then end Longshore in this cluster, caches included")
    _add_address(release)

    demo = _verb(verbs, "demo", commands.run_demo, "load a 1 GB model from a local S3 server into 4 CPU ranks")
    demo.add_argument("--size", type=_size, default=None, metavar="BYTES", help="of the model (default: 1 GB)")

    doctor = _verb(verbs, "doctor", commands.run_doctor, "check this machine, the cluster and a store")
    doctor.add_argument("uri", nargs="?", metavar="URI", help="a model or bucket that should be readable")
    _add_address(doctor)
    _add_store(doctor)
    return parser


def _verb(verbs: Any, name: str, run: Any, summary: str, target: str = "") -> argparse.ArgumentParser:
    sentence = f"{summary[0].upper()}{summary[1:]}."
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=sentence)
    if target:
        verb.add_argument(target.lower(), metavar=target)
    verb.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verb.set_defaults(run=run)
    return verb


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
        verb.add_argument(*flags, dest=dest, type=_count, default=1, metavar="N", help=what)
    verb.add_argument(
        "--etp",
        "--expert-tensor-parallel-size",
        dest="expert_tensor_parallel_size",
        type=_count,
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
        choices=tuple(SCHEMES),
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


def _add_trusted(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trusted-key",
        action="append",
        metavar="KEY",
        help="refuse a manifest that is not signed with this public key (base64 or a file; may be given again; "
        "default: LONGSHORE_TRUSTED_KEYS)",
    )


def _add_address(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster (default: RAY_ADDRESS, else a local one)"
    )


def _add_store(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("store", CREDENTIALS)
    group.add_argument("--endpoint-url", metavar="URL", help="of an S3-compatible server")
    group.add_argument("--region")
    group.add_argument("--profile", help="named profile of the AWS configuration")
    group.add_argument("--anonymous", action="store_true", help="send unsigned requests (public buckets)")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _failed(error: Exception, args: argparse.Namespace) -> int:
    """Say what happened, once for people and with --json once for scripts; returns the exit code."""
    code = exit_code(error)
    if args.debug:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    foreseen = isinstance(error, LongshoreError) or hasattr(error, "hint")
    text = str(error) if foreseen else f"{type(error).__name__}: {error} (--debug shows where)"
    say_on(sys.stderr, f"longshore: {text}")
    if args.json:
        document: dict[str, Any] = {
            "type": type(error).__name__,
            "message": getattr(error, "message", str(error)),
            "hint": getattr(error, "hint", ""),
            "details": getattr(error, "details", {}),
        }
        with contextlib.suppress(OSError):  # it may be the very reason
            commands.print_json({"error": document, "exit_code": code})
    return code
