"""Formatting of sizes, rates, lists and foreign text for people, and parsing of sizes that people write."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cluster.errors import ConfigError
from storage.problems import show_bytes as show_bytes

_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
    "p": 10**15,
    "pi": 2**50,
}


def show_rate(count: float, seconds: float) -> str:
    """Return bytes per second in decimal units, or `-` when no time passed."""
    return f"{show_bytes(count / seconds)}/s" if seconds > 0 else "-"


def parse_bytes(text: str) -> int:
    """Return the bytes of `8MiB`, `8 MB` or `8388608`. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgtp]i?)b?", text.strip().lower())
    if match is None:
        raise ConfigError(f"not a size: {text!r}", hint="write it like 8MiB, 512MB or 8388608")
    try:
        return int(float(match[1]) * _SUFFIXES[match[2]])
    except OverflowError as error:
        raise ConfigError("not a size: too large") from error


def show_some(texts: Iterable[object], most: int, more: str = "more") -> str:
    """Return the first `most` texts with commas, and the number of the others: `a, b and 3 more`."""
    shown = [str(text) for text in texts]
    left = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {left} {more}" if left > 0 else "")


def printable(text: object) -> str:
    """Return `text` with control characters escaped. Names come from buckets, and terminals obey escape codes."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in str(text)
    )
