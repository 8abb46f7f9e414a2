"""Retries: as many as allowed, only for what may pass, with pauses that grow and are spread."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import (
    AccessDenied,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    ShortRead,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from storage.retrying import RetryPolicy, with_retries, worth_a_retry


class Request:
    """Fails with the given errors in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@given(st.integers(1, 6), st.integers(0, 8))
def test_asked_until_it_works_or_the_budget_ends(attempts: int, failures: int) -> None:
    request = Request(*[StoreUnavailable("reset") for _ in range(failures)])
    pauses: list[float] = []
    policy = RetryPolicy(attempts=attempts)
    if failures < attempts:
        assert with_retries(request, policy, sleep=pauses.append) == "answer"
        assert request.calls == failures + 1
    else:
        with pytest.raises(StoreUnavailable):
            with_retries(request, policy, sleep=pauses.append)
        assert request.calls == attempts
    assert len(pauses) == request.calls - 1


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_pauses_are_bounded_and_spread(failures: int, fraction: float) -> None:
    policy = RetryPolicy()
    pause_s = policy.pause_s(failures, fraction)
    assert 0 <= pause_s <= policy.max_s
    assert pause_s <= policy.pause_s(failures + 1, fraction)
    assert pause_s == fraction * policy.pause_s(failures, 1.0)


@pytest.mark.parametrize("kind", [AccessDenied, ObjectNotFound, ObjectChanged])
def test_what_will_not_pass_is_not_asked_again(kind: type[StoreError]) -> None:
    request = Request(kind("no"))
    with pytest.raises(kind):
        with_retries(request, RetryPolicy(), sleep=lambda s: None)
    assert request.calls == 1


def test_what_may_pass() -> None:
    assert all(worth_a_retry(kind("x")) for kind in (StoreUnavailable, Throttled, ShortRead, RangeMismatch))


def test_other_errors_are_not_touched() -> None:
    with pytest.raises(ZeroDivisionError):
        with_retries(lambda: 1 // 0, RetryPolicy(), sleep=lambda s: None)
