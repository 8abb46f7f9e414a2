"""Checks and translation of what an S3 server or botocore answers: heads, object facts, checksums, errors. Pure.

The head of an answer is checked before a byte of its body is stored. Wrong answers are refused here: 200 for a range,
no If-Match, another range, another length, an encoding, a header twice. A refusal by the server becomes a StoreError.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import html
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from storage.checksum import DIGEST_SIZES
from storage.errors import (
    AccessDenied,
    CredentialsExpired,
    LongshoreError,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    StoreError,
    StoreUnavailable,
)
from storage.stores.object_store import ByteRange, ObjectInfo
from storage.stores.requests import PASSING, Proxy, passing_refusal, proxy_refusal

MAX_ERROR_BODY_BYTES = 64 << 10  # read at most this much of the body of an error

_MISSING = {"NoSuchKey": "no such object", "NoSuchBucket": "no such bucket", "NoSuchUpload": "no such upload"}
_DENIALS = {
    "InvalidAccessKeyId": "the store does not know the access key",
    "SignatureDoesNotMatch": "the secret key is wrong, or a proxy changed the request",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the store does not accept the session token",
    "RequestTimeTooSkewed": "this machine's clock is off by more than 15 minutes",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed"}
_REGION_HEADER = "x-amz-bucket-region"


def parse_error_body(body: bytes) -> tuple[str, str]:
    """Return (code, message) of an S3 error document, ("", "") if it is none. Never raises and runs no XML parser.

    The body is not trusted, so only two short elements are searched and everything else is ignored.
    """
    text = body[:MAX_ERROR_BODY_BYTES].decode("utf-8", "replace")
    code = re.search(r"<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>", text)
    message = re.search(r"<Message>([^<]{1,300})</Message>", text)
    return (code[1] if code else "", html.unescape(message[1]).strip() if message else "")


def store_error(
    status: int,
    code: str,
    message: str,
    headers: Mapping[str, str],
    *,
    uri: str,
    key: str | None = None,
    range: str | None = None,
) -> StoreError:
    """Return the error for a refused request. `headers` has lower-case names; only the region is quoted from it."""
    where: dict[str, Any] = {"uri": uri, "key": key, "range": range, "status": status, "code": code or None}
    text = one_line(message)
    region = headers.get(_REGION_HEADER)
    if status in (301, 302, 307, 308) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return StoreError(
            "the store redirects this bucket's requests to another place",
            hint=f"the bucket is in region {one_line(region)}: set region or AWS_REGION to it"
            if region
            else "check the endpoint URL, the region and the addressing style",
            **where,
        )
    if status == 407:
        return proxy_refusal(status, uri=uri, key=key, range=range)
    passing = passing_refusal(status, code)
    if passing is not None and passing in PASSING:
        return passing(PASSING[passing], **where)
    if status == 412 or code == "PreconditionFailed":
        return ObjectChanged("object is not the pinned version", **where)
    if code in _MISSING or status == 404:
        return ObjectNotFound(_MISSING.get(code, "no such object or bucket"), **where)
    if status == 416 or code == "InvalidRange":
        return RangeMismatch("range reaches past the object's end", **where)
    if status in (401, 403) or code in _DENIALS:
        expired = code in _EXPIRED
        if code == "RequestTimeTooSkewed":
            where["server_time"] = re.sub(r"[^\x20-\x7e]+", " ", headers.get("date", ""))[:40]
        return (CredentialsExpired if expired else AccessDenied)(
            "the store refused access" + (f": {text}" if text else ""),
            hint=_DENIALS.get(
                code,
                "check that the credentials may list and read this bucket; if they may not list, S3 answers like this"
                " for missing objects, too",
            ),
            **where,
        )
    if passing is not None:
        return passing("the store could not answer now" + (f": {text}" if text else ""), **where)
    return StoreError("the store refused the request" + (f": {text}" if text else ""), **where)


def connection_error(
    error: Exception, *, uri: str, endpoint: str, timeout_s: float | None = None, proxy: Proxy | None = None
) -> StoreError:
    """Return the error for a request that got no whole answer. Raise it from `error`."""
    kind = type(error).__name__
    where: dict[str, Any] = {"uri": uri, "endpoint": endpoint, "proxy": proxy and str(proxy)}
    peer = "store" if proxy is None else "proxy"
    if isinstance(error, ssl.SSLCertVerificationError):
        return StoreError(
            f"the store's certificate is not trusted: {one_line(error.verify_message)}",
            hint="set AWS_CA_BUNDLE or ca_bundle to your CA's PEM file",
            **where,
        )
    if isinstance(error, TimeoutError):
        return StoreUnavailable("the store did not answer in time", timeout_s=timeout_s, cause=kind, **where)
    if isinstance(error, ConnectionRefusedError):
        return StoreUnavailable(
            f"the {peer} refused the connection",
            hint=f"check the {'endpoint' if proxy is None else 'proxy'} URL, and that the server is running",
            cause=kind,
            **where,
        )
    if kind == "gaierror":
        return StoreUnavailable(
            f"the {peer}'s host name is not known",
            hint=f"check the {'endpoint' if proxy is None else 'proxy'} URL",
            cause=kind,
            **where,
        )
    return StoreUnavailable(f"the connection to the {peer} failed", cause=kind, **where)


def one_line(text: str | None) -> str:
    """Return a text from outside as one short line of printable ASCII, for a message."""
    return re.sub(r"[^\x20-\x7e]+", " ", text or "")[:200].strip()


_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", re.ASCII)
# Old SDKs stored "aws-chunked" by mistake; the body is as it was uploaded.
_PLAIN_ENCODINGS = {"", "identity", "aws-chunked"}
_MUST_BE_ONE = {"content-length", "content-range", "etag", "content-encoding"}


def head_of(headers: Iterable[tuple[str, str]], **where: Any) -> dict[str, str]:
    """Return the headers by lower-case name. Raises RangeMismatch if one that decides has two values."""
    head: dict[str, str] = {}
    for name, value in headers:
        if head.setdefault(name.lower(), value) != value and name.lower() in _MUST_BE_ONE:
            raise RangeMismatch(f"the answer has two {name} headers", **where)
    return head


def normal_etag(value: str | None) -> str | None:
    """Return the value of an ETag header without W/ and quotes; None if there is none."""
    value = (value or "").strip()
    return value.removeprefix("W/").strip('"') or None


def check_answer(
    status: int, headers: Mapping[str, str], byte_range: ByteRange, etag: str | None, **where: Any
) -> str | None:
    """Return the answer's ETag. Raise unless the head promises exactly `byte_range` of version `etag`.

    Pure. `headers` has lower-case names. The status decides little: some servers answer a range request with 200 and a
    Content-Range, and some ignore If-Match (rclone does both).
    """
    found = normal_etag(headers.get("etag"))
    if etag is not None and found != etag:
        raise ObjectChanged("object is not the pinned version", expected=etag, found=found and one_line(found), **where)
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in _PLAIN_ENCODINGS:
        raise RangeMismatch(
            "the answer is encoded, so its bytes are not those of the object",
            hint="make sure that no proxy compresses answers",
            encoding=one_line(encoding)[:40],
            **where,
        )
    length = headers.get("content-length", "").strip()
    if not re.fullmatch(r"[0-9]{1,19}", length) or "chunked" in headers.get("transfer-encoding", "").lower():
        raise RangeMismatch("the answer does not say its length", **where)
    content_range = headers.get("content-range")
    if content_range is not None:
        match = _CONTENT_RANGE.fullmatch(content_range.strip())
        if match is None:
            raise RangeMismatch("the answer's Content-Range cannot be read", **where)
        start, end = int(match[1]), int(match[2]) + 1
        total = None if match[3] == "*" else int(match[3])
        if total is not None and byte_range.end > total:
            raise RangeMismatch("range reaches past the object's end", size_bytes=total, **where)
        if (start, end) != (byte_range.start, byte_range.end):
            raise RangeMismatch("the answer is for another range", found=f"[{start}, {end})", **where)
    elif status != 200 or byte_range.start != 0:
        raise RangeMismatch("the store did not answer with the range", **where)
    if int(length) != byte_range.size_bytes:
        # Without a Content-Range this is the whole object, which is right only if the range covers all of it.
        raise RangeMismatch("the answer has another length than the range", found_bytes=int(length), **where)
    return found


def refusal(status: int, headers: Mapping[str, str], body: bytes, etag: str | None, **where: Any) -> StoreError:
    """Return the error for a refused read of version `etag`. `body` is what could be read of the answer."""
    code, message = parse_error_body(body)
    error = store_error(status, code, message, headers, **where)
    found = normal_etag(headers.get("etag"))
    if isinstance(error, RangeMismatch) and etag is not None and found not in (None, etag):
        return ObjectChanged(
            "object is not the pinned version", expected=etag, found=found and one_line(found), **where
        )
    return error


_CHECKSUM_FIELDS = {
    "ChecksumCRC64NVME": "crc64nvme",
    "ChecksumCRC32C": "crc32c",
    "ChecksumCRC32": "crc32",
    "ChecksumSHA256": "sha256",
}
_MD5_HEX = re.compile(r"[0-9a-f]{32}")
_ETAG = re.compile(r"[\x20-\x7e]{1,256}")  # safe to send in a header
_CREDENTIALS_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role, or ask for anonymous access"


@contextmanager
def asking(*, uri: str, key: str | None = None) -> Iterator[None]:
    """Translate every error of the block, which calls botocore and reads its answer, into a StoreError."""
    try:
        yield
    except LongshoreError:
        raise
    except (ClientError, BotoCoreError) as error:
        raise from_botocore_error(error, uri=uri, key=key) from error
    except Exception as error:  # for example, the library raises RuntimeError or OverflowError for a bad date
        # The answer is not XML, not of S3, lacks an element, or has a bad number or date.
        raise StoreError("the store's answer cannot be read", uri=uri, key=key, cause=type(error).__name__) from error


def object_info(
    key: str,
    size_bytes: int,
    etag: str | None,
    checksums: dict[str, str] | None = None,
    composites: dict[str, str] | None = None,
) -> ObjectInfo:
    """Return the facts about an object from an answer. Raises ValueError for a size or an ETag that is impossible."""
    tag = normal_etag(etag)
    if not 0 <= size_bytes < 1 << 63 or (tag is not None and not _ETAG.fullmatch(tag)):
        raise ValueError("the answer has an impossible size or ETag")
    return ObjectInfo(key, size_bytes, tag, checksums or {}, composites or {})


def checksums_of_head(head: Mapping[str, Any]) -> dict[str, str]:
    """Return the whole-object checksums of a HEAD as {hash name: hex}.

    The ETag of a single-part object is its MD5 on S3 and most servers, but not with SSE-KMS or SSE-C. No server
    promises it, so it has a name of its own, `etag_md5`. If it agrees, the bytes are right. If it does not, that alone
    proves nothing.
    """
    found: dict[str, str] = {}
    etag = str(head.get("ETag", "")).strip('"')
    # Servers that do not report the type give a composite checksum for an object that was uploaded in parts.
    if head.get("ChecksumType", "COMPOSITE" if "-" in etag else "FULL_OBJECT") == "FULL_OBJECT":
        found = {name: digest for name, digest, parts in _checksums(head) if not parts}
    keyed = str(head.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in head
    if _MD5_HEX.fullmatch(etag) and not keyed:
        found["etag_md5"] = etag
    return found


def composites_of_head(head: Mapping[str, Any]) -> dict[str, str]:
    """Return the composite checksums of a HEAD ("abc==-3") as {hash name: hex}: hashes over the parts' digests."""
    return {name: digest for name, digest, parts in _checksums(head) if parts}


def _checksums(head: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield (hash name, hex, whether it is composite) of the checksums that can be decoded."""
    for field, name in _CHECKSUM_FIELDS.items():
        text, _, parts = str(head.get(field, "")).partition("-")
        try:
            digest = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(digest) == DIGEST_SIZES[name]:
            yield name, digest.hex(), bool(parts)


def md5_header(data: bytes | bytearray | memoryview) -> str:
    """Return the value of Content-MD5, which every S3 server checks. Few check the newer checksums."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def code_of(parsed: Mapping[str, Any]) -> str:
    """Return the S3 error code of a parsed refusal; "" if it has none, where botocore puts the status."""
    code = str(parsed.get("Error", {}).get("Code", ""))
    return "" if code.isdigit() else code


def from_botocore_error(error: Exception, *, uri: str, key: str | None = None) -> StoreError:
    """Return the StoreError for an error of botocore. Its text is not quoted, because it may contain parameters."""
    where: dict[str, Any] = {"uri": uri, "key": key}
    if tried := _endpoint_of(error):
        where["endpoint"] = tried
    if isinstance(error, ClientError):
        answer = error.response
        meta = answer.get("ResponseMetadata", {})
        details = answer.get("Error", {})
        return store_error(
            int(meta.get("HTTPStatusCode", 0)),
            code_of(answer),
            str(details.get("Message", "")),
            meta.get("HTTPHeaders", {}),
            uri=uri,
            key=key,
        )
    if isinstance(error, boto.CredentialRetrievalError):
        return CredentialsExpired("the credentials could not be renewed", hint=_CREDENTIALS_HINT, **where)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return AccessDenied("no credentials for this store", hint=_CREDENTIALS_HINT, **where)
    if isinstance(error, boto.ProfileNotFound):
        return AccessDenied("the named AWS profile is not configured here", hint=_CREDENTIALS_HINT, **where)
    if isinstance(error, boto.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return StoreError(
                "the store's certificate is not trusted",
                hint="set AWS_CA_BUNDLE or ca_bundle to your CA's PEM file",
                **where,
            )
        return StoreUnavailable(
            "the connection to the store failed", hint="check that the server supports https", cause="SSLError", **where
        )
    if isinstance(error, boto.ProxyConnectionError):
        # http.client reports the proxy's answer to CONNECT in no other way.
        answered = re.search(r"Tunnel connection failed: (\d{3})", str(error.kwargs.get("error")))
        if answered:
            return proxy_refusal(int(answered[1]), **where)
        return StoreUnavailable("the proxy cannot be reached", hint="check HTTPS_PROXY and HTTP_PROXY", **where)
    if isinstance(error, boto.ConnectTimeoutError | boto.ReadTimeoutError):
        return StoreUnavailable("the store did not answer in time", **where)
    if isinstance(error, boto.EndpointConnectionError):
        return StoreUnavailable(
            "the store cannot be reached",
            hint="check the endpoint URL, and that the server is running",
            **where,
        )
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return StoreUnavailable("the connection to the store failed", cause=type(error).__name__, **where)
    return StoreError("the request could not be made", cause=type(error).__name__, **where)


def _endpoint_of(error: Exception) -> str | None:
    """Return scheme, host and port of a request that got no answer; None if the error does not contain them."""
    url = getattr(error, "kwargs", {}).get("endpoint_url")
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or not parts.hostname:
            return None
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return None
