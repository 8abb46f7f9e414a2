"""The route to a bucket and the signatures of requests. botocore finds the route once and signs every request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from botocore.exceptions import NoCredentialsError

from storage.errors import UnsupportedStore
from storage.stores.s3.botocore_private import (
    AWSRequest,
    AWSResponse,
    HTTPHeaders,
    OffsetAuth,
    get_cert_path,
    on_signed,
)

if TYPE_CHECKING:
    from botocore.credentials import Credentials as BotoCredentials
    from mypy_boto3_s3.client import S3Client


_PROBE_KEY = "longshore-where-does-this-go"
_SCOPE = re.compile(r"^AWS4-HMAC-SHA256 Credential=[^/]+/\d{8}/([^/]+)/([^/]+)/aws4_request")


@dataclass(frozen=True, slots=True)
class Route:
    """The route to the keys of one bucket, and what signing needs to know."""

    tls: bool
    host: str
    port: int
    host_header: str  # with the port, unless it is the scheme's default
    base_path: str  # "/bucket/" in path style, "/" in virtual style, percent-encoded
    signing_region: str | None  # None: requests are not signed
    signing_name: str
    default_ca_bundle: str | None  # the CAs that botocore trusts

    def path_of(self, key: str) -> str:
        """Return the percent-encoded path of one key, encoded as botocore does."""
        return self.base_path + quote(key, safe="/~")


def find_route(client: S3Client, bucket: str) -> Route:
    """Return the route that botocore would use for a request, without sending one.

    botocore's rules for regions, dual stack, access points and addressing styles are long and change. So the client
    prepares one HEAD request, which is intercepted at the documented "before-send" event. Raises botocore's errors
    (such as missing credentials), and UnsupportedStore for a bucket that SigV4 with plain keys cannot read.
    """
    prepared: list[Any] = []

    def take(request: Any, **_: Any) -> AWSResponse | None:
        if not urlsplit(request.url).path.endswith(f"/{_PROBE_KEY}"):
            return None  # a HEAD of another thread
        prepared.append(request)
        return AWSResponse(request.url, 200, HTTPHeaders(), _NoBody())

    event = "before-send.s3.HeadObject"
    events: Any = client.meta.events  # the stubs do not know handlers that return a value
    events.register(event, take)
    try:
        client.head_object(Bucket=bucket, Key=_PROBE_KEY)
    finally:
        events.unregister(event, take)
    parts = urlsplit(prepared[0].url)
    tls = parts.scheme == "https"
    signature = prepared[0].headers.get("Authorization")
    if isinstance(signature, bytes):
        signature = signature.decode("latin-1")
    scope = _SCOPE.match(signature) if signature else None
    if (signature and scope is None) or (scope and scope[2] == "s3express"):
        raise UnsupportedStore(
            "this bucket requires a kind of signature that Longshore does not support",
            hint="S3 Express directory buckets, multi-region access points and SigV2 are not supported",
            bucket=bucket,
        )
    default_ca = get_cert_path(True) if tls else None
    return Route(
        tls=tls,
        host=parts.hostname or "",
        port=parts.port or (443 if tls else 80),
        host_header=parts.netloc,
        base_path=parts.path.removesuffix(_PROBE_KEY),
        signing_region=scope[1] if scope else None,
        signing_name=scope[2] if scope else "s3",
        default_ca_bundle=default_ca if isinstance(default_ca, str) else None,
    )


def sign_get(
    route: Route,
    credentials: BotoCredentials | None,
    key: str,
    headers: dict[str, str],
    clock_offset_s: float = 0.0,
) -> tuple[str, dict[str, str]]:
    """Return (path, headers) of a GET for `key`, signed with the current credentials (they may be refreshed).

    `clock_offset_s` is how far the store's clock is ahead of ours; the signature has the store's time. The signature
    is in the headers and not in the URL, because some servers do not accept presigned URLs.
    """
    path = route.path_of(key)
    headers = {"Host": route.host_header, "User-Agent": "longshore", "Accept-Encoding": "identity", **headers}
    if route.signing_region is None:
        return path, headers
    if credentials is None:
        raise NoCredentialsError()
    request = AWSRequest("GET", f"{'https' if route.tls else 'http'}://{route.host_header}{path}", headers=headers)
    frozen = credentials.get_frozen_credentials()
    OffsetAuth(frozen, route.signing_name, route.signing_region, clock_offset_s).add_auth(request)
    return path, dict(request.headers.items())


def sign_by_clock(client: S3Client, credentials: BotoCredentials | None, clock_offset_s: Callable[[], float]) -> None:
    """Sign the client's requests by the store's clock, because botocore knows only this machine's.

    If `clock_offset_s()` is not zero, a request is signed again after botocore has signed it.
    """
    if credentials is None:
        return

    def sign_again(request: AWSRequest, **_: Any) -> None:
        signing = request.context.get("signing", {})
        if (offset_s := clock_offset_s()) and "Authorization" in request.headers:
            region = signing.get("region") or client.meta.region_name
            frozen = credentials.get_frozen_credentials()
            OffsetAuth(frozen, signing.get("signing_name", "s3"), region, offset_s).add_auth(request)

    on_signed(client, sign_again)


class _NoBody:
    def read(self, *_: object, **__: object) -> bytes:
        return b""

    def stream(self, *_: object, **__: object) -> list[bytes]:
        return []
