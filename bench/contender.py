"""A contender as the driver sees it: its constants, its cases, and how its process begins and ends."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.spec import Source, Spec

EXIT_NOT_RUNNABLE = 3
_OURS = ("bench", "actors", "cluster", "storage", "longshore")
Memory = Literal["arena", "fresh", "recycled", "none"]  # where the bytes are at the end; recycled: touched before


class NotRunnable(Exception):
    """The contender is not installed or cannot run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """One mode of a contender: a line of the table."""

    name: str  # "" for the only one, else short and like an identifier: "direct_fresh"
    title: str  # for the table: "straight into fresh memory"
    checks: bool  # every byte compared with a digest
    keeps: bool  # the tensors are in memory of the program's own at the end
    memory: Memory = "fresh"
    sources: tuple[Source, ...] = ("http",)
    options: Mapping[str, Any] = field(default_factory=dict)  # in spec.options, besides those of the setting
    limit: str = ""  # "contender:case" of the hand-written limit that does the same work
    hash_name: str = "blake3"  # of a case that checks


@dataclass(frozen=True, slots=True)
class Contender:
    """A contender's constants."""

    name: str  # of the module in bench.contenders
    title: str
    cases: tuple[Case, ...]
    settings: tuple[Mapping[str, Any], ...]  # to try before the rounds; never empty


def sources_of(memory: Memory, verify: bool) -> tuple[Source, ...]:
    """Where the modes that are compared read from: all of them over HTTP, the telling ones elsewhere too."""
    if not verify:
        return ("http",)
    return ("http", "file") if memory == "recycled" else ("http", "https", "file")


def read_contender(name: str) -> Contender:
    """The constants of bench.contenders.NAME. Raises ImportError, AttributeError."""
    module = importlib.import_module(f"bench.contenders.{name}")
    alone = Case("", "", bool(module.CHECKS), bool(module.KEEPS), sources=getattr(module, "SOURCES", ("http",)))
    return Contender(name, module.TITLE, tuple(getattr(module, "CASES", (alone,))), tuple(module.SETTINGS) or ({},))


def run_contender(main: Callable[[Spec], None]) -> None:
    """Run `main` on the spec that the command line names; ends the process."""
    if len(sys.argv) != 2:
        print("one argument: the path of a spec", file=sys.stderr)
        raise SystemExit(2)
    try:
        main(Spec.read(sys.argv[1]))
    except NotRunnable as error:
        reason = str(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:  # a mistake of ours, not a peer that is missing
            raise
        reason = f"{error.name} is not installed"
    else:
        return
    print(reason, file=sys.stderr)
    raise SystemExit(EXIT_NOT_RUNNABLE)
