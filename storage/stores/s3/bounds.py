"""What an S3 server can make boto3 hold and wait for: botocore reads answers whole, whatever their size.

    request --> botocore's own HTTP session --> answer: its head and body in time? small? no more marks than a listing
                                                has? no DTD? --> botocore's XML parser, which knows no such limits

Reads of weights do not come this way (`wire`). A refusal's body that is too much is dropped: the status says enough.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto
from urllib3 import exceptions as urllib3

from storage.errors import StoreError, StoreUnavailable
from storage.stores.read_limit import ReadLimit
from storage.stores.s3.answers import MAX_ERROR_BODY_BYTES
from storage.stores.s3.botocore_private import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSResponse,
    close_idle_connections,
    replace_http_session,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


MAX_ANSWER_BYTES = 16 << 20  # a page of a thousand keys of 1024 characters, all escaped, has 4 MB
MAX_MARKS = 200_000  # "<" and "=" of an answer: its elements and attributes; a page of a listing has some 40,000
_READS = {"GET", "HEAD"}
_CHANGES_TAKE = 15  # times as long: S3 puts large uploads together before it answers
_PIECE_BYTES = 1 << 16


def bound_answers(client: S3Client, *, uri: str, answer_s: float) -> None:
    """From now on every answer ends within `answer_s` of its request and within the limits above; StoreError else."""
    pools = {"http": _HttpPool, "https": _HttpsPool}
    replace_http_session(client, pools, lambda session: _BoundedSession(session, uri, answer_s))


def check_document(body: bytes) -> None:
    """Raises ValueError for what no S3 server sends and no XML parser should see. Pure."""
    if len(body) > MAX_ANSWER_BYTES:
        raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
    if body.count(b"<") + body.count(b"=") > MAX_MARKS:
        raise ValueError(f"more than {MAX_MARKS} elements and attributes")
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise ValueError("a document type of its own")
    if b"\0" in body:  # UTF-16, in which the above reads otherwise
        raise ValueError("zero bytes")


class _BoundedSession:
    """botocore's HTTP session, whose answers are read here."""

    def __init__(self, session: Any, uri: str, answer_s: float) -> None:
        self._session = session
        self._uri = uri
        self._answer_s = answer_s

    def send(self, request: Any) -> Any:
        """Raises botocore's errors, StoreUnavailable for an answer that takes too long, StoreError for any other."""
        watch = _Watch(self._answer_s * (1 if request.method in _READS else _CHANGES_TAKE))
        _asked.watch = watch
        request.stream_output = True  # else botocore reads it
        try:
            response = self._session.send(request)
            try:
                body = self._body(request, response)
            except BaseException:
                response.raw.close()  # what is unread would be taken for the next answer
                raise
        except Exception as error:
            if watch.limit.ended:
                raise StoreUnavailable(
                    "the store did not answer in time", uri=self._uri, timeout_s=watch.limit_s
                ) from error
            raise
        finally:
            _asked.watch = None
            ended = watch.over()
        if ended:  # what was read may have been cut short
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
            if received_bytes > most_bytes:
                raise ValueError(f"more than {most_bytes} bytes")
            check_document(body)
        except ValueError as error:
            if refused:
                return b""
            raise StoreError("the answer is none of an S3 store", found=str(error), uri=self._uri) from None
        return body


class _Watch:
    """Ends an answer that takes too long, from the time that the whole request was sent."""

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
        """True: it was ended."""
        if self._timer is not None:
            self._timer.cancel()
        return self.limit.detach()


class _Asked(threading.local):
    watch: _Watch | None = None  # of the request that this thread is making


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
    """A body that was read."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        yield self._body

    def read(self, *_: object, **__: object) -> bytes:
        body, self._body = self._body, b""
        return body
