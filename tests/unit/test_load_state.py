"""The life of a load: laws over any sequence of events, and the intended transitions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import IllegalTransition
from cluster.scheduling.load_state import (
    EVENTS,
    MEANINGS,
    TRANSITIONS,
    Cancelled,
    Event,
    Failed,
    Grown,
    Life,
    LoadState,
    Planned,
    RankLost,
    RankProgress,
    RankReady,
    RankReplaced,
    Released,
    Replanned,
    ResourcesGranted,
    ResourcesMissing,
    Scaled,
    Started,
    advance,
    render_doc,
)

attempts = st.integers(1, 3)
ranks = st.integers(0, 2)
incarnations = st.integers(0, 2)
events: st.SearchStrategy[Event] = st.one_of(
    *(st.builds(kind, attempt=attempts) for kind in (Planned, ResourcesMissing, ResourcesGranted, Started)),
    st.builds(Replanned, st.sets(ranks).map(tuple), attempt=attempts),
    *(st.builds(kind, ranks, incarnations, attempt=attempts) for kind in (RankReady, RankLost, RankReplaced)),
    st.builds(RankProgress, ranks, incarnations, st.integers(0, 100), attempt=attempts),
    st.builds(Failed, st.text(), attempt=attempts),
    *(st.builds(kind, attempt=attempts) for kind in (Cancelled, Released)),
)


def run(life: Life, *sequence: Event) -> Life:
    """Return the load after the events; illegal ones are left out."""
    for event in sequence:
        try:
            life = advance(life, event)
        except IllegalTransition:
            continue
    return life


lives = st.lists(events, max_size=25).map(lambda sequence: run(Life.new(3), *sequence))


@given(lives, events)
def test_attempts_and_incarnations_never_fall(life, event):
    after = run(life, event)
    assert after.attempt >= life.attempt
    assert all(a.incarnation >= b.incarnation for a, b in zip(after.ranks, life.ranks, strict=True))
    assert len(after.ranks) == 3


@given(lives, events)
def test_no_event_changes_a_final_state(life, event):
    ended = run(life, Failed("broken", attempt=life.attempt))
    assert ended.is_over
    assert advance(ended, event) is ended


@given(lives, events)
def test_a_repeated_event_changes_nothing(life, event):
    once = run(life, event)
    assert run(once, event) == once


@given(lives, events)
def test_an_event_of_an_older_attempt_changes_nothing(life, event):
    later = run(life, Replanned(attempt=life.attempt + 5))
    assert advance(later, event) is later


@given(lives, ranks, incarnations, st.sampled_from([RankReady, RankLost, RankReplaced]))
def test_an_event_of_an_older_incarnation_changes_nothing(life, rank, incarnation, kind):
    life = run(life, RankReplaced(rank, 7, attempt=life.attempt))
    if life.ranks[rank].incarnation == 7:
        assert advance(life, kind(rank, incarnation, attempt=life.attempt)) is life


@given(lives, events)
def test_a_load_is_ready_exactly_when_every_rank_is(life, event):
    after = run(life, event)
    if after.state in (LoadState.LOADING, LoadState.DEGRADED):
        assert after.ranks_ready < 3
    if after.is_ready:
        assert after.ranks_ready == 3
    assert not any(rank.ready and rank.lost for rank in after.ranks)


@given(lives, ranks, st.integers(0, 100), st.integers(0, 100))
def test_progress_of_one_incarnation_never_falls(life, rank, one, two):
    before = life
    for placed_bytes in (one, two):
        event = RankProgress(rank, life.ranks[rank].incarnation, placed_bytes, attempt=life.attempt)
        after = run(before, event)
        assert after.placed_bytes >= before.placed_bytes
        before = after


@given(lives, events)
def test_a_load_changes_state_only_by_the_tables(life, event):
    after = run(life, event)
    if after.state is not life.state:
        assert type(event) in TRANSITIONS[life.state]
        assert event.attempt == after.attempt


READY = run(Life.new(2), Planned(), Started(), RankReady(0, 0), RankReady(1, 0))
joining = st.one_of(
    st.builds(Grown, st.lists(incarnations, min_size=1, max_size=2).map(tuple), attempt=attempts),
    st.builds(Scaled, st.integers(1, 4), attempt=attempts),
    *(st.builds(kind, st.integers(0, 4), incarnations, attempt=attempts) for kind in (RankReady, RankLost)),
)


@given(st.lists(joining, max_size=15))
def test_a_model_is_ready_without_the_ranks_that_join(sequence):
    life = READY
    for event in sequence:
        before, life = life, run(life, event)
        serving = life.ranks[: len(life.ranks) - life.joining]
        assert serving
        assert life.is_ready == all(rank.ready for rank in serving)
        if not isinstance(event, Scaled):
            assert len(serving) == len(before.ranks) - before.joining
        elif life is not before:
            assert (len(life.ranks), life.joining) == (event.ranks, 0)


def test_ranks_that_join_belong_to_the_model_once_it_is_scaled():
    grown = advance(READY, Grown((0, 3), attempt=2))
    assert (grown.state, grown.joining) == (LoadState.READY, 2)
    filled = run(grown, RankReady(2, 0, attempt=2), RankReady(3, 3, attempt=2), RankLost(2, 0, attempt=2))
    assert filled.is_ready
    assert advance(filled, Scaled(4, attempt=2)).state is LoadState.DEGRADED
    assert advance(filled, Scaled(2, attempt=2)) == Life(LoadState.READY, 2, READY.ranks)
    with pytest.raises(IllegalTransition):
        advance(filled, Scaled(5, attempt=2))
    with pytest.raises(IllegalTransition):
        advance(Life.new(2), Grown((0,), attempt=2))


LOADING = run(Life.new(2), Planned(), Started())


def test_a_load_goes_from_the_request_to_ready():
    life = Life.new(2)
    seen = [life.state.value]
    for event in (
        Planned(),
        ResourcesMissing(),
        ResourcesMissing(),
        ResourcesGranted(),
        Started(),
        RankProgress(0, 0, 10),
        RankReady(1, 0),
        RankReady(0, 0),
        Released(),
    ):
        life = advance(life, event)
        seen.append(life.state.value)
    expected = "planning starting waiting waiting starting loading loading loading ready released"
    assert seen == expected.split()
    assert life.placed_bytes == 10


def test_ranks_may_be_faster_than_the_coordinator():
    life = run(Life.new(1), Planned())
    life = advance(life, RankReady(0, 0))
    assert life.state is LoadState.STARTING
    assert advance(life, Started()).is_ready


def test_a_load_of_no_ranks_is_ready_when_it_starts():
    assert run(Life.new(0), Planned(), Started()).is_ready


def test_a_rank_lost_while_loading_starts_again():
    life = run(LOADING, RankProgress(0, 0, 50), RankLost(0, 0))
    assert (life.state, life.placed_bytes) == (LoadState.LOADING, 0)
    assert advance(life, RankReady(0, 0)) is life  # the dead rank's last messages
    life = run(life, RankReplaced(0, 1), RankReady(1, 0), RankReady(0, 0))
    assert life.state is LoadState.LOADING
    assert advance(life, RankReady(0, 1)).is_ready


def test_a_rank_lost_when_ready_degrades_the_model():
    life = run(LOADING, RankReady(0, 0), RankReady(1, 0))
    assert life.is_ready
    life = advance(life, RankLost(1, 0))
    assert life.state is LoadState.DEGRADED
    life = advance(life, RankReplaced(1, 1))
    assert life.state is LoadState.DEGRADED
    assert advance(life, RankReady(1, 1)).is_ready
    # A replacement alone has the same effect, when the message about the loss never arrived.
    assert run(LOADING, RankReady(0, 0), RankReady(1, 0), RankReplaced(0, 1)).state is LoadState.DEGRADED


def test_a_new_attempt_keeps_incarnations_and_progress():
    life = run(LOADING, RankReplaced(0, 3), RankProgress(0, 3, 10), RankReady(1, 0), Replanned((0,), attempt=2))
    assert (life.state, life.attempt, life.ranks_ready, life.placed_bytes) == (LoadState.LOADING, 2, 1, 0)
    assert [rank.incarnation for rank in life.ranks] == [3, 0]
    assert advance(life, RankReady(0, 3, attempt=2)) is life  # from the lost node
    assert run(life, RankReplaced(0, 4, attempt=2), RankReady(0, 4, attempt=2)).is_ready


def test_a_model_that_loses_a_node_is_degraded_until_refilled():
    ready = run(LOADING, RankReady(0, 0), RankReady(1, 0))
    life = advance(ready, Replanned((1,), attempt=2))
    assert (life.state, life.attempt, life.ranks_ready) == (LoadState.DEGRADED, 2, 1)
    assert advance(life, Replanned((0, 1), attempt=2)) is life
    assert run(life, RankReplaced(1, 1, attempt=2), RankReady(1, 1, attempt=2)).is_ready


@given(lives, st.sets(ranks))
def test_a_new_attempt_touches_only_the_ranks_it_is_for(life, lost):
    after = run(life, Replanned(tuple(lost), attempt=life.attempt + 1))
    for rank in set(range(3)) - lost:
        assert after.ranks[rank] == life.ranks[rank]
    assert life.is_over or all(after.ranks[rank].lost and not after.ranks[rank].ready for rank in lost)


def test_the_error_of_a_failed_load_is_kept():
    life = advance(LOADING, Failed("store on fire"))
    assert (life.state, life.error) == (LoadState.FAILED, "store on fire")


@pytest.mark.parametrize(
    ("life", "event"),
    [
        (Life.new(1), Started()),
        (Life.new(1), RankReady(0, 0)),
        (Life.new(1), ResourcesMissing()),
        (LOADING, ResourcesMissing()),
        (LOADING, Started(attempt=2)),
        (LOADING, RankReady(2, 0)),
        (LOADING, RankReady(-1, 0)),
        (LOADING, RankReady(0, 1)),
        (LOADING, RankLost(0, 1)),
        (LOADING, Replanned((2,), attempt=2)),
    ],
)
def test_illegal_transitions_are_refused(life, event):
    with pytest.raises(IllegalTransition):
        advance(life, event)


def test_the_tables_are_complete():
    assert set(TRANSITIONS) == set(MEANINGS) == set(LoadState)
    for state in LoadState:
        assert bool(TRANSITIONS[state]) != state.is_terminal
        assert set(TRANSITIONS[state]) <= set(EVENTS)
        if not state.is_terminal:
            assert {Failed, Released, Cancelled, Replanned} <= set(TRANSITIONS[state])


def test_the_document_is_printed_from_the_tables():
    document = Path(__file__).parents[2] / "docs" / "load_states.md"
    assert document.read_text() == render_doc(), "python -m cluster.scheduling.load_state > docs/load_states.md"
