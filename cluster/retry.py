"""What to do about a failure: try again after a pause, or give up. One row per cause; a pure decision.

A chunk is tried by one worker up to `fetch_attempts` times (this table may say fewer), then given to another, up to
`chunk_attempts` workers. Pauses are "full jitter": anywhere between nothing and an exponentially growing cap, so that
many workers that failed together do not come back together (Brooker, "Exponential Backoff And Jitter", AWS 2015).
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.errors import (
    AccessDenied,
    IntegrityError,
    LongshoreError,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    ShortRead,
    StoreUnavailable,
    Throttled,
)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one cause is worth."""

    tries: int  # by one worker in a row, the first included; 1: never by the same worker again
    base_s: float = 0.1  # cap of the first pause; doubles with each
    cap_s: float = 5.0  # no pause is longer
    final: bool = False  # no other worker will do better: the load fails


BUDGETS: dict[str, Budget] = {
    "unavailable": Budget(tries=6),
    "throttled": Budget(tries=10, base_s=0.5, cap_s=20.0),
    "short_read": Budget(tries=6),
    "range_mismatch": Budget(tries=3),
    "digest_mismatch": Budget(tries=3, base_s=0.05),
    "lease_expired": Budget(tries=4, base_s=0.0),
    "worker_died": Budget(tries=4, base_s=0.0),
    "access_denied": Budget(tries=1, final=True),
    "not_found": Budget(tries=1, final=True),
    "object_changed": Budget(tries=1, final=True),
    "other": Budget(tries=1, final=True),
}

# The first row that matches names the cause: subclasses stand before their parents.
_CAUSES: tuple[tuple[type[LongshoreError], str], ...] = (
    (Throttled, "throttled"),
    (ShortRead, "short_read"),
    (StoreUnavailable, "unavailable"),
    (RangeMismatch, "range_mismatch"),
    (IntegrityError, "digest_mismatch"),
    (AccessDenied, "access_denied"),
    (ObjectNotFound, "not_found"),
    (ObjectChanged, "object_changed"),
)


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up."""

    reason: str


def cause_of(error: LongshoreError) -> str:
    """The row of `BUDGETS` that an error belongs to."""
    return next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "other")


def decide(cause: str, failures: int, chance: float, *, most_tries: int) -> Retry | Fail:
    """After `failures` (1 or more) failures of one cause by the same worker: once more, or give the work back.

    `chance` in [0, 1) picks the pause; `most_tries` bounds every row.
    """
    budget = BUDGETS[cause]
    tries = min(budget.tries, most_tries)
    if failures >= tries:
        return Fail(f"{cause}: {failures} of {tries} tries failed")
    return Retry(chance * min(budget.cap_s, budget.base_s * 2.0 ** (failures - 1)))


def decide_elsewhere(cause: str, workers_failed: int, chance: float, *, most_workers: int) -> Retry | Fail:
    """After `workers_failed` workers gave a chunk up: to another one, or the load fails."""
    budget = BUDGETS[cause]
    if budget.final:
        return Fail(f"{cause}: no worker can do better")
    if workers_failed >= most_workers:
        return Fail(f"{cause}: given up by {workers_failed} workers")
    return Retry(chance * min(budget.cap_s, budget.base_s * 2.0 ** (workers_failed - 1)))
