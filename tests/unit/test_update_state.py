"""Laws of an update's life: all ranks end with one revision, unless it streams."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import IllegalTransition
from cluster.scheduling.update_state import RankStep, UpdateLife, UpdatePhase, is_decided

EVENTS = st.lists(
    st.tuples(st.sampled_from(["staged", "lost", "exchanged", "failed", "decide"]), st.integers(0, 2)), max_size=30
)


def applied(life: UpdateLife, events: list[tuple[str, int]]) -> list[UpdateLife]:
    """Every moment of a life; events that are illegal are left out, as nobody sends them."""
    moments = [life]
    for name, rank in events:
        try:
            act = getattr(moments[-1], name)
            moments.append(act() if name == "decide" else act(rank))
        except IllegalTransition:
            continue
    return moments


@given(EVENTS, st.booleans())
def test_a_decision_is_final(events: list[tuple[str, int]], streaming: bool) -> None:
    moments = applied(UpdateLife.new(3, streaming=streaming), events)
    for before, after in itertools.pairwise(moments):
        assert after.decided or not before.decided
        assert after.phase is before.phase or not before.phase.is_over


@given(EVENTS)
def test_no_rank_is_new_before_all_have_staged(events: list[tuple[str, int]]) -> None:
    moments = applied(UpdateLife.new(3, streaming=False), events)
    staged: set[int] = set()
    for life in moments:
        staged |= {rank for rank, step in enumerate(life.ranks) if step is RankStep.STAGED}
        if any(step in (RankStep.NEW, RankStep.REPLACED) for step in life.ranks):
            assert staged == {0, 1, 2}
    last = moments[-1]
    if last.phase is UpdatePhase.FAILED:
        assert set(last.ranks) == {RankStep.OLD}
    if last.phase is UpdatePhase.DONE:
        assert set(last.ranks) <= {RankStep.NEW, RankStep.REPLACED}
    assert last.phase is not UpdatePhase.BROKEN


@given(EVENTS)
def test_a_stream_ends_new_or_broken(events: list[tuple[str, int]]) -> None:
    last = applied(UpdateLife.new(3, streaming=True), events)[-1]
    assert last.phase in (UpdatePhase.STREAMING, UpdatePhase.DONE, UpdatePhase.BROKEN)
    assert (last.phase is UpdatePhase.BROKEN) or RankStep.MIXED not in last.ranks


def test_nothing_fails_an_exchange() -> None:
    life = UpdateLife.new(2, streaming=False).staged(0).staged(1).decide()
    assert life.phase is UpdatePhase.EXCHANGING
    with pytest.raises(IllegalTransition):
        life.failed(0)
    assert life.lost(0).exchanged(1).phase is UpdatePhase.DONE


def test_a_rank_with_the_new_revision_tells_the_decision() -> None:
    assert is_decided(False, "b", ["a", "b"])
    assert is_decided(True, "b", ["a"])
    assert not is_decided(False, "b", ["a", ""])
