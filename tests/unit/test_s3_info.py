"""A HEAD answer gives checksums of an object; unusable ones are ignored."""

from __future__ import annotations

import base64
import hashlib

import pytest
from botocore import exceptions as boto

from storage.checksum import digest_of
from storage.errors import AccessDenied, StoreError, StoreUnavailable, Throttled
from storage.stores.s3.answers import checksums_of_head, from_botocore_error, md5_header, parse_error_body

DATA = b"some object"


def _b64(name: str) -> str:
    return base64.b64encode(digest_of(name, DATA)).decode()


def test_whole_object_checksums_become_hex() -> None:
    head = {
        "ETag": f'"{hashlib.md5(DATA).hexdigest()}"',
        "ChecksumCRC64NVME": _b64("crc64nvme"),
        "ChecksumCRC32C": _b64("crc32c"),
        "ChecksumCRC32": _b64("crc32"),
        "ChecksumSHA256": _b64("sha256"),
        "ChecksumType": "FULL_OBJECT",
    }
    expected = {name: digest_of(name, DATA).hex() for name in ("crc64nvme", "crc32c", "crc32", "sha256")}
    assert checksums_of_head(head) == expected | {"etag_md5": digest_of("md5", DATA).hex()}


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"ChecksumType": "COMPOSITE", "ChecksumSHA256": _b64("sha256")},
        {"ChecksumSHA256": _b64("sha256") + "-3"},
        {"ChecksumCRC32C": "not base64!"},
        {"ChecksumCRC32C": _b64("sha256")},  # of another length than the hash
        {"ETag": '"0123456789abcdef0123456789abcdef-4"'},
        {"ETag": '"0123456789abcdef0123456789abcdef"', "ServerSideEncryption": "aws:kms"},
        {"ETag": '"0123456789abcdef0123456789abcdef"', "ServerSideEncryption": "aws:kms:dsse"},
        {"ETag": '"0123456789abcdef0123456789abcdef"', "SSECustomerAlgorithm": "AES256"},
    ],
)
def test_unusable_checksums_are_left_out(head: dict[str, str]) -> None:
    assert checksums_of_head(head) == {}


def test_md5_header() -> None:
    assert base64.b64decode(md5_header(DATA)) == hashlib.md5(DATA).digest()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (boto.NoCredentialsError(), AccessDenied),
        (boto.ProfileNotFound(profile="x"), AccessDenied),
        (boto.ConnectTimeoutError(endpoint_url="http://x"), StoreUnavailable),
        (boto.ReadTimeoutError(endpoint_url="http://x"), StoreUnavailable),
        (boto.EndpointConnectionError(endpoint_url="http://x"), StoreUnavailable),
        (boto.ConnectionClosedError(endpoint_url="http://x"), StoreUnavailable),
        (boto.SSLError(endpoint_url="http://x", error="EOF"), StoreUnavailable),
        (boto.SSLError(endpoint_url="http://x", error="CERTIFICATE_VERIFY_FAILED"), StoreError),
        (boto.ParamValidationError(report="x"), StoreError),
        (
            boto.ClientError({"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "X"),
            Throttled,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_botocore_errors_are_translated(error: Exception, kind: type[StoreError]) -> None:
    assert type(from_botocore_error(error, uri="s3://bucket", key="k")) is kind


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@10.0.0.1:9000/models/a?X-Amz-Signature=secret", "http://10.0.0.1:9000"),
        ("https://s3.example.com/models", "https://s3.example.com"),
        ("http://[::1", None),
        ("", None),
    ],
)
def test_unreachable_endpoints_are_named_without_secrets(url: str, shown: str | None) -> None:
    error = from_botocore_error(boto.EndpointConnectionError(endpoint_url=url), uri="s3://bucket")
    assert error.details.get("endpoint") == shown
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"<Error><Code>SlowDown</Code><Message>a &lt; b</Message></Error>", ("SlowDown", "a < b")),
        (b"<html>no</html>", ("", "")),
        (b"\xff\xfe", ("", "")),
        (b"<Code>&xxe;</Code>", ("", "")),
        (b"x" * (1 << 17) + b"<Code>Late</Code>", ("", "")),
    ],
)
def test_error_bodies(body: bytes, expected: tuple[str, str]) -> None:
    assert parse_error_body(body) == expected
