"""The decision after a failure: a table from cause to budget, and one pure function over it.

Two loops ask `decide`, each with its own count: the worker within one lease (`actors/rank/chunk_fetcher.py`), and the
agent over the failed leases of a chunk (`FailureLog` in `lease_queue.py`). A store that always fails ends a chunk after
`fetch_attempts` x `chunk_attempts` reads (4 x 3 by default), so a larger budget applies only to reads that bring some
bytes: they do not count towards `fetch_attempts`.

A new kind of failure needs a row in `RETRIES`. If callers should catch it, it also needs an error class and a row in
`_CAUSES`. `StoreUnavailable` is one class for callers, but has several rows here: `cause_of` selects the row by the
HTTP status or the socket's error. `storage.stores.requests.passing_refusal` says which answers are worth a retry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.errors import RankLost
from storage.errors import (
    AccessDenied,
    CredentialsExpired,
    IntegrityError,
    LongshoreError,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    ReadEnded,
    ShortRead,
    StoreUnavailable,
    Throttled,
)


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of failures of one cause that a chunk may have, and the waits between the tries."""

    failures: int  # retried this many times; the next failure is final. 0: never retried
    base_s: float = 0.0  # longest wait after the first failure; doubles with each further failure
    cap_s: float = 0.0  # the longest wait after any failure
    fewer_requests: bool = False  # the store asks for fewer at once; the rank halves its requests in flight


@dataclass(frozen=True, slots=True)
class Retry:
    """The decision to try again after a delay."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The decision to stop, with the reason for the user."""

    reason: str


# Budgets of one count: of a worker within a lease, and of an agent over a chunk's failed leases. See above.
RETRIES: Mapping[str, Budget] = {
    "connect": Budget(failures=12, base_s=0.1, cap_s=5.0),
    "dns": Budget(failures=12, base_s=0.2, cap_s=10.0),
    "reset": Budget(failures=12, base_s=0.05, cap_s=2.0),
    "stalled": Budget(failures=8, base_s=0.05, cap_s=2.0),  # each failure has already cost a timeout
    "server_error": Budget(failures=12, base_s=0.1, cap_s=5.0),
    "unavailable": Budget(failures=12, base_s=0.1, cap_s=5.0),  # the error names no known way
    "throttled": Budget(failures=20, base_s=0.5, cap_s=20.0, fewer_requests=True),
    "short_read": Budget(failures=12, base_s=0.05, cap_s=2.0),
    "range_mismatch": Budget(failures=6, base_s=0.1, cap_s=2.0),
    "digest_mismatch": Budget(failures=3, base_s=0.05, cap_s=1.0),
    "lease_expired": Budget(failures=4),
    "worker_died": Budget(failures=6),
    # The worker that was refused has already renewed them. Credentials with a known end are renewed before it.
    "credentials_expired": Budget(failures=3, base_s=0.5, cap_s=5.0),
    "object_changed": Budget(failures=0),
    "not_found": Budget(failures=0),
    "access_denied": Budget(failures=0),
    "unexpected": Budget(failures=0),
}

# The first class that matches counts, so subclasses come before their base classes.
_CAUSES: tuple[tuple[type[LongshoreError], str], ...] = (
    (Throttled, "throttled"),
    (ShortRead, "short_read"),
    (ReadEnded, "lease_expired"),  # a read that was closed earlier is returned and is no failure
    (StoreUnavailable, "unavailable"),
    (RangeMismatch, "range_mismatch"),
    (IntegrityError, "digest_mismatch"),
    (ObjectChanged, "object_changed"),
    (ObjectNotFound, "not_found"),
    (CredentialsExpired, "credentials_expired"),
    (AccessDenied, "access_denied"),
    (RankLost, "worker_died"),
)

# How a store was unavailable, by the name of the exception of Python's sockets, http.client or aiohttp.
_WAYS: Mapping[str, tuple[str, ...]] = {
    "dns": ("gaierror", "ClientConnectorDNSError"),
    "connect": ("ConnectionRefusedError", "ClientConnectorError", "ConnectionTimeoutError"),
    "reset": (
        *("ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError", "RemoteDisconnected", "EOFError"),
        *("BadStatusLine", "IncompleteRead", "ServerDisconnectedError", "ClientOSError", "ClientPayloadError"),
    ),
    "stalled": ("TimeoutError", "FSTimeoutError", "ServerTimeoutError", "SocketTimeoutError"),
}
_WAY_OF = {name: way for way, names in _WAYS.items() for name in names}


def cause_of(error: LongshoreError) -> str:
    """Return the row of RETRIES for an error, or "unexpected" when no retry can help."""
    cause = next((cause for kind, cause in _CAUSES if isinstance(error, kind)), "unexpected")
    if cause != "unavailable":
        return cause
    status = error.details.get("status")
    if isinstance(status, int) and status >= 400:
        return "server_error"
    return _WAY_OF.get(str(error.details.get("cause")), "unavailable")


def asks_for_fewer_requests(cause: str) -> bool:
    """Return whether a failure by this cause is a store's request to send fewer requests at once."""
    return cause in RETRIES and RETRIES[cause].fewer_requests


def decide(cause: str, failures: int, fraction: float, *, budgets: Mapping[str, Budget] = RETRIES) -> Retry | Fail:
    """Return whether to retry after the `failures`-th failure (counted from 1) of one chunk by this cause.

    `fraction` is a random number in [0, 1). The wait is that fraction of the longest wait (full jitter), so that
    workers which failed together do not retry together. An unknown cause is not retried.
    """
    budget = budgets.get(cause, Budget(failures=0))
    if failures > budget.failures:
        times = f"{failures} times" if budget.failures else "which no retry helps"
        return Fail(f"{cause.replace('_', ' ')}, {times}")
    longest_s = min(budget.cap_s, budget.base_s * 2.0 ** min(failures - 1, 60))
    return Retry(delay_s=fraction * longest_s)
