"""boto3's answers and exceptions in our words: what is said of an object, checksums of a HEAD, errors. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from storage.checksum import DIGEST_SIZES
from storage.errors import AccessDenied, CredentialsExpired, LongshoreError, StoreError, StoreUnavailable
from storage.object_store import ObjectInfo
from storage.proxies import proxy_refusal
from storage.s3.answer import normal_etag
from storage.s3.errors import store_error

_CHECKSUM_FIELDS = {
    "ChecksumCRC64NVME": "crc64nvme",
    "ChecksumCRC32C": "crc32c",
    "ChecksumCRC32": "crc32",
    "ChecksumSHA256": "sha256",
}
_MD5_HEX = re.compile(r"[0-9a-f]{32}")
_ETAG = re.compile(r"[\x20-\x7e]{1,256}")  # it goes into headers of ours
_CREDENTIALS_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role, or ask for anonymous access"


@contextmanager
def asking(*, uri: str, key: str | None = None) -> Iterator[None]:
    """For a block that asks with boto3 and reads the answer: whatever is raised becomes an error of ours."""
    try:
        yield
    except LongshoreError:
        raise
    except (ClientError, BotoCoreError) as error:
        raise from_botocore_error(error, uri=uri, key=key) from error
    except Exception as error:  # by the library: a date that is none is a RuntimeError to it, or an OverflowError
        # No XML, none of S3, without what has to be there, or with a number or a date that is none.
        raise StoreError("the store's answer cannot be read", uri=uri, key=key, cause=type(error).__name__) from error


def object_info(
    key: str,
    size_bytes: int,
    etag: str | None,
    checksums: dict[str, str] | None = None,
    composites: dict[str, str] | None = None,
) -> ObjectInfo:
    """What an answer said of an object. Raises ValueError for what no object has."""
    tag = normal_etag(etag)
    if not 0 <= size_bytes < 1 << 63 or (tag is not None and not _ETAG.fullmatch(tag)):
        raise ValueError("no size, or no ETag")
    return ObjectInfo(key, size_bytes, tag, checksums or {}, composites or {})


def checksums_of_head(head: Mapping[str, Any]) -> dict[str, str]:
    """Whole-object checksums of a HEAD as {hash name: hex}.

    The ETag of a single-part object is its MD5 on S3 and most servers, but not with SSE-KMS or SSE-C, and no server
    promises it: hence the own name `etag_md5`, a candidate. When it agrees the bytes are right; when it does not,
    that alone proves nothing.
    """
    found: dict[str, str] = {}
    etag = str(head.get("ETag", "")).strip('"')
    # Servers that do not say which kind it is give the composite one of an object that was uploaded in parts.
    if head.get("ChecksumType", "COMPOSITE" if "-" in etag else "FULL_OBJECT") == "FULL_OBJECT":
        found = {name: digest for name, digest, parts in _checksums(head) if not parts}
    keyed = str(head.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in head
    if _MD5_HEX.fullmatch(etag) and not keyed:
        found["etag_md5"] = etag
    return found


def composites_of_head(head: Mapping[str, Any]) -> dict[str, str]:
    """Composite checksums of a HEAD, "abc==-3", as {hash name: hex}: hashes of the digests of the parts in a row."""
    return {name: digest for name, digest, parts in _checksums(head) if parts}


def _checksums(head: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """(hash name, hex, whether it is of parts) of what can be read."""
    for field, name in _CHECKSUM_FIELDS.items():
        text, _, parts = str(head.get(field, "")).partition("-")
        try:
            digest = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            continue
        if len(digest) == DIGEST_SIZES[name]:
            yield name, digest.hex(), bool(parts)


def md5_header(data: bytes | bytearray | memoryview) -> str:
    """The value of Content-MD5, which every S3 server checks (few check the newer checksums)."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def code_of(parsed: Mapping[str, Any]) -> str:
    """The S3 error code of a parsed refusal; "" when it has none, where botocore has the status."""
    code = str(parsed.get("Error", {}).get("Code", ""))
    return "" if code.isdigit() else code


def from_botocore_error(error: Exception, *, uri: str, key: str | None = None) -> StoreError:
    """Our error for one of botocore's. Its texts are not quoted: they may show parameters."""
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
                hint="name your CA's PEM file in AWS_CA_BUNDLE or ca_bundle",
                **where,
            )
        return StoreUnavailable(
            "the connection to the store failed", hint="does the server speak https?", cause="SSLError", **where
        )
    if isinstance(error, boto.ProxyConnectionError):
        # http.client tells the proxy's answer to CONNECT in no other way.
        answered = re.search(r"Tunnel connection failed: (\d{3})", str(error.kwargs.get("error")))
        if answered:
            return proxy_refusal(int(answered[1]), **where)
        return StoreUnavailable("the proxy cannot be reached", hint="check HTTPS_PROXY and HTTP_PROXY", **where)
    if isinstance(error, boto.ConnectTimeoutError | boto.ReadTimeoutError):
        return StoreUnavailable("the store did not answer in time", **where)
    if isinstance(error, boto.EndpointConnectionError):
        return StoreUnavailable(
            "the store cannot be reached", hint="is the endpoint URL right, and the server up?", **where
        )
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return StoreUnavailable("the connection to the store failed", cause=type(error).__name__, **where)
    return StoreError("the request could not be made", cause=type(error).__name__, **where)


def _endpoint_of(error: Exception) -> str | None:
    """Where a request that got no answer went, as scheme, host and port; None when the error does not say."""
    url = getattr(error, "kwargs", {}).get("endpoint_url")
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or not parts.hostname:
            return None
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return None
