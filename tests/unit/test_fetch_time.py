"""Every second of a rank is divided among its requests, and none is counted twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rank.state import FetchTime

STEPS = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.integers(1, 64),
        st.integers(0, 70),
        st.integers(0, 70),
        st.sampled_from(["slots", "lease"]),
    )
)


@given(STEPS)
def test_the_parts_add_up_to_the_whole(steps: list[tuple[float, int, int, int, str]]):
    spent, now_s = FetchTime(), 5.0
    spent.spend(now_s, 1, 1, 0, "")  # before the beginning
    spent.begin(now_s)
    for passed_s, *state in steps:
        now_s += passed_s
        spent.spend(now_s, *state)  # type: ignore[arg-type]
    whole = spent.working_s + spent.wait_retry_s + spent.wait_slot_s + spent.wait_lease_s
    assert whole == pytest.approx(now_s - 5.0, abs=1e-6)


def test_idle_requests_without_a_cause_are_not_counted():
    spent = FetchTime()
    spent.begin(0.0)
    spent.spend(4.0, 4, 1, 1, "")
    assert (spent.working_s, spent.wait_retry_s, spent.wait_slot_s, spent.wait_lease_s) == (1.0, 1.0, 0.0, 0.0)
    spent.spend(8.0, 4, 1, 1, "slots")
    assert (spent.working_s, spent.wait_retry_s, spent.wait_slot_s, spent.wait_lease_s) == (2.0, 2.0, 2.0, 0.0)
