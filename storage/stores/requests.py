"""Requests to a store: through which proxy, how one is ended from outside, and when one is repeated.

    HTTPS_PROXY, HTTP_PROXY    the proxy for requests by https and by http: http://[user:password@]host[:port]
    NO_PROXY                   hosts, domains or host:port that need no proxy, separated by commas; "*" for all

The names may also be in lower case, which takes precedence. `urllib.request` reads them, for botocore as well. So reads
of weights use the same proxy as listings, stats and uploads. No message contains the user or the password.

Ending a read. The reader itself never looks at a clock, so its receives stay as large as they are.

    owner: limits.begin(deadline) --> ReadLimit --> store: attach(socket) ... detach()
                                         ^
    end(): called by the owner, or by the thread of `ReadLimits` at the deadline. It shuts the socket down, so a reader
    wakes at once, whether it waits for the head of an answer, in TLS, or for the next byte of a slow body

Repeating a request. `with_retries` repeats it, after growing pauses, when the store's answer shows that this may help.
`passing_refusal` is the one table of refusals that deserve another try, by status and by error code. It serves every
store and every kind of request: reads, listings, stats and uploads. Its sources:

- codes: those that botocore's standard mode retries (botocore/retries/standard.py: transient and throttled errors)
- codes of S3 itself: the error list of the S3 API Reference ("Error responses"), where it says to try again
- codes with the prefix "KMS.": S3 forwards what AWS KMS answered (KMS API Reference, "Common errors")
- codes of other stores with S3's or their own API: MinIO (its cmd/api-errors.go) and Azure Blob Storage ("Blob service
  error codes")
- statuses: 408, 425, 429 and 5xx as RFC 9110, RFC 8470 and RFC 6585 describe them; 509 from botocore/data/_retry.json
"""

from __future__ import annotations

import base64
import contextlib
import math
import queue
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from storage.errors import (
    CredentialsExpired,
    InvalidUri,
    ProxyRefused,
    RangeMismatch,
    ReadEnded,
    StoreError,
    StoreUnavailable,
    Throttled,
)


def host_and_port(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy. Its str and repr contain no credentials."""

    host: str
    port: int
    user: str | None = field(default=None, repr=False)
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"http://{host_and_port(self.host, self.port)}"

    def secret_url(self) -> str:
        """Return the URL with user and password, for libraries that accept no other form."""
        credentials = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user is not None else ""
        return f"http://{credentials}{str(self).removeprefix('http://')}"

    def headers(self) -> dict[str, str]:
        """Return the headers that are sent to the proxy and not to the server."""
        if self.user is None:
            return {}
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"Proxy-Authorization": f"Basic {token}"}


def find_proxy(url: str) -> Proxy | None:
    """Return the proxy for requests to `url`, or None if the environment names none for it.

    Args:
        url: scheme, host and optionally port of the server; the rest is ignored.

    Raises:
        InvalidUri: the variable does not hold the URL of a usable proxy.
    """
    parts = urlsplit(url)
    named = getproxies().get(parts.scheme)
    if not named or proxy_bypass(parts.netloc):
        return None
    try:
        proxy = urlsplit(named if "://" in named else f"http://{named.removeprefix('//')}")
        usable = proxy.scheme == "http" and bool(proxy.hostname)
        port = proxy.port or 80
    except ValueError:
        usable = False
    if not usable:
        raise InvalidUri(
            f"{parts.scheme.upper()}_PROXY is not the URL of a usable proxy",
            hint="write http://host:port; a proxy that is itself reached by https or SOCKS is not supported",
        )
    user = unquote(proxy.username) if proxy.username else None
    return Proxy(str(proxy.hostname), port, user, unquote(proxy.password or ""))


def proxy_refusal(status: int, **where: Any) -> StoreError:
    """Return the error for a proxy that answered with `status` instead of passing a request on."""
    if status == 407:
        return ProxyRefused(
            "the proxy requires a user and a password, or refused those that were sent",
            hint="write them into HTTPS_PROXY or HTTP_PROXY, percent-encoded: http://user:password@host:port",
            status=status,
            **where,
        )
    if (passing := passing_refusal(status)) is not None:
        return passing("the proxy could not reach the store", status=status, **where)
    return ProxyRefused(
        "the proxy refused to pass the request on",
        hint="allow the store's host and port at the proxy, or list the host in NO_PROXY",
        status=status,
        **where,
    )


def tls_context(ca_bundle: str | None, uri: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the CAs in that PEM file, or the system's. Raises StoreError, naming `uri`."""
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(
            "the CA bundle cannot be read",
            hint="ca_bundle must name a PEM file with certificates, readable on this host",
            ca_bundle=ca_bundle,
            uri=uri,
        ) from error


T = TypeVar("T")


class ReadLimit:
    """One read, or several tries of one, that another thread can end. Thread-safe."""

    def __init__(self, deadline_s: float = math.inf) -> None:
        """Set a limit. `deadline_s`, on the monotonic clock, takes effect only inside `ReadLimits.begin`."""
        self.deadline_s = deadline_s
        self.ended = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._call: Callable[[], object] | None = None

    def end(self) -> None:
        """End the read that is running, and prevent further ones. Returns at once."""
        with self._lock:
            self.ended = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # SSLSocket.shutdown would remove the TLS layer while the reader uses it; it would see ciphertext.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            if self._call is not None:
                self._call()

    @contextmanager
    def calling(self, call: Callable[[], object]) -> Iterator[None]:
        """Call `call` if the read is ended inside the block, for a read without a socket of ours. Raises ReadEnded.

        `call` must not block.
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
        """Raise ReadEnded if the read was ended."""
        if self.ended:
            raise ReadEnded("the read was ended, because its time was over or its bytes were no longer needed")

    def attach(self, sock: socket.socket) -> None:
        """Set the socket that the read uses from now on. Raises ReadEnded."""
        with self._lock:
            self.check()
            self._socket = sock

    def detach(self) -> bool:
        """Leave the socket alone from now on; call this before closing it. Returns whether the read was ended."""
        with self._lock:
            self._socket = None
            return self.ended


class ReadLimits:
    """Ends reads at their deadlines, from one thread that starts with the first read. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[ReadLimit] = set()
        self._wakes_s = math.inf  # when the thread next checks the deadlines
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def begin(self, deadline_s: float) -> Iterator[ReadLimit]:
        """Yield a limit for the reads inside the block, which ends them at `deadline_s` (monotonic clock)."""
        limit = ReadLimit(deadline_s)
        with self._changed:
            self._running.add(limit)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="read-limits", daemon=True)
                self._thread.start()
            # Deadlines mostly come in order, so only an earlier one needs to wake the thread.
            if deadline_s < self._wakes_s:
                self._changed.notify()
        try:
            yield limit
        finally:
            with self._changed:
                self._running.discard(limit)

    def end_all(self) -> None:
        """End every read that is running now."""
        with self._changed:
            running = list(self._running)
        for limit in running:
            limit.end()

    def close(self) -> None:
        """Stop the thread and wait for it. Deadlines are not watched any more. Idempotent."""
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
    """Run `read` in a thread and return its result. When `limit` ends, raise ReadEnded and abandon the thread.

    An abandoned thread may run until the process ends. So `read` must not touch anything that others use later.
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
        raise ReadEnded("the read was ended, because its time was over or its bytes were no longer needed")
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
        *("SlowDownRead", "SlowDownWrite", "ServerBusy"),  # codes of MinIO and Azure
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
_FINAL_STATUSES = frozenset({501, 505})  # the server does not implement the request and never will


# The message of each kind of passing refusal that callers can tell apart.
PASSING: dict[type[StoreUnavailable], str] = {Throttled: "the store requires fewer requests"}


def passing_refusal(status: int, code: str = "") -> type[StoreUnavailable] | None:
    """Return the kind of error for a refusal that deserves another try, or None when no try would help.

    Args:
        status: the HTTP status of the answer; 0 when it is not known.
        code: the store's error code; "" when the answer has none. A known code takes precedence over the status.
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
    """The number of tries of a request and the pauses between them."""

    attempts: int = 5  # tries in all, the first included
    base_s: float = 0.2  # longest pause before the second try; doubles with each further try
    max_s: float = 10.0  # upper limit of every pause

    def pause_s(self, failures: int, fraction: float) -> float:
        """Return the pause after that many failures. `fraction`, random in [0, 1), spreads callers (full jitter)."""
        return fraction * min(self.max_s, self.base_s * float(2 ** min(failures - 1, 60)))


def worth_a_retry(error: StoreError) -> bool:
    """True for errors that may pass by themselves (unreachable, throttled, short, wrong range, expired credentials)."""
    return isinstance(error, StoreUnavailable | RangeMismatch | CredentialsExpired)


def with_retries(
    request: Callable[[], T],
    policy: RetryPolicy,
    *,
    sleep: Callable[[float], object] = time.sleep,
    fraction: Callable[[], float] = random.random,
) -> T:
    """Return the result of `request`, after up to `policy.attempts` tries. Raises the StoreError of the last try."""
    failures = 0
    while True:
        try:
            return request()
        except StoreError as error:
            failures += 1
            if failures >= policy.attempts or not worth_a_retry(error):
                raise
        sleep(policy.pause_s(failures, fraction()))
