"""A field's comment is its text in the API pages: `arena_bytes: int = 0  # shared memory per node`."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Reads the comment behind each field of a class that has no docstring of its own."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class and attr.annotation is not None:
            text = comment_of(attr.source)
            if text:
                attr.docstring = griffe.Docstring(text, parent=attr)


def comment_of(source: str) -> str:
    """The comment in the source of one assignment, "" when there is none, and for one to a tool (`noqa`)."""
    try:
        tokens = [token for token in tokenize.generate_tokens(io.StringIO(source.strip()).readline)]
    except (tokenize.TokenError, IndentationError):
        return ""
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(each for each in comments if not each.startswith(("noqa", "type:", "fmt:")))
