"""The command line: arguments in, exit code out.

argv -> build_parser (checkpoint_arguments, cluster_arguments)
     -> checkpoint_commands | cluster_commands: run_<verb>(args) -> exit code
         any error, of argparse too -> one line on stderr (and JSON on stdout) -> exit_codes.exit_code
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from cluster.command_line.answers import USAGE, exit_code, print_json, print_json_line
from cluster.command_line.checkpoint_commands import add_checkpoint_verbs
from cluster.command_line.cluster_commands import add_cluster_verbs, add_completion
from cluster.command_line.help_texts import exit_codes_text
from cluster.command_line.progress import write_line
from cluster.errors import ConfigError
from cluster.joining.patience import Terminated, sigterm_interrupts
from longshore.installation import __version__
from storage.errors import LongshoreError
from storage.problems import without_secrets


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
    parser = build_parser()
    if not words:  # wrong usage, but help is what the user needs
        with contextlib.suppress(OSError):
            parser.print_help(sys.stderr)
        return USAGE
    try:
        args = parser.parse_args(words)
    except ConfigError as error:  # argparse's: usage and what is wrong are on stderr
        if _wants_json(words):
            _print_error(error, USAGE)
        return USAGE
    except SystemExit as exit_:  # argparse has printed help or the version
        return exit_.code if isinstance(exit_.code, int) else USAGE
    try:
        with sigterm_interrupts():
            code: int = args.run(args)
            return code
    except KeyboardInterrupt as error:
        kind = "Terminated" if isinstance(error, Terminated) else "Interrupted"
        write_line(sys.stderr, f"longshore: {kind.lower()}")
        if args.json and not _endless(args):  # its documents are out already
            _print_error(Exception(kind.lower()), exit_code(error), kind=kind)
        return exit_code(error)
    except Exception as error:
        return _failed(error, args)


def build_parser() -> argparse.ArgumentParser:
    """Every verb and its options."""
    parser = _Parser(
        prog="longshore",
        description="Load model weights from object storage into a Ray cluster, every byte verified.",
        epilog=f"`longshore VERB --help` has examples.\n\n{exit_codes_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"longshore {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add_checkpoint_verbs(verbs)
    add_cluster_verbs(verbs)
    add_completion(verbs, parser)
    return parser


def _failed(error: Exception, args: argparse.Namespace) -> int:
    """Report the error on stderr, and with --json on stdout; return the exit code."""
    code = exit_code(error)
    if args.debug:
        with contextlib.suppress(OSError):
            # Errors of libraries that ours were raised from may quote a URL.
            print(without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    foreseen = isinstance(error, LongshoreError) or hasattr(error, "hint")
    text = str(error) if foreseen else f"{type(error).__name__}: {error} (--debug shows where)"
    write_line(sys.stderr, f"longshore: {without_secrets(text)}")
    if args.json:
        _print_error(error, code, in_a_line=_endless(args))
    return code


def _print_error(error: Exception, code: int, *, kind: str = "", in_a_line: bool = False) -> None:
    document: dict[str, Any] = {
        "type": kind or type(error).__name__,
        "message": without_secrets(getattr(error, "message", str(error))),
        "hint": getattr(error, "hint", ""),
        "details": getattr(error, "details", {}),
    }
    with contextlib.suppress(OSError):  # it may be the very reason
        (print_json_line if in_a_line else print_json)({"error": document, "exit_code": code})


def _endless(args: argparse.Namespace) -> bool:
    """Return whether the verb prints a document per line."""
    return getattr(args, "watch", None) is not None or bool(getattr(args, "follow", False))


def _wants_json(words: Sequence[str]) -> bool:
    """Return whether a command line that cannot be parsed asks for JSON. (argparse accepts abbreviations.)"""
    return any(len(word) > 2 and "--json".startswith(word) for word in words)


class _Parser(argparse.ArgumentParser):
    """A parser that prints what argparse prints, and then raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        message = without_secrets(message)  # of words in the wrong place, maybe a presigned URL
        with contextlib.suppress(OSError):
            self.print_usage(sys.stderr)
        message += _nearest_choice(message)
        write_line(sys.stderr, f"{self.prog}: error: {message}")
        raise ConfigError(message, hint=f"{self.prog} --help")


def _nearest_choice(message: str) -> str:
    """Return a suggestion for argparse's message about an unknown verb or value; "" without one."""
    found = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
    near = difflib.get_close_matches(found[1], re.findall(r"[\w.-]+", found[2]), 1) if found else []
    return f"; did you mean {near[0]}?" if near else ""
