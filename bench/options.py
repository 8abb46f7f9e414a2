"""Command lines of the benchmarks: the parser, the options that several have, and the types of their values."""

from __future__ import annotations

import argparse
import json
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
    """Return a number from 1. Of ValueError argparse makes an error that names the option."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def positive_float(text: str) -> float:
    """Return a number above 0."""
    if not (value := float(text)) > 0:
        raise ValueError(text)
    return value


def size(text: str) -> int:
    """Return the bytes of a text such as "2GB"."""
    try:
        return positive_int(str(parse_bytes(text)))
    except ConfigError as error:
        raise ValueError(str(error)) from None


def output_folder(text: str) -> Path:
    """Return a folder, which is made when it is missing: a run of an hour must not end without one."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make {text}: {error.strerror}") from None
    return Path(text)
