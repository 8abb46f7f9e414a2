"""Help as a manual page has it: description, options, examples, exit codes, in 80 columns. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from cluster.command_line.exit_codes import EXIT_CODES, FAILED, INTERRUPTED, OK, TERMINATED, USAGE
from cluster.command_line.help_texts import Page

COLUMNS = 78
_ALWAYS = (OK, FAILED, USAGE, INTERRUPTED, TERMINATED)
_MEANINGS = {row.code: row.meaning for row in EXIT_CODES}


def description_of(page: Page) -> str:
    """Paragraphs, filled."""
    return "\n\n".join(textwrap.fill(paragraph, COLUMNS) for paragraph in page.description)


def epilog_of(page: Page) -> str:
    """Examples, then the exit codes that the verb has."""
    codes = sorted({*_ALWAYS, *page.exit_codes, *page.meanings})
    meanings = {INTERRUPTED: "interrupted with Ctrl-C", **page.meanings}
    return f"examples:\n{_examples(page.examples)}\n\n{exit_codes_text(codes, meanings)}"


def exit_codes_text(codes: Iterable[int] = tuple(_MEANINGS), meanings: Mapping[int, str] | None = None) -> str:
    """A table; `meanings` come before the general ones."""
    meant = {**_MEANINGS, **(meanings or {})}
    rows = (
        textwrap.fill(meant[code], COLUMNS, initial_indent=f"  {code:>3}  ", subsequent_indent=" " * 7)
        for code in codes
    )
    return "exit codes:\n" + "\n".join(rows)


def _examples(lines: Iterable[str]) -> str:
    """Lines that are too long go on after a backslash, as a shell takes them."""
    return "\n".join(_broken(line) for line in lines)


def _broken(line: str) -> str:
    parts = textwrap.wrap(line, COLUMNS - 8, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(f"{'      ' if at else '  '}{part}" for at, part in enumerate(parts))
