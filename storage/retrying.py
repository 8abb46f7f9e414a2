"""The same request again, after a pause that grows, when the store's answer says that this may help."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import CredentialsExpired, RangeMismatch, StoreError, StoreUnavailable

T = TypeVar("T")


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
