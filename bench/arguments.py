"""Types for argparse that refuse what cannot work, before anything is begun: one line on stderr, exit code 2."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

from cluster.errors import ConfigError
from cluster.units import parse_bytes

_LINE = 200  # characters


def positive_int(text: str) -> int:
    """1 or more."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return value


def positive_float(text: str) -> float:
    """Finite and more than 0."""
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def float_from_zero(text: str) -> float:
    """Finite, 0 or more."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def size(text: str) -> int:
    """ "2GB" and the like, 1 byte or more: bytes."""
    try:
        value = parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def writable_folder(text: str) -> Path:
    """An existing folder in which files can be made."""
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {text}")
    _try_to_write(folder)
    return folder


def output_folder(text: str) -> Path:
    """A folder for results; made when it is missing."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make {text}: {error.strerror}") from None
    _try_to_write(folder)
    return folder


def output_file(text: str) -> Path:
    """A file that can be written; what it has already stays until then."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: it is a folder")
    was_there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
    return path


def first_line(error: Exception) -> str:
    """Of its text, cut: what is wrong, without the list of everything that it is wrong with."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _LINE else f"{line[:_LINE]}..."


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"not a number to work with: {text!r}")
    return value


def _try_to_write(folder: Path) -> None:
    """By making a file: permissions alone say nothing of a file system that takes none."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write in {folder}: {error.strerror}") from None
