"""Label values that come from outside: short, plain, and not too many of them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

MOST_MODELS = 200  # distinct values of the label; each costs series on every node
MOST_PAIRS = (
    2048  # of node and model that have counters: some 50,000 series, half a second of the coordinator's a scrape
)
OTHER = "other"
_LONGEST = 64
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


def model_label(uri: str) -> str:
    """The last part of the URI, plain: no query, in which there may be a secret, and nothing of who may read it."""
    try:
        path = urlsplit(uri).path or urlsplit(uri).netloc.rpartition("@")[2]
    except ValueError:  # not a URI
        path = uri.partition("?")[0].partition("#")[0]
    last = path.rstrip("/").rpartition("/")[2]
    return _PLAIN.sub("-", last).strip("-.")[:_LONGEST] or "model"


class BoundedLabels:
    """The first `most` values are themselves, all others "other"."""

    def __init__(self, most: int = MOST_MODELS) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(value)
        return value
