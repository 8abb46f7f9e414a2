"""One request to a store: how it is ended from outside, and how it is repeated after a pause that grows.

owner: limits.begin(deadline) --> ReadLimit --> store: attach(socket) ... detach()
                                         ^
    end(): by the owner, or by the thread of `ReadLimits` at the deadline. The socket is shut down, so whoever waits
    on it, for the head, in TLS or for the next byte of a body that trickles, wakes at once

The reader itself looks at no clock: its receives stay as large as they are.

The same request again, after a pause that grows, when the store's answer says that this may help.

`passing_refusal` is the one table of refusals that deserve another try, by status and by error code. It serves every
store and every kind of request: reads, listings, look-ups and uploads. What it was made of:

- codes: those that botocore's standard mode retries (botocore/retries/standard.py: transient and throttled errors)
- codes of S3 itself: the error list of the S3 API Reference ("Error responses"), where it says to try again
- codes with "KMS." before them: S3 passes on what AWS KMS answered (KMS API Reference, "Common errors")
- statuses: 408, 425, 429 and 5xx as RFC 9110, RFC 8470 and RFC 6585 describe them; 509 from botocore/data/_retry.json
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import CredentialsExpired, RangeMismatch, ReadEnded, StoreError, StoreUnavailable, Throttled

T = TypeVar("T")


class ReadLimit:
    """One read, or several tries of one, that can be ended. Thread-safe."""

    def __init__(self, deadline_s: float = math.inf) -> None:
        """`deadline_s`, by the monotonic clock, is for whoever watches: see `ReadLimits`."""
        self.deadline_s = deadline_s
        self.ended = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._call: Callable[[], object] | None = None

    def end(self) -> None:
        """End the read that is under way, and let none begin. Returns at once."""
        with self._lock:
            self.ended = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown: it takes the TLS away from under the reader, who would see ciphertext.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            if self._call is not None:
                self._call()

    @contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """For a read that has no socket of ours: `call`, which must not wait, is made when the read is ended inside of
        the block. Raises ReadEnded.
        """
        with self._lock:
            self.check()
            self._call = call
        try:
            yield
        finally:
            with self._lock:
                self._call = None

    def check(self) -> None:
        """Raises ReadEnded when the read was ended."""
        if self.ended:
            raise ReadEnded("the read was ended: its time was over, or its bytes were not wanted any more")

    def attach(self, sock: socket.socket) -> None:
        """The read goes through this socket from now on. Raises ReadEnded."""
        with self._lock:
            self.check()
            self._socket = sock

    def detach(self) -> bool:
        """The socket is left alone from now on; to be called before it is closed. True: the read was ended."""
        with self._lock:
            self._socket = None
            return self.ended


class ReadLimits:
    """Ends reads at their deadlines, in one thread that begins with the first read. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[ReadLimit] = set()
        self._wakes_s = math.inf  # when the thread looks again
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def begin(self, deadline_s: float) -> Iterator[ReadLimit]:
        """A limit for the reads inside the block."""
        limit = ReadLimit(deadline_s)
        with self._changed:
            self._running.add(limit)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="read-limits", daemon=True)
                self._thread.start()
            # Deadlines mostly come in order: the thread sleeps through all but the first.
            if deadline_s < self._wakes_s:
                self._changed.notify()
        try:
            yield limit
        finally:
            with self._changed:
                self._running.discard(limit)

    def end_all(self) -> None:
        """End every read that runs now."""
        with self._changed:
            running = list(self._running)
        for limit in running:
            limit.end()

    def close(self) -> None:
        """The thread is gone when this returns; deadlines are not watched any more. Idempotent."""
        with self._changed:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                for limit in self._running:
                    if limit.deadline_s <= now_s:
                        limit.end()
                waiting = [limit.deadline_s for limit in self._running if not limit.ended]
                self._wakes_s = min(waiting, default=math.inf)
                self._changed.wait(None if math.isinf(self._wakes_s) else self._wakes_s - now_s)


def outlived(read: Callable[[], T], limit: ReadLimit, name: str) -> T:
    """What `read` returns, in a thread of its own; once `limit` was ended, ReadEnded, and the thread is left alone.

    It must touch nothing that anybody else uses by then. It ends with the process at the latest.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None] | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((read(), None))
        except BaseException as error:
            answers.put((None, error))

    with limit.calling(lambda: answers.put(None)):
        threading.Thread(target=work, name=name, daemon=True).start()
        answer = answers.get()
    if answer is None:
        raise ReadEnded("the read was ended: its time was over, or its bytes were not wanted any more")
    found, error = answer
    if error is not None:
        raise error
    return found  # type: ignore[return-value]


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
