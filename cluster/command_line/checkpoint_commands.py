"""The verbs about one checkpoint: load, plan, publish, verify, saves, sign, keygen. Each returns its exit code.

With `--json` one document goes to stdout and nothing else; progress always goes to stderr. The client is
imported when a verb runs, so `longshore --help` needs neither Ray nor a network.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator

from cluster.command_line.answers import FAILED, INTEGRITY, OK, answer, exit_code
from cluster.command_line.arguments import (
    STORE,
    TRUSTED,
    Verbs,
    add_address,
    add_options,
    add_plan_options,
    add_signed_name,
    add_verb,
    command_options,
    count,
    given_options,
    load_options,
    seconds_of,
    size_of,
)
from cluster.command_line.progress import byte_counter, display_on, load_counter, write_line
from cluster.errors import DoesNotFit
from cluster.options import LOAD, PLAN, collect


def run_load(args: argparse.Namespace) -> int:
    """Load a model and print the report. The model stays in the cluster unless --no-keep is given."""
    from cluster import client
    from cluster.command_line.tables import load_table

    with display_on(sys.stderr) as display, _says_what_goes_on():
        model = client.load_model(
            load_options(args), address=args.address, timeout_s=args.timeout, progress=load_counter(display)
        )
    with model:  # this command's hold on it ends here; `keep` is what makes it stay
        report = model.report
        answer(args, report.as_dict(), lambda: load_table(report))
        if args.keep and model.ends_with_process:
            write_line(
                sys.stderr,
                "longshore: no Ray cluster was running, so a local one was started; it ends now, and the model with it "
                "(ray start --head starts one that stays)",
            )
    return OK


@contextlib.contextmanager
def _says_what_goes_on() -> Iterator[None]:
    """Print, when the block is interrupted, what continues in the cluster and how to see and end it."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ["nothing was asked of the cluster yet"]):
            write_line(sys.stderr, f"longshore: {note}")
        raise


def run_plan(args: argparse.Namespace) -> int:
    """Show what would be loaded where. What does not fit has the exit code of a load that is refused."""
    from cluster.command_line.tables import plan_table
    from cluster.planning.preview import PlanOptions, plan_load

    plan = plan_load(load_options(args), collect(PlanOptions, vars(args)))
    answer(args, plan.as_dict(), lambda: plan_table(plan))
    return exit_code(DoesNotFit("")) if plan.fit is not None and plan.fit.fits is False else OK


def run_publish(args: argparse.Namespace) -> int:
    """Write a manifest, after a copy when there is a destination."""
    from cluster import publishing
    from cluster.command_line.tables import publish_table

    with display_on(sys.stderr) as display:
        report = publishing.publish(
            args.source,
            args.dest,
            hash_name=args.hash,
            chunk_bytes=args.chunk_size,
            force=args.force,
            amax=args.amax,
            sign_key=args.sign_key,
            signed_name=args.signed_name,
            progress=byte_counter(display, "publish"),
            **given_options(args, STORE),
        )
    answer(args, report.as_dict(), lambda: publish_table(report))
    return OK


def run_convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint of another format, or show the plan with --dry-run."""
    from cluster import convert
    from cluster.command_line.tables import convert_table

    with display_on(sys.stderr) as display:
        report = convert(
            args.source,
            args.dest,
            dtype=args.dtype,
            workers=args.workers,
            on_cluster=args.on_cluster,
            address=args.address,
            dry_run=args.dry_run,
            verify=args.verify,
            max_shard_bytes=args.shard_size,
            hash_name=args.hash,
            chunk_bytes=args.chunk_size,
            progress=byte_counter(display, "convert"),
            **given_options(args, STORE),
        )
    answer(args, report.as_dict(), lambda: convert_table(report))
    return OK


def run_verify(args: argparse.Namespace) -> int:
    """Compare what is stored with what was published; INTEGRITY when something differs, FAILED when nothing was."""
    from cluster import publishing
    from cluster.command_line.tables import verify_table

    with display_on(sys.stderr) as display:
        report = publishing.verify(
            args.uri, progress=byte_counter(display, "verify"), **given_options(args, (*TRUSTED, *STORE))
        )
    answer(args, report.as_dict(), lambda: verify_table(report))
    if report.source == "headers":
        write_line(sys.stderr, f"longshore: {report.uri} is {report.notes[0]}")
        return FAILED
    return OK if report.ok else INTEGRITY


def run_saves(args: argparse.Namespace) -> int:
    """List what interrupted saves left, and remove it with --clean; INTEGRITY when files stay, as none is known."""
    from cluster.command_line.tables import saves_table
    from cluster.publishing import list_saves

    report = list_saves(args.uri, clean=args.clean, **given_options(args, STORE))
    answer(args, report.as_dict(), lambda: saves_table(report))
    return INTEGRITY if report.problem else OK


def run_sign(args: argparse.Namespace) -> int:
    """Sign the manifest that is there."""
    from cluster.command_line.tables import cell
    from cluster.publishing import sign

    signed = sign(args.uri, args.key, signed_name=args.signed_name, **given_options(args, STORE))
    text = f"{signed.uri}: revision {signed.revision} is signed as {signed.name} with key {signed.key_id}"
    answer(args, signed.as_dict(), lambda: cell(text))
    return OK


def run_config_folder(args: argparse.Namespace) -> int:
    """Make a folder with the model's small files, and print its path."""
    from cluster.command_line.tables import cell
    from cluster.small_files import config_folder

    path = config_folder(args.uri, args.folder, code=args.code, **given_options(args, (*TRUSTED, *STORE)))
    answer(args, {"folder": path}, lambda: cell(path))
    return OK


def run_keygen(args: argparse.Namespace) -> int:
    """Make a pair of keys; the private one is only written."""
    from cluster.command_line.tables import cell
    from cluster.publishing import generate_key

    made = generate_key(args.file)
    text = (
        f"private key: {made.path} (keep it)\npublic key: {made.public_path}, or in one word {made.public_key}\n"
        f"its id in signatures: {made.key_id}"
    )
    answer(args, made.as_dict(), lambda: cell(text))
    return OK


def add_checkpoint_verbs(verbs: Verbs) -> None:
    """Add the verbs that read or write checkpoints."""
    load = add_verb(verbs, "load", run_load, "URI")
    add_options(load, (one.name for one in command_options(LOAD)))
    load.add_argument("--timeout", type=seconds_of, metavar="SECONDS", help="give up after that long")
    add_address(load)

    plan = add_verb(verbs, "plan", run_plan, "URI")
    sections = add_options(plan, (one.name for one in command_options(PLAN)))
    add_plan_options(plan, sections["fit"])

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
    add_signed_name(publish)
    add_options(publish, STORE)

    for name in ("convert", "merge"):
        _add_convert(add_verb(verbs, name, run_convert, "SOURCE"))

    verify = add_verb(verbs, "verify", run_verify, "URI")
    add_options(verify, (*TRUSTED, *STORE))

    saves = add_verb(verbs, "saves", run_saves, "URI")
    saves.add_argument("--clean", action="store_true", help="remove what is listed (no save to URI may run meanwhile)")
    add_options(saves, STORE)

    sign = add_verb(verbs, "sign", run_sign, "URI")
    sign.add_argument("--key", metavar="FILE", required=True, help="private key, as `longshore keygen` makes it")
    add_signed_name(sign)
    add_options(sign, STORE)

    folder = add_verb(verbs, "config-folder", run_config_folder, "URI")
    folder.add_argument("--folder", metavar="FOLDER", help="new or empty (default: one in the user's cache)")
    folder.add_argument("--code", action="store_true", help="fetch .py files too, which an engine may run")
    add_options(folder, (*TRUSTED, *STORE))

    add_verb(verbs, "keygen", run_keygen, "FILE")


def _add_convert(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("dest", metavar="DEST", help="folder or URI for the result")
    verb.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32", "bf16", "fp16", "fp32"),
        help="cast floating-point tensors (default: all keep their dtype)",
    )
    verb.add_argument(
        "--workers",
        type=count,
        default=None,
        metavar="N",
        help="processes that do it (default: 1, or one for each node)",
    )
    verb.add_argument(
        "--on-cluster",
        action="store_true",
        help="the workers are on the nodes of a Ray cluster, which see both folders",
    )
    add_address(verb)
    verb.add_argument("--dry-run", action="store_true", help="check everything and show the plan; write nothing")
    verb.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="read the result back (default: yes)"
    )
    verb.add_argument(
        "--shard-size", type=size_of, default=5_000_000_000, metavar="BYTES", help="most bytes of a file (default: 5GB)"
    )
    verb.add_argument("--hash", choices=("blake3", "xxh3_128"), default="blake3", help="of the chunks")
    verb.add_argument("--chunk-size", type=size_of, default=None, metavar="BYTES", help="1MiB to 16MiB (default: 8MiB)")
    add_options(verb, STORE)
