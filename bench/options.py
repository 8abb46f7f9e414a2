"""Command lines of the benchmarks: the parser, the options that several have, and the types of their values."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

from bench.harness.rounds import REPOSITORY
from cluster.errors import ConfigError
from cluster.units import parse_bytes


def new_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m MODULE`, described by the first line of its docstring."""
    return argparse.ArgumentParser(
        f"python -m {module}",
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def write_json(path: Path, found: object) -> None:
    """Write results, such as those that `bench.page` takes into the documentation."""
    path.write_text(json.dumps(found, indent=1) + "\n")


def add_model_options(parser: argparse.ArgumentParser, size_default: str | None, rounds: int | None) -> None:
    """Add the options of the benchmarks that make a model and load it in rounds."""
    parser.add_argument("--size", type=size, default=size_default, help="size of the model")
    parser.add_argument("--rounds", type=positive_int, default=rounds, help="loads of each line")
    parser.add_argument("--tmpfs", "--folder", type=Path, default="/dev/shm", help="folder for the model")
    out = str(REPOSITORY / "bench" / "out")
    parser.add_argument("--out", type=output_folder, default=out, help="folder for the results")


def positive_int(text: str) -> int:
    return int(_number(text, lambda value: 1 <= value < math.inf and value == int(value), "a whole number, 1 or more"))


def positive_float(text: str) -> float:
    return _number(text, lambda value: 0 < value < math.inf, "more than 0")


def float_from_zero(text: str) -> float:
    return _number(text, lambda value: 0 <= value < math.inf, "0 or more")


def _number(text: str, allowed: Callable[[float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
    if not allowed(value):
        raise argparse.ArgumentTypeError(f"must be {words}, not {text}")
    return value


def size(text: str) -> int:
    """Return the bytes of a text such as "2GB"."""
    try:
        return positive_int(str(parse_bytes(text)))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_folder(text: str) -> Path:
    """Return a folder, which is made when it is missing: a run of an hour must not end without one."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make {text}: {error.strerror}") from None
    return Path(text)
