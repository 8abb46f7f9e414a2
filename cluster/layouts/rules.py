"""Layout rules as data: patterns of tensor names, each with the way that tensor parallelism cuts such a tensor.

A pattern is a dotted tensor name. In it, `*` stands for any characters of one part. `**`, as a whole part, stands for
any number of parts: `model.layers.*.mlp.up_proj.weight`, `**.norm.weight`. The first pattern that matches decides.

The tables of the model families are in `cluster.layouts.families`. A user may pass rules, or name a file with a JSON
object of patterns, each with the name of a rule. The order of the file is the order of precedence.

    {"model.layers.*.mixer.in_proj.weight": "column", "**.norm.weight": "replicate"}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import ConfigError
from cluster.layouts.families import TABLES, Rows, nested_rows
from cluster.layouts.families import Rule as Rule
from storage.problems import json_values

if TYPE_CHECKING:
    from cluster.layouts.model_config import ModelConfig


MAX_RULES = 1000  # rules of one request
MAX_PATTERN_CHARS = 256


@dataclass(frozen=True, slots=True)
class Rules:
    """Patterns in order of precedence, each with its rule. Empty rules name no tensor."""

    entries: Rows = ()

    def rule_for(self, name: str) -> Rule | None:
        """Return the rule of the first pattern that matches the whole name, or None."""
        return self.finder()(name)

    def finder(self) -> Callable[[str], Rule | None]:
        """Return a faster `rule_for` for many names.

        Patterns are compiled once. Names that differ only in their numbers are looked up once.
        """
        if not self.entries:
            return lambda name: None
        pattern = _compile_all(self.entries)
        # If no pattern contains a number, a match does not depend on numbers. So layer 7, expert 41 is looked up as
        # layer 0, expert 0. Large models have 100,000 names, but only a dozen that differ in more than numbers.
        numbers_alike = not any(_ASKS_FOR_NUMBER.search(pattern) for pattern, _ in self.entries)
        found: dict[str, Rule | None] = {}

        def find(name: str) -> Rule | None:
            name = _NUMBER.sub("0", name) if numbers_alike else name
            if name not in found:
                match = pattern.fullmatch(name)
                found[name] = self.entries[match.lastindex - 1][1] if match and match.lastindex else None
            return found[name]

        return find

    def then(self, other: Rules) -> Rules:
        """Return these rules, and `other` for the names that these do not match."""
        return Rules(self.entries + other.entries)

    def as_dict(self) -> dict[str, str]:
        """Return plain data that `parse_rules` reads back. The first rule of a pattern counts."""
        plain: dict[str, str] = {}
        for pattern, rule in self.entries:
            plain.setdefault(pattern, str(rule))
        return plain


def parse_rules(data: object) -> Rules:
    """Return rules from a mapping of pattern to rule name. Raises ConfigError listing all problems."""
    if data is None:
        return Rules()
    if not isinstance(data, Mapping):
        raise ConfigError(f"layout_rules must map patterns to rules, not be a {type(data).__name__}", hint=_HINT)
    if len(data) > MAX_RULES:
        raise ConfigError(f"layout_rules has {len(data)} entries, more than {MAX_RULES}", hint=_HINT)
    problems = []
    entries = []
    for pattern, rule in data.items():
        if problem := pattern_problem(pattern):
            problems.append(problem)
        elif not isinstance(rule, str) or rule not in set(Rule):
            problems.append(f"{pattern!r}: no rule is called {rule!r:.40}")
        else:
            entries.append((str(pattern), Rule(rule)))
    if problems:
        raise ConfigError("bad layout_rules: " + "; ".join(problems[:20]), hint=_HINT, problems=len(problems))
    return Rules(tuple(entries))


def rules_for(config: ModelConfig | None, own: Rules | Mapping[str, str] | None = None) -> Rules:
    """Return the user's own rules, followed by those of the model's family if it has a table.

    For a multimodal family without a table, the language model's rules are used if it has one. A mapping is parsed.
    Raises ConfigError for a mapping with bad rules.
    """
    family = None
    if config is not None:
        family = FAMILIES.get(config.model_type or "") or _NESTED.get(config.text_model_type or "")
    return (own if isinstance(own, Rules) else parse_rules(own)).then(family or Rules())


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of the names. The patterns must be valid."""
    names = list(names) if patterns else []
    alike = list(dict.fromkeys(_NUMBER.sub("0", name) for name in names))  # as in `Rules.finder`

    def matches(pattern: str) -> bool:
        compiled = re.compile(_to_regex(pattern), re.DOTALL)
        return any(map(compiled.fullmatch, names if _ASKS_FOR_NUMBER.search(pattern) else alike))

    return [pattern for pattern in patterns if not matches(pattern)]


_HINT = f"Rules: {', '.join(Rule)}; a pattern may hold one * per part of the name and one part that is **"


def pattern_problem(pattern: object) -> str | None:
    """Return why `pattern` is not a pattern of names, or None if it is one."""
    # One wildcard per part and one ** keep matching quadratic at worst, whatever names a bucket holds.
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        return f"{pattern!r:.60} is not a pattern of 1 to {MAX_PATTERN_CHARS} characters"
    parts = pattern.split(".")
    if parts.count("**") > 1 or any(part.count("*") > 1 for part in parts if part != "**"):
        return f"{pattern!r} has more wildcards than one per part and one **"
    return None


def _to_regex(pattern: str) -> str:
    parts = pattern.split(".")
    if "**" not in parts:
        return r"\.".join(_part_regex(part) for part in parts)
    at = parts.index("**")
    before, after = (r"\.".join(map(_part_regex, side)) for side in (parts[:at], parts[at + 1 :]))
    if not after:
        return (before + r"(?:\.[^.]*)*") if before else r".*"
    return (before + r"\." if before else "") + r"(?:[^.]*\.)*" + after


def _part_regex(part: str) -> str:
    return re.escape(part).replace(r"\*", "[^.]*")


_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole part of a name
_ASKS_FOR_NUMBER = re.compile(r"(?<![^.])[*]?[0-9]+[*]?[0-9]*(?![^.])")  # 7, 7*, *7, 7*7; w1 and fc* do not


@lru_cache(maxsize=64)
def _compile_all(entries: Rows) -> re.Pattern[str]:
    return re.compile("|".join(f"({_to_regex(pattern)})" for pattern, _ in entries), re.DOTALL)


# `model_type` of config.json -> rules.
FAMILIES: Mapping[str, Rules] = {family: Rules(rows) for family, rows in TABLES.items()}
_NESTED: Mapping[str, Rules] = {family: Rules(nested_rows(rows)) for family, rows in TABLES.items()}


LayoutRules = Mapping[str, str] | str | os.PathLike[str]  # the rules, or a file with them

MAX_RULES_FILE_BYTES = 16 * MAX_RULES * MAX_PATTERN_CHARS  # room for every character as an escape


def read_rules(rules: LayoutRules | None) -> dict[str, str] | None:
    """Return checked rules from a mapping or from the named file. Raises ConfigError for either."""
    if rules is None:
        return None
    if rules == "":
        raise ConfigError("layout_rules is an empty string; it must be a mapping or the name of a file")
    if isinstance(rules, str | os.PathLike):
        return _read_file(Path(rules))
    return parse_rules(rules).as_dict()


def _read_file(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RULES_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"layout rules cannot be read from {str(path)!r:.200}: {error}") from error
    try:
        if len(data) > MAX_RULES_FILE_BYTES or json_values(data) > 8 * MAX_RULES:
            raise ConfigError(f"the file is larger than {MAX_RULES} rules can be")
        rules = json.loads(data, object_pairs_hook=_unique)
        if rules is None:
            raise ConfigError("the file must map patterns to rules, not be null")
        return parse_rules(rules).as_dict()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"layout rules in {str(path)!r:.200}: not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"layout rules in {str(path)!r:.200}: {error.message}", hint=error.hint) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{name!r:.80} appears twice")
        found[name] = value
    return found
