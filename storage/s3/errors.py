"""What an S3 server's refusal means, as one of our errors. Pure: status, code and headers in, error out."""

from __future__ import annotations

import html
import re
import ssl
from collections.abc import Mapping
from typing import Any

from storage.errors import (
    AccessDenied,
    CredentialsExpired,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from storage.proxies import Proxy, proxy_refusal
from storage.retrying import passing_refusal

MAX_ERROR_BODY_BYTES = 64 << 10  # of an error's body, no more than this is read

_MISSING = {"NoSuchKey": "no such object", "NoSuchBucket": "no such bucket", "NoSuchUpload": "no such upload"}
_DENIALS = {
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key is wrong, or a proxy changed the request",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid there",
    "RequestTimeTooSkewed": "this machine's clock is off by more than 15 minutes",
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestTimeTooSkewed"}
_REGION_HEADER = "x-amz-bucket-region"


def parse_error_body(body: bytes) -> tuple[str, str]:
    """(code, message) of an S3 error document, ("", "") when it is none. Never raises, runs no XML parser.

    The body comes from whoever answered, so two short elements are looked for and all else is ignored.
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
    """The error for one refused request. `headers` has lower-case names; only the region in them is quoted."""
    where: dict[str, Any] = {"uri": uri, "key": key, "range": range, "status": status, "code": code or None}
    said = one_line(message)
    region = headers.get(_REGION_HEADER)
    if status in (301, 302, 307, 308) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return StoreError(
            "the store sends this bucket's requests elsewhere",
            hint=f"the bucket is in region {one_line(region)}: set region or AWS_REGION to it"
            if region
            else "check the endpoint URL, the region and the addressing style",
            **where,
        )
    if status == 407:
        return proxy_refusal(status, uri=uri, key=key, range=range)
    passing = passing_refusal(status, code)
    if passing is Throttled:
        return Throttled("the store asks for fewer requests", **where)
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
            "the store refused access" + (f": {said}" if said else ""),
            hint=_DENIALS.get(
                code,
                "check that the credentials may list and read this bucket; S3 also says this of missing objects"
                " to those who may not list",
            ),
            **where,
        )
    if passing is not None:
        return passing("the store could not answer now" + (f": {said}" if said else ""), **where)
    return StoreError("the store refused the request" + (f": {said}" if said else ""), **where)


def connection_error(
    error: Exception, *, uri: str, endpoint: str, timeout_s: float | None = None, proxy: Proxy | None = None
) -> StoreError:
    """The error for a request that got no whole answer. Raise it from `error`."""
    kind = type(error).__name__
    where: dict[str, Any] = {"uri": uri, "endpoint": endpoint, "proxy": proxy and str(proxy)}
    peer = "store" if proxy is None else "proxy"
    if isinstance(error, ssl.SSLCertVerificationError):
        return StoreError(
            f"the store's certificate is not trusted: {one_line(error.verify_message)}",
            hint="name your CA's PEM file in AWS_CA_BUNDLE or ca_bundle",
            **where,
        )
    if isinstance(error, TimeoutError):
        return StoreUnavailable("the store did not answer in time", timeout_s=timeout_s, cause=kind, **where)
    if isinstance(error, ConnectionRefusedError):
        return StoreUnavailable(
            f"the {peer} refused the connection",
            hint=f"is the {'endpoint' if proxy is None else 'proxy'} URL right, and the server up?",
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
    """A foreign text made fit for one line of a message."""
    return re.sub(r"[^\x20-\x7e]+", " ", text or "")[:200].strip()
