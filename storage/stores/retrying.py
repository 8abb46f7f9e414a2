"""The same request again, after a pause that grows, when the store's answer says that this may help.

`passing_refusal` is the one table of refusals that deserve another try, by status and by error code. It serves every
store and every kind of request: reads, listings, look-ups and uploads. What it was made of:

- codes: those that botocore's standard mode retries (botocore/retries/standard.py: transient and throttled errors)
- codes of S3 itself: the error list of the S3 API Reference ("Error responses"), where it says to try again
- codes with "KMS." before them: S3 passes on what AWS KMS answered (KMS API Reference, "Common errors")
- statuses: 408, 425, 429 and 5xx as RFC 9110, RFC 8470 and RFC 6585 describe them; 509 from botocore/data/_retry.json
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import CredentialsExpired, RangeMismatch, StoreError, StoreUnavailable, Throttled

T = TypeVar("T")

_THROTTLING_CODES = frozenset(
    {
        *("BandwidthLimitExceeded", "EC2ThrottledException", "LimitExceededException", "PriorRequestNotComplete"),
        *("ProvisionedThroughputExceededException", "RequestLimitExceeded", "RequestThrottled"),
        *("RequestThrottledException", "SlowDown", "ThrottledException", "Throttling", "ThrottlingException"),
        *("TooManyRequests", "TooManyRequestsException", "TransactionInProgressException"),
        *("SlowDownRead", "SlowDownWrite", "ServerBusy"),  # MinIO's and Azure's
    }
)
_TRANSIENT_CODES = frozenset(
    {
        *("RequestTimeout", "RequestTimeoutException", "InternalError", "InternalFailure", "ServiceUnavailable"),
        *("OperationAborted", "ConditionalRequestConflict", "OperationTimedOut"),
        *("DependencyTimeoutException", "KMSInternalException", "InternalException"),
    }
)
_THROTTLING_STATUSES = frozenset({429, 509})
_TRANSIENT_STATUSES = frozenset({408, 425})
_FINAL_STATUSES = frozenset({501, 505})  # servers that will never do what was asked


def passing_refusal(status: int, code: str = "") -> type[StoreUnavailable] | None:
    """Return the kind of error for a refusal that deserves another try, or None when no try would help.

    Args:
        status: the HTTP status of the answer; 0 when it is not known.
        code: the store's error code; "" when the answer has none. A known code counts more than the status.
    """
    code = code.removeprefix("KMS.")
    if code in _THROTTLING_CODES or (status == 503 and code in ("", "ServiceUnavailable")):
        return Throttled
    if code in _TRANSIENT_CODES:
        return StoreUnavailable
    if status in _THROTTLING_STATUSES:
        return Throttled
    if status in _TRANSIENT_STATUSES or (status >= 500 and status not in _FINAL_STATUSES):
        return StoreUnavailable
    return None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently."""

    attempts: int = 5  # tries in all
    base_s: float = 0.2  # longest pause before the second try; doubles each time
    max_s: float = 10.0  # no pause is longer

    def pause_s(self, failures: int, fraction: float) -> float:
        """Pause after that many failures; `fraction`, random in [0, 1), spreads the callers (full jitter)."""
        return fraction * min(self.max_s, self.base_s * float(2 ** min(failures - 1, 60)))


def worth_a_retry(error: StoreError) -> bool:
    """True for what may pass by itself (unreachable, throttled, cut short, other bytes), or was mended meanwhile."""
    return isinstance(error, StoreUnavailable | RangeMismatch | CredentialsExpired)


def with_retries(
    request: Callable[[], T],
    policy: RetryPolicy,
    *,
    sleep: Callable[[float], object] = time.sleep,
    fraction: Callable[[], float] = random.random,
) -> T:
    """What `request` returns, asked up to `policy.attempts` times. Raises its last StoreError."""
    failures = 0
    while True:
        try:
            return request()
        except StoreError as error:
            failures += 1
            if failures >= policy.attempts or not worth_a_retry(error):
                raise
        sleep(policy.pause_s(failures, fraction()))
