"""botocore's clients with limits, and the renewal of their credentials.

Limits. botocore reads answers whole, whatever their size, so a server could make it hold or wait for anything:

    request --> botocore's HTTP session --> answer: are head and body in time? small enough? not more elements than a
                                            listing has? no DTD? --> botocore's XML parser, which has no such limits

Reads of weights do not use these clients (`wire`). A refusal's body that is too large is dropped, because the status is
enough.

Redirects. botocore sends HeadBucket to find a bucket's region, and follows redirects of that request too. A server that
redirects everything would keep it busy until Python's stack overflows. So no redirect of HeadBucket is followed.

Renewal. A client is made again when the store refuses its credentials:

    403 ExpiredToken, ...      the credential chain is asked again: a file that was rewritten, a role, an instance
    403 RequestTimeTooSkewed   requests are signed by the store's clock, which is in its answer

Only refused requests cause a renewal. botocore itself renews credentials with a known end before they expire.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import botocore.session
from botocore import UNSIGNED
from botocore import exceptions as boto
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from urllib3 import exceptions as urllib3

from storage.errors import CredentialsExpired, StoreError, StoreUnavailable
from storage.store_ref import Credentials, StoreRef
from storage.stores.requests import ReadLimit, RetryPolicy, passing_refusal
from storage.stores.s3.answers import MAX_ERROR_BODY_BYTES, code_of, from_botocore_error
from storage.stores.s3.botocore_private import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSResponse,
    close_idle_connections,
    follow_no_redirects,
    on_refused,
    replace_http_session,
    share_service_models,
)
from storage.stores.s3.signing import sign_by_clock

if TYPE_CHECKING:
    from botocore.credentials import Credentials as BotoCredentials
    from mypy_boto3_s3.client import S3Client


MAX_ANSWER_BYTES = 16 << 20  # a page with 1000 keys of 1024 characters, all of them escaped, has 4 MB
MAX_MARKS = 200_000  # "<" and "=" in an answer, for its elements and attributes; a page of a listing has some 40,000
_READS = {"GET", "HEAD"}
_CHANGES_TAKE = 15  # times as long as reads: S3 assembles large uploads before it answers
_PIECE_BYTES = 1 << 16


def bound_answers(client: S3Client, *, uri: str, answer_s: float) -> None:
    """Limit every answer from now on to `answer_s` after its request and to the sizes above, else raise StoreError."""
    pools = {"http": _HttpPool, "https": _HttpsPool}
    replace_http_session(client, pools, lambda session: _BoundedSession(session, uri, answer_s))


def check_document(body: bytes, most_bytes: int = MAX_ANSWER_BYTES) -> None:
    """Raise ValueError for a document that no S3 server sends and no XML parser should get. Pure."""
    if len(body) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    if body.count(b"<") + body.count(b"=") > MAX_MARKS:
        raise ValueError(f"more than {MAX_MARKS} elements and attributes")
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise ValueError("a document type definition")
    if b"\0" in body:  # UTF-16 would hide the markup from the checks above
        raise ValueError("zero bytes")


class _BoundedSession:
    """A wrapper of botocore's HTTP session that reads the answers itself."""

    def __init__(self, session: Any, uri: str, answer_s: float) -> None:
        self._session = session
        self._uri = uri
        self._answer_s = answer_s

    def send(self, request: Any) -> Any:
        """Send a request. Raises botocore's errors, StoreUnavailable for a slow answer, StoreError for a bad one."""
        watch = _Watch(self._answer_s * (1 if request.method in _READS else _CHANGES_TAKE))
        _asked.watch = watch
        request.stream_output = True  # otherwise botocore would read the body
        try:
            response = self._session.send(request)
            body = self._body(request, response)
        except Exception as error:
            if watch.limit.ended:
                raise StoreUnavailable(
                    "the store did not answer in time", uri=self._uri, timeout_s=watch.limit_s
                ) from error
            raise
        finally:
            _asked.watch = None
            ended = watch.over()
        if ended:  # the body may have been cut short
            raise StoreUnavailable("the store did not answer in time", uri=self._uri, timeout_s=watch.limit_s)
        return AWSResponse(response.url, response.status_code, response.headers, _Read(body))

    def close(self) -> None:
        close_idle_connections(self._session)
        self._session.close()

    def _body(self, request: Any, response: Any) -> bytes:
        refused = response.status_code >= 300
        most_bytes = MAX_ERROR_BODY_BYTES if refused else MAX_ANSWER_BYTES
        pieces: list[bytes] = []
        received_bytes = 0
        try:
            for piece in response.raw.stream(_PIECE_BYTES):
                pieces.append(piece)
                received_bytes += len(piece)
                if received_bytes > most_bytes:
                    response.raw.close()
                    break
        except urllib3.ReadTimeoutError as error:
            raise boto.ReadTimeoutError(endpoint_url=request.url, error=error) from error
        except urllib3.HTTPError as error:
            raise boto.ConnectionClosedError(endpoint_url=request.url, request=request, error=error) from error
        promised = response.headers.get("Content-Length", "")
        is_whole = request.method == "HEAD" or not promised.isdigit() or received_bytes >= int(promised)
        if not is_whole and received_bytes <= most_bytes:
            raise StoreUnavailable("the answer ended early", uri=self._uri, received_bytes=received_bytes)
        body = b"".join(pieces)
        try:
            check_document(body, most_bytes)
        except ValueError as error:
            if refused:
                return b""
            raise StoreError("the answer is not that of an S3 store", found=str(error), uri=self._uri) from None
        return body


class _Watch:
    """Ends an answer that takes too long after the whole request was sent."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.limit = ReadLimit()
        self._timer: threading.Timer | None = None

    def begin(self, sock: object) -> None:
        if self._timer is None and isinstance(sock, socket.socket):
            self.limit.attach(sock)
            self._timer = threading.Timer(self.limit_s, self.limit.end)
            self._timer.daemon = True
            self._timer.start()

    def over(self) -> bool:
        """Stop watching. Returns whether the answer was ended."""
        if self._timer is not None:
            self._timer.cancel()
        return self.limit.detach()


class _Asked(threading.local):
    watch: _Watch | None = None  # for the request that this thread is making


_asked = _Asked()


class _HttpConnection(AWSHTTPConnection):
    def getresponse(self, *args: Any, **kwargs: Any) -> Any:
        if _asked.watch is not None:
            _asked.watch.begin(self.sock)
        return super().getresponse(*args, **kwargs)


class _HttpsConnection(AWSHTTPSConnection):
    def getresponse(self, *args: Any, **kwargs: Any) -> Any:
        if _asked.watch is not None:
            _asked.watch.begin(self.sock)
        return super().getresponse(*args, **kwargs)


class _HttpPool(AWSHTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(AWSHTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


class _Read:
    """A body that has been read already."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        yield self._body

    def read(self, *_: object, **__: object) -> bytes:
        body, self._body = self._body, b""
        return body


_ATTEMPTS = 3  # tries of one request that is not a read; callers retry whole operations
CLOCK_SLACK_S = 60.0  # a smaller offset is not the reason of a refusal, because stores allow 15 minutes


@dataclass(frozen=True, slots=True, eq=False)
class S3Session:
    """The client and the credentials by which requests are made and signed."""

    client: S3Client
    credentials: BotoCredentials | None  # None: requests are not signed
    ca_bundle: str | None
    clock_offset_s: float = 0.0  # how far the store's clock is ahead of ours


class S3Sessions:
    """The sessions of one store; `now` is the current one. Thread-safe."""

    def __init__(
        self, ref: StoreRef, credentials: Credentials | None, read_timeout_s: float, connect_timeout_s: float
    ) -> None:
        """Open the first session. Without `credentials` it uses the AWS credential chain of this process.

        Raises AccessDenied for a profile that is not configured here.
        """
        self._ref = ref
        self._passed = credentials if credentials is not None and credentials.access_key_id else None
        self._answer_s = 2 * read_timeout_s
        self._config = _client_config(ref, read_timeout_s, connect_timeout_s)
        self._lock = threading.Lock()
        self._clock_offset_s = 0.0
        self.now = self._open()

    def renew(self, used: S3Session, error: CredentialsExpired) -> bool:
        """Renew the session after a request made with `used` was refused. True if another try uses something new.

        Many threads may call this at once; one of them renews for all. Raises AccessDenied if the chain finds nothing.
        """
        with self._lock:
            if self.now is not used:
                return True
            if error.details.get("code") == "RequestTimeTooSkewed":
                offset_s = clock_offset_s(error.details.get("server_time"), time.time())
                if offset_s is None or abs(offset_s - used.clock_offset_s) < CLOCK_SLACK_S:
                    return False
                self._clock_offset_s = offset_s
                self.now = replace(used, clock_offset_s=offset_s)
                return True
            if self._passed is not None or used.credentials is None:
                return False  # only the caller that passed these credentials can pass others
            self.now = replace(self._open(), clock_offset_s=used.clock_offset_s)
            return True

    def _open(self) -> S3Session:
        ref = self._ref
        try:
            core = botocore.session.Session(profile=ref.profile)
            share_service_models(core)
            if self._passed is not None:
                key_id, secret = self._passed.access_key_id or "", self._passed.secret_access_key or ""
                core.set_credentials(key_id, secret, self._passed.session_token)
            ca_bundle = ref.ca_bundle or core.get_config_variable("ca_bundle")
            # Without boto3, whose import and handlers take a tenth of a second and add nothing that is used here.
            made: Any = core.create_client(
                "s3",
                endpoint_url=ref.endpoint_url,
                # A server with its own endpoint rarely uses the region, but the signature contains one.
                region_name=ref.region
                or core.get_config_variable("region")
                or ("us-east-1" if ref.endpoint_url else None),
                verify=ca_bundle,
                config=self._config,
            )
            client: S3Client = made
            credentials = None if ref.anonymous else core.get_credentials()
            _retry_by_our_table(client)
            follow_no_redirects(client, "HeadBucket")
            sign_by_clock(client, credentials, lambda: self._clock_offset_s)
            bound_answers(client, uri=ref.uri, answer_s=self._answer_s)
            return S3Session(client, credentials, ca_bundle)
        except (BotoCoreError, ValueError) as error:
            raise from_botocore_error(error, uri=ref.uri) from error


def clock_offset_s(server_time: object, now_s: float) -> float | None:
    """Return how far an HTTP date is ahead of `now_s` (seconds since 1970); None if it is not a date."""
    try:
        return parsedate_to_datetime(str(server_time)).timestamp() - now_s
    except (ValueError, OverflowError, OSError):
        return None


def _retry_by_our_table(client: S3Client) -> None:
    """Make the client retry what `passing_refusal` lists, in addition to what botocore itself retries."""
    policy = RetryPolicy(attempts=_ATTEMPTS)

    def pause_s(status: int, parsed: Mapping[str, Any], attempts: int) -> float | None:
        if attempts >= _ATTEMPTS or passing_refusal(status, code_of(parsed)) is None:
            return None
        return policy.pause_s(attempts, random.random())

    on_refused(client, pause_s)


def _client_config(ref: StoreRef, read_timeout_s: float, connect_timeout_s: float) -> Config:
    options: dict[str, Any] = {"signature_version": UNSIGNED} if ref.anonymous else {}
    return Config(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=32,
        s3={"addressing_style": ref.addressing_style},
        # Some servers send whole-object checksums with ranges, or refuse trailing checksums.
        response_checksum_validation="when_required",
        request_checksum_calculation="when_required",
        **options,
    )
