"""The search for a contender's best setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from bench.harness.rounds import FINAL_TRIES, FINALISTS, find_best

SETTINGS = [{"threads": threads} for threads in (1, 2, 4, 8)]


def test_a_single_setting_is_chosen_without_a_trial() -> None:
    def never(setting: object) -> float:
        raise RuntimeError(setting)

    assert find_best([{}], never) == {}


@given(st.permutations([1.0, 2.0, 3.0, 4.0]))
def test_every_setting_is_tried_and_the_fastest_is_chosen(speeds: list[float]) -> None:
    by_threads = dict(zip((1, 2, 4, 8), speeds, strict=True))
    tries: Counter[int] = Counter()

    def gb_per_s(setting: Mapping[str, int]) -> float:
        tries[setting["threads"]] += 1
        return by_threads[setting["threads"]]

    best = find_best(SETTINGS, gb_per_s)
    assert by_threads[best["threads"]] == 4.0
    assert set(tries) == {1, 2, 4, 8}
    assert sum(tries.values()) == len(SETTINGS) + FINALISTS * FINAL_TRIES


def test_one_lucky_try_decides_nothing() -> None:
    answers = {1: iter([9.0, 1.0, 1.0]), 2: iter([3.0, 3.0, 3.0]), 4: iter([1.0]), 8: iter([1.0])}
    best = find_best(SETTINGS, lambda setting: next(answers[setting["threads"]]))
    assert best == {"threads": 2}
