"""Two things that MkDocs does not do itself, for `make docs`.

- A link out of docs/, `../bench/README.md`, works on GitHub. The site gets a copy of that file, and links to it.
  A link to what does not exist is a warning, and so an error with --strict. A link to a folder becomes its name.
- A page with the line `<!-- help of every verb -->` shows there what `longshore VERB --help` prints.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *(```|~~~)")
HELP = "<!-- help of every verb -->"
COPIES = "repository"  # the folder of the site for copies
_LOG = logging.getLogger("mkdocs.plugins.links")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to."""
    docs = Path(config.docs_dir)
    for page in list(files.documentation_pages()):
        for _, target, _ in LINK.findall(_outside_fences(page.content_string)):
            path = (docs / page.src_uri).parent / target
            if path.is_file() and not path.resolve().is_relative_to(docs):
                uri = f"{COPIES}/{_in_repository(path, docs)}.txt"
                if files.get_file_from_path(uri) is None:
                    file = File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
                    files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put copies in place of links out of docs/, and the help texts in their place."""
    docs = Path(config.docs_dir)
    here = docs / page.file.src_uri

    def replaced(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = here.parent / target
        if path.resolve().is_relative_to(docs):
            return found[0]  # MkDocs checks those
        if path.is_file():
            copy = docs / COPIES / f"{_in_repository(path, docs)}.txt"
            return f"[{text}]({os.path.relpath(copy, here.parent)})"
        if not path.is_dir():
            _LOG.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        return text

    lines, fenced = [], False
    for line in markdown.splitlines(keepends=True):
        fenced ^= bool(FENCE.match(line))
        lines.append(line if fenced else LINK.sub(replaced, line))
    return "".join(lines).replace(HELP, _help_of_every_verb() if HELP in markdown else "")


def _outside_fences(markdown: str) -> str:
    lines, fenced = [], False
    for line in markdown.splitlines():
        fenced ^= bool(FENCE.match(line))
        lines += [] if fenced else [line]
    return "\n".join(lines)


def _in_repository(path: Path, docs: Path) -> str:
    return path.resolve().relative_to(docs.parent).as_posix()


def _help_of_every_verb() -> str:
    from cluster.command_line.cli import build_parser

    os.environ["COLUMNS"] = "100"  # argparse would take the width of whoever builds
    parser = build_parser()
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    sections = [f"## `longshore`\n\n```text\n{parser.format_help()}```\n"]
    sections += [f"## `longshore {name}`\n\n```text\n{verb.format_help()}```\n" for name, verb in verbs.choices.items()]
    return "\n".join(sections)
