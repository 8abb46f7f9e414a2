"""Where a bucket's requests go, and their signatures: botocore decides the first once, signs each of the second."""

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
    """How to reach the keys of one bucket."""

    tls: bool
    host: str
    port: int
    host_header: str  # with the port where it is not the scheme's
    base_path: str  # "/bucket/" in path style, "/" in virtual style, percent-encoded
    signing_region: str | None  # None: requests are not signed
    signing_name: str
    default_ca_bundle: str | None  # the CAs that botocore trusts

    def path_of(self, key: str) -> str:
        """The percent-encoded path of one key, as botocore encodes it."""
        return self.base_path + quote(key, safe="/~")


def find_route(client: S3Client, bucket: str) -> Route:
    """Ask botocore where it would send a request, without sending it.

    Its rules for regions, dual stack, access points and addressing styles are long and change, so one HEAD is
    prepared by the client itself and taken from it at the documented "before-send" event. Raises botocore's
    errors (no credentials...), UnsupportedStore for what SigV4 with plain keys cannot read.
    """
    prepared: list[Any] = []

    def take(request: Any, **_: Any) -> AWSResponse | None:
        if not urlsplit(request.url).path.endswith(f"/{_PROBE_KEY}"):
            return None  # another thread's HEAD
        prepared.append(request)
        return AWSResponse(request.url, 200, HTTPHeaders(), _NoBody())

    event = "before-send.s3.HeadObject"
    events: Any = client.meta.events  # the stubs know no handler that answers
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
            "this bucket needs a kind of signature that Longshore does not make",
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
    """(path, headers) of a GET for `key`, signed with the credentials as they are now (they may be refreshed).

    `clock_offset_s`: how far the store's clock, which the signature is for, is ahead of ours.
    The signature is in the headers, not in the URL: not every server takes presigned URLs.
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
    """Requests of this client are signed by the store's clock: botocore knows only this machine's.

    What is `clock_offset_s()` ahead of ours is signed again, after botocore has.
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
