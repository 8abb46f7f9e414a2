"""The best setting of each contender: found by trying, not guessed. Pure but for the runs it is given."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Setting = Mapping[str, Any]
FINALISTS = 2
FINAL_TRIES = 2


def find_best(
    settings: Sequence[Setting], gb_per_s: Callable[[Setting], float]
) -> tuple[Setting, list[tuple[Setting, float]]]:
    """(the fastest of `settings`, every try in order). Raises what `gb_per_s` raises.

    Each is tried once, the fastest few again: one lucky try decides nothing. The median of a setting's tries counts.
    """
    tried: list[tuple[Setting, float]] = []
    if len(settings) == 1:
        return settings[0], tried
    tries: list[list[float]] = [[] for _ in settings]

    def attempt(number: int) -> None:
        found = gb_per_s(settings[number])
        tries[number].append(found)
        tried.append((settings[number], found))

    for number in range(len(settings)):
        attempt(number)
    finalists = sorted(range(len(settings)), key=lambda number: -tries[number][0])[:FINALISTS]
    for _ in range(FINAL_TRIES):
        for number in finalists:
            attempt(number)
    best = max(finalists, key=lambda number: statistics.median(tries[number]))
    return settings[best], tried
