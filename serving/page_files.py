"""The files of the page at /, by path. They hold no secret: a browser has them before it has a token."""

from __future__ import annotations

import importlib.resources

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_NAMES = ("index.html", "page.css", "page.js", "api.js", "chunks.js", "dom.js", "rate.js", "ranks.js")

PATHS = {"/" if name == "index.html" else f"/{name}": name for name in _NAMES}


def read_page() -> dict[str, tuple[bytes, str]]:
    """path -> (content, media type)."""
    folder = importlib.resources.files("serving") / "page"
    return {path: ((folder / name).read_bytes(), _TYPES[name.rpartition(".")[2]]) for path, name in PATHS.items()}
