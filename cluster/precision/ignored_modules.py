"""Modules that a quantized model leaves as they are, as readers find them. Pure.

Readers go by the names of their own modules, and a checkpoint has those of its day: what is stored below `visual`,
`language_model.model` or `vision_tower.vision_model` is below `model.visual`, `model.language_model` and
`model.vision_tower` in transformers 5. So where a model is more than a language model, or less (saved without its
head), a pattern finds the module under any such beginning:

    visual.merger.mlp.0               ->  (?:.*[.])?visual(?:[.].*)?       all of a tower that is left whole
    language_model.model.layers.0.up  ->  (?:.*[.])?layers[.]0[.]up
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.layouts.module_names import HEADS, TOWERS

_ANYTHING_BEFORE, _ANYTHING_BELOW = r"(?:.*[.])?", r"(?:[.].*)?"
_LANGUAGE = ("model", "language_model")  # before what a language model is made of


@dataclass(frozen=True, slots=True)
class Ignored:
    """A module, or all of a tower."""

    name: str  # in the checkpoint; of a tower: the part that it is known by
    pattern: str = ""  # regular expression of the whole name, also under other names; "": they are the same


def find_ignored(left: Sequence[str], quantized: Sequence[str]) -> list[Ignored]:
    """From the names of modules as stored. No pattern finds one that is quantized."""
    left = list(left)
    if not any(name.rpartition(".")[2] in HEADS and not _tower(name)[0] for name in (*left, *quantized)):
        left.append(HEADS[0])  # it is the embedding: a layer all the same, which has nothing of its own to read
    if all(_is_plain(name) for name in (*left, *quantized)):
        return [Ignored(name) for name in left]
    below: dict[str, list[str]] = {}  # what is quantized of each tower
    for name in quantized:
        tower, rest = _tower(name)
        if tower:
            below.setdefault(tower, []).append(rest)
    ends = {"": _finder_of_ends(quantized)} | {tower: _finder_of_ends(names) for tower, names in below.items()}
    found: dict[str, Ignored] = {}
    for name in left:
        tower, rest = _tower(name)
        beginning = f"{_ANYTHING_BEFORE}{tower}[.]{_ANYTHING_BEFORE}" if tower else _ANYTHING_BEFORE
        if tower and tower not in below:
            found.setdefault(tower, Ignored(tower, f"{_ANYTHING_BEFORE}{tower}{_ANYTHING_BELOW}"))
        elif not rest or ends[tower](rest):
            found.setdefault(name, Ignored(name))
        else:
            found.setdefault(name, Ignored(name, beginning + re.escape(rest).replace(r"\.", "[.]")))
    return list(found.values())


def _tower(name: str) -> tuple[str, str]:
    """The tower that a module is of, "" for none, and the rest of its name, without what names differ in."""
    parts = name.split(".")
    at = next((number for number, part in enumerate(parts) if part in TOWERS), None)
    outer: Iterable[str] = _LANGUAGE if at is None else TOWERS
    rest = parts if at is None else parts[at + 1 :]
    while rest and rest[0] in outer:
        rest = rest[1:]
    return "" if at is None else parts[at], ".".join(rest)


def _is_plain(name: str) -> bool:
    """Whether it is one of a language model with its head: those are called the same everywhere."""
    parts = name.split(".")
    known = parts[0] == "model" or (len(parts) == 1 and name in HEADS)
    return known and "language_model" not in parts and not _tower(name)[0]


def _finder_of_ends(names: Iterable[str]) -> Callable[[str], bool]:
    """Whether one of the names ends with those parts."""
    turned = sorted(f".{name}"[::-1] for name in names)

    def is_end(parts: str) -> bool:
        sought = f".{parts}"[::-1]
        at = bisect_left(turned, sought)
        return at < len(turned) and turned[at].startswith(sought)

    return is_end
