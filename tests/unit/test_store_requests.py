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
from storage.stores.requests import RetryPolicy, passing_refusal, with_retries, worth_a_retry


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
def test_requests_are_retried_until_success_or_the_last_attempt(attempts: int, failures: int) -> None:
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
def test_permanent_errors_are_not_retried(kind: type[StoreError]) -> None:
    request = Request(kind("no"))
    with pytest.raises(kind):
        with_retries(request, RetryPolicy(), sleep=lambda s: None)
    assert request.calls == 1


def test_passing_errors_are_retried() -> None:
    assert all(worth_a_retry(kind("x")) for kind in (StoreUnavailable, Throttled, ShortRead, RangeMismatch))


def test_other_errors_are_not_touched() -> None:
    with pytest.raises(ZeroDivisionError):
        with_retries(lambda: 1 // 0, RetryPolicy(), sleep=lambda s: None)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (408, "", StoreUnavailable),
        (425, "", StoreUnavailable),
        (429, "", Throttled),
        (500, "", StoreUnavailable),
        (503, "", Throttled),
        (503, "ServiceUnavailable", Throttled),
        (503, "XMinioServerNotInitialized", StoreUnavailable),
        (509, "", Throttled),
        (400, "KMS.ThrottlingException", Throttled),
        (400, "ThrottlingException", Throttled),
        (400, "SlowDown", Throttled),
        (400, "RequestTimeout", StoreUnavailable),
        (409, "OperationAborted", StoreUnavailable),
        (400, "KMS.DependencyTimeoutException", StoreUnavailable),
        (0, "Throttling", Throttled),
        (400, "", None),
        (400, "KMS.DisabledException", None),
        (403, "AccessDenied", None),
        (404, "NoSuchKey", None),
        (409, "BucketAlreadyExists", None),
        (501, "NotImplemented", None),
    ],
)
def test_refusals_that_pass_by_status_and_code(status: int, code: str, kind: type[StoreError] | None) -> None:
    assert passing_refusal(status, code) is kind


def test_all_codes_that_botocore_retries_are_listed() -> None:
    standard = pytest.importorskip("botocore.retries.standard")
    for code in standard.ThrottledRetryableChecker._THROTTLED_ERROR_CODES:
        assert passing_refusal(400, code) is Throttled
    for code in standard.TransientRetryableChecker._TRANSIENT_ERROR_CODES:
        assert passing_refusal(400, code) is not None
