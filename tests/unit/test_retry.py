"""Every error has a cause, every cause a budget, and nothing is retried for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import errors as cluster_errors
from cluster.scheduling.retry import RETRIES, Fail, Retry, asks_for_fewer_requests, cause_of, decide
from storage import errors as storage_errors
from storage.errors import LongshoreError

causes = st.sampled_from(sorted(RETRIES))
fractions = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (storage_errors.StoreUnavailable, "unavailable"),
        (storage_errors.Throttled, "throttled"),
        (storage_errors.ShortRead, "short_read"),
        (storage_errors.RangeMismatch, "range_mismatch"),
        (storage_errors.IntegrityError, "digest_mismatch"),
        (storage_errors.ObjectChanged, "object_changed"),
        (storage_errors.ObjectNotFound, "not_found"),
        (storage_errors.AccessDenied, "access_denied"),
        (cluster_errors.RankLost, "worker_died"),
        (storage_errors.ArenaCorrupt, "unexpected"),
        (storage_errors.StoreError, "unexpected"),
    ],
)
def test_causes(kind, cause):
    assert cause_of(kind("m")) == cause


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        ({"status": 500}, "server_error"),
        ({"status": 400, "code": "RequestTimeout"}, "server_error"),
        ({"cause": "gaierror"}, "dns"),
        ({"cause": "ConnectionRefusedError"}, "connect"),
        ({"cause": "ConnectionResetError"}, "reset"),
        ({"cause": "RemoteDisconnected"}, "reset"),
        ({"cause": "TimeoutError"}, "stalled"),
        ({"cause": "SSLError"}, "unavailable"),
        ({"cause": None, "status": None}, "unavailable"),
    ],
)
def test_a_store_is_unavailable_in_many_ways(details, cause):
    assert cause_of(storage_errors.StoreUnavailable("m", **details)) == cause
    assert RETRIES[cause].failures > 0
    assert cause_of(storage_errors.Throttled("m", **details)) == "throttled"


def _every_error(kind=LongshoreError):
    yield kind
    for derived in kind.__subclasses__():
        yield from _every_error(derived)


def test_every_error_has_a_row():
    assert {cause_of(kind("m")) for kind in _every_error()} <= set(RETRIES)


@pytest.mark.parametrize("cause", ["object_changed", "not_found", "access_denied", "unexpected", "unheard of"])
def test_permanent_errors_fail_at_once(cause):
    assert isinstance(decide(cause, 1, 0.5), Fail)


@given(causes, fractions)
def test_a_budget_ends_and_never_opens_again(cause, fraction):
    decisions = [decide(cause, failures, fraction) for failures in range(1, 40)]
    kinds = [isinstance(decision, Retry) for decision in decisions]
    assert kinds == [True] * RETRIES[cause].failures + [False] * (39 - RETRIES[cause].failures)


@given(causes, st.integers(1, 10_000), fractions, fractions)
def test_retry_delays_grow_to_a_cap_and_have_jitter(cause, failures, low, high):
    budget = RETRIES[cause]
    low, high = sorted((low, high))
    one, two = decide(cause, failures, low), decide(cause, failures, high)
    if isinstance(one, Retry) and isinstance(two, Retry):
        assert 0 <= one.delay_s <= two.delay_s <= budget.cap_s
        later = decide(cause, failures + 1, high)
        assert isinstance(later, Fail) or later.delay_s >= two.delay_s


def test_another_worker_is_asked_for_once_one_has_had_its_tries():
    assert decide("digest_mismatch", 2, 0.0) == Retry(0.0)
    assert decide("digest_mismatch", 3, 0.0) == Retry(0.0)
    assert decide("worker_died", 1, 0.9) == Retry(0.0)


def test_only_throttling_asks_for_fewer_requests():
    assert [cause for cause in RETRIES if asks_for_fewer_requests(cause)] == ["throttled"]
