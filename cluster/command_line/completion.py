"""`longshore completion SHELL`: verbs, options, their values and file names, completed by the shell itself."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

from cluster.command_line.answers import print_json, write
from cluster.command_line.exit_codes import OK
from cluster.errors import PackageMissing
from storage.problems import install_hint

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "FILE.svg", "URI", "SOURCE", "DEST")  # names of values that may be a path here
_FOLDERS = ("FOLDER",)


def run_completion(args: argparse.Namespace) -> int:
    """Print the script. Raises PackageMissing."""
    script = completion_script(args.parser, args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        write(script)
    return OK


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """What the shell is to run so that it completes the parser's command line. Raises PackageMissing without shtab.

    The parser's texts are not those of its help afterwards.
    """
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError as error:
        raise PackageMissing(
            "the package that writes completions is not installed", hint=install_hint("completion"), package="shtab"
        ) from error
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        if action.help:
            action.help = _plain(action.help)
    script: str = shtab.complete(parser, shell)
    return script if script.endswith("\n") else f"{script}\n"


def _plain(text: str) -> str:
    """Without what a shell might run or take for the end of a text: descriptions go into its code."""
    return text.translate(str.maketrans('"\n', "' ", "`$\\"))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of the parser and of all its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                verb = action.choices[listed.dest]
                verb.description = _plain(listed.help or "")  # what a shell shows beside the verb
                yield from _actions(verb)
        else:
            yield action
