"""Help: a page for every verb, in 80 columns, whose examples are command lines that work."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from cluster.command_line.answers import EXIT_CODES
from cluster.command_line.cli import build_parser
from cluster.command_line.help_texts import PAGES, epilog_of, exit_codes_text


def verbs() -> dict[str, argparse.ArgumentParser]:
    (found,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found.choices)


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from (action for action in parser._actions if not isinstance(action, argparse._SubParsersAction))


def test_every_verb_has_a_page_and_every_page_a_verb() -> None:
    assert set(verbs()) == set(PAGES)


@pytest.mark.parametrize("verb", PAGES)
def test_every_option_has_help(verb: str) -> None:
    silent = [a.option_strings or a.dest for a in options(verbs()[verb]) if not a.help or a.help == argparse.SUPPRESS]
    assert not silent
    unnamed = [  # argparse would print the name of the variable in capitals
        a.option_strings
        for a in options(verbs()[verb])
        if a.option_strings and a.nargs != 0 and a.choices is None and not a.metavar
    ]
    assert not unnamed


@pytest.mark.parametrize("verb", ["", *PAGES])
def test_help_fits_80_columns(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = (verbs()[verb] if verb else build_parser()).format_help()
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "exit codes:" in text
    assert not verb or "examples:\n  " in text


@pytest.mark.parametrize("verb", PAGES)
def test_examples_are_command_lines_of_the_verb(verb: str) -> None:
    page = PAGES[verb]
    text = epilog_of(page).split("examples:\n")[1].split("\n\nexit codes")[0].replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("#")]
    assert len(lines) == len([line for line in page.examples if not line.startswith("#")]) > 0
    for line in lines:
        command = re.sub(r"^ray job submit (?:.* )?-- ", "", line)
        name, *argv = shlex.split(command.partition(" > ")[0])
        assert name == "longshore"
        assert build_parser().parse_args(argv).run == verbs()[verb].get_default("run")


def test_listed_exit_codes_equal_the_table() -> None:
    codes = {row.code for row in EXIT_CODES}
    for page in PAGES.values():
        assert {*page.exit_codes, *page.meanings} <= codes
    assert {int(code) for code in re.findall(r"^ +(\d+)  \S", exit_codes_text(), re.MULTILINE)} == codes
    assert "    1  a check failed\n" in epilog_of(PAGES["doctor"])
    assert "a load that was to stay" not in epilog_of(PAGES["verify"])
