"""Rules from a file that the user names: a JSON object of patterns, each with the name of a rule.

    {"model.layers.*.mixer.in_proj.weight": "column", "**.norm.weight": "replicate"}

The order of the file is the order of precedence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.layouts.rules import MAX_PATTERN_CHARS, MAX_RULES, parse_rules
from storage.problems import json_values

LayoutRules = Mapping[str, str] | str | os.PathLike[str]  # the rules, or a file with them

MAX_RULES_FILE_BYTES = 16 * MAX_RULES * MAX_PATTERN_CHARS  # room for every character as an escape


def read_rules(rules: LayoutRules | None) -> dict[str, str] | None:
    """Checked rules, from a mapping or from the file that is named. Raises ConfigError for either."""
    if rules is None:
        return None
    if rules == "":
        raise ConfigError("layout_rules names no file: it is an empty text")
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
            raise ConfigError(f"it is larger than {MAX_RULES} rules can be")
        rules = json.loads(data, object_pairs_hook=_unique)
        if rules is None:
            raise ConfigError("it must map patterns to rules, not be null")
        return parse_rules(rules).as_dict()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"layout rules in {str(path)!r:.200}: not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"layout rules in {str(path)!r:.200}: {error.message}", hint=error.hint) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigError(f"{name!r:.80} stands there twice")
        found[name] = value
    return found
