"""The first step that fits and the cheapest change, against an exhaustive search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.fit.search import (
    AS_GIVEN,
    MAX_CHANGES,
    OFFERED,
    Change,
    PlannedChange,
    changes_to_offer,
    cheapest,
    first_that_fits,
    offer,
    steps_of_auto,
    steps_text,
)
from cluster.layouts.mesh import MAX_RANKS, Layout
from cluster.options import LoadOptions
from cluster.planning.packed_plan import RankFacts
from cluster.precision.recipes import Precision
from cluster.request import LoadRequest, make_request

REQUEST = make_request(LoadOptions("s3://bucket/model", region="r"))
KINDS = ("dtype", "quantization", "ranks", "offload", "both")


def planned(what: str, kind: str, loss: int, ranks: int, need_bytes: int, problem: str = "") -> PlannedChange:
    request = replace(REQUEST, layout=Layout(fsdp_size=ranks))
    facts = (RankFacts(need_bytes, need_bytes, need_bytes),) * ranks
    return PlannedChange(Change(what, kind, loss, request), () if problem else facts, problem)


changes = st.builds(
    planned,
    st.text("abc", min_size=1, max_size=4),
    st.sampled_from(KINDS),
    st.integers(0, 4),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 50),
    st.sampled_from(("", "", "", "cannot be cut")),
)


@given(st.lists(changes, max_size=8), st.integers(0, 60))
def test_auto_chooses_the_first_step_that_fits(steps: list[PlannedChange], have: int) -> None:
    asked = []

    def why_not(step: PlannedChange) -> str:
        asked.append(step)
        return "" if step.need_bytes <= have else "needs more"

    taken, tried = first_that_fits(steps, why_not)
    by_hand = next((step for step in steps if not step.problem and step.need_bytes <= have), None)
    assert taken is by_hand  # a skipped step is no smaller than one that did not fit
    assert [each.what for each in tried] == [step.change.what for step in steps][: len(tried)]
    assert [each.why_not == "" for each in tried] == [False] * (len(tried) - 1) + [taken is not None] * bool(tried)
    assert all(not step.problem for step in asked)
    if taken is None:
        assert len(tried) == len(steps)


@given(st.lists(changes, max_size=10), st.integers(0, 60), st.integers(1, 8))
def test_no_change_is_cheaper_than_the_cheapest(steps: list[PlannedChange], have: int, at_hand: int) -> None:
    found = cheapest(steps, lambda step: step.need_bytes <= have, at_hand)
    fitting = [step for step in steps if not step.problem and step.need_bytes <= have]
    assert bool(found) == bool(fitting)
    if any(step.change.kind != "both" for step in fitting):
        fitting = [step for step in fitting if step.change.kind != "both"]
    assert all(step in fitting for step in found)
    assert len({step.change.kind for step in found}) == len(found) <= OFFERED
    for step in fitting:  # no change that fits beats the first offer in every respect
        best = found[0].change
        other = step.change
        assert (best.ranks > at_hand, best.kind == "offload", best.loss, best.ranks) <= (
            other.ranks > at_hand,
            other.kind == "offload",
            other.loss,
            other.ranks,
        )
    said = offer(found, at_hand, len(steps))
    assert len(said) < 700
    assert all(step.change.what in said for step in found)


def test_offload_is_the_last_step_of_one_rank_with_limits() -> None:
    limits: tuple[tuple[int | str, int], ...] = ((0, 10), ("cpu", 99))
    last = steps_of_auto(REQUEST, limits)[-1]
    assert (last.kind, last.request.precision) == ("offload", Precision())
    assert last.request.device_map is not None
    assert last.request.device_map.max_memory == limits
    two = replace(REQUEST, layout=Layout(2))
    assert "offload" not in [step.kind for step in [*steps_of_auto(two, limits), *steps_of_auto(REQUEST)]]


def test_auto_tries_dtypes_then_quantizations() -> None:
    steps = steps_of_auto(REQUEST)
    assert [step.what for step in steps] == [
        AS_GIVEN,
        'dtype="bfloat16"',
        'quantization="fp8"',
        'quantization="int8"',
        'quantization="int4"',
    ]
    assert steps[0].request is REQUEST
    assert [step.request.precision.quantization for step in steps] == ["", "", "fp8", "int8", "int4"]
    assert all(step.ranks == 1 for step in steps)


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (Precision("bfloat16"), ["fp8", "int8", "int4"]),
        (Precision("float32"), ["", "fp8", "int8", "int4"]),
        (Precision(quantization="fp8"), ["int8", "int4"]),
        (Precision("float16", "int8"), ["int4"]),
        (Precision(quantization="int4"), []),
    ],
)
def test_no_step_raises_the_requested_precision(given: Precision, left: list[str]) -> None:
    request = replace(REQUEST, precision=given)
    assert [step.request.precision.quantization for step in steps_of_auto(request)[1:]] == left


@pytest.mark.parametrize("layout", [Layout(), Layout(2, 1, 2), Layout(pipeline_parallel_size=4), Layout(fsdp_size=64)])
def test_changes_are_few_and_different(layout: Layout) -> None:
    request: LoadRequest = replace(REQUEST, layout=layout)
    found = changes_to_offer(request)
    assert len(found) <= MAX_CHANGES
    assert len({(change.request.layout, change.request.precision) for change in found}) == len(found)
    assert all((change.request.layout, change.request.precision) != (layout, Precision()) for change in found)
    if layout.data_parallel_size > 1:  # parts in place of copies come first: no more ranks
        more = next(change for change in found if change.kind == "ranks")
        assert more.ranks == layout.ranks
        assert more.request.layout.tensor_parallel_size == 4


def test_impossible_layouts_are_not_offered() -> None:
    found = changes_to_offer(replace(REQUEST, layout=Layout(fsdp_size=MAX_RANKS)))
    assert {change.kind for change in found} <= {"dtype", "quantization", "offload"}


def test_the_offer_names_the_cheapest_change_and_its_need() -> None:
    found = [planned("tensor_parallel_size=4", "ranks", 0, 4, 20 * 10**9), planned("x", "dtype", 1, 1, 5 * 10**9)]
    assert offer(found, 2, 9) == (
        "The cheapest change that fits: tensor_parallel_size=4 (up to 20.0 GB on each of 4 ranks, 2 present); "
        "also x (5.00 GB)"
    )
    assert "None of 9 changes" in offer([], 2, 9)
    _, tried = first_that_fits([planned("as given", "given", 0, 1, 9), planned("y", "dtype", 1, 1, 4)], lambda _: "no")
    assert steps_text(tried) == "as given: no; y: no"
    _, tried = first_that_fits([planned("as given", "given", 0, 1, 9, "p" * 999)], lambda _: "")
    assert len(steps_text(tried)) < 200


def test_a_long_reason_ends_at_a_word() -> None:
    why = "rank 0 needs 26.4 GB of device memory, a GPU has 23.5 GB (of 24.0 GB; 537 MB kept free)"
    _, tried = first_that_fits([planned("x", "given", 0, 1, 9, why)], lambda _: "")
    assert steps_text(tried) == f"x: {why}"
    _, tried = first_that_fits(
        [planned("x", "given", 0, 1, 9, f"llama-{why}. Much more of it is said here")], lambda _: ""
    )
    said = steps_text(tried)
    assert said.count("(") == said.count(")")
    assert said.startswith("x: llama-rank 0 needs 26.4 GB of device memory, a GPU has 23.5 GB. Much")
    assert said.removesuffix("...").split()[-1] in ["Much", "more", "of", "it", "is", "said", "here"]
