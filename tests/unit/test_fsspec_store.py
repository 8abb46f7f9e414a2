"""Versions, checksums and errors of file systems, each in its own form."""

from __future__ import annotations

import base64
import datetime

import pytest

from storage.checksum import digest_of
from storage.errors import (
    AccessDenied,
    ObjectChanged,
    ObjectNotFound,
    ProxyRefused,
    RangeMismatch,
    ShortRead,
    StoreError,
    StoreUnavailable,
    Throttled,
)
from storage.store_ref import parse_uri
from storage.stores.fsspec_store import FsspecStore, checksums_of, translated, version_of
from storage.stores.object_store import ByteRange, read_bytes

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"size": 1, "ETag": 'W/"abc"'}, "abc"),
        ({"size": 1, "etag": "abc", "updated": "later"}, "abc"),
        ({"size": 1, "generation": 17}, "17"),
        ({"size": 1, "blob_id": "f00"}, "f00"),
        ({"size": 7, "Last-Modified": "Mon"}, "7-Mon"),
        ({"size": 7, "created": NOW}, "7-2026-01-02T00:00:00+00:00"),
        ({"size": 7, "etag": "", "mtime": 1.5}, "7-1.5"),
        ({"size": 7}, None),
    ],
)
def test_versions_are_read_from_each_file_system(facts: dict[str, object], expected: str | None) -> None:
    assert version_of(facts) == expected


def test_checksums_are_read_from_each_file_system() -> None:
    facts = {
        "md5Hash": base64.b64encode(digest_of("md5", b"x")).decode(),
        "crc32c": base64.b64encode(digest_of("crc32c", b"x")).decode(),
        "lfs": {"sha256": digest_of("sha256", b"x").hex()},
    }
    assert checksums_of(facts) == {name: digest_of(name, b"x").hex() for name in ("md5", "crc32c", "sha256")}
    assert checksums_of({"md5Hash": "?", "lfs": {"sha256": "short"}, "crc32c": 5}) == {}


class _Answered(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("https://host/?sig=SECRET")
        self.status = status


def of_httpx(name: str) -> Exception:
    """An error as httpx has it. That package comes with huggingface_hub, which these tests do not need."""
    error: Exception = type(name, (Exception,), {"__module__": "httpx"})("https://host/?sig=SECRET")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of_httpx("ConnectError"), StoreUnavailable),
        (of_httpx("ReadTimeout"), StoreUnavailable),
        (of_httpx("HTTPStatusError"), StoreError),
        (FileNotFoundError("x"), ObjectNotFound),
        (_Answered(404), ObjectNotFound),
        (_Answered(401), AccessDenied),
        (PermissionError("x"), AccessDenied),
        (_Answered(407), ProxyRefused),
        (_Answered(408), StoreUnavailable),
        (_Answered(425), StoreUnavailable),
        (_Answered(429), Throttled),
        (_Answered(503), Throttled),
        (_Answered(416), RangeMismatch),
        (_Answered(502), StoreUnavailable),
        (TimeoutError("x"), StoreUnavailable),
        (ConnectionResetError("x"), StoreUnavailable),
        (NotImplementedError("x"), StoreError),
        (RuntimeError("sig=SECRET"), StoreError),
    ],
)
def test_errors_are_translated(error: Exception, kind: type[StoreError]) -> None:
    found = translated(error, "gs://bucket", "key")
    assert type(found) is kind
    assert "SECRET" not in str(found)


def test_a_connection_failure_is_not_a_missing_object() -> None:
    error = FileNotFoundError("x")
    error.__cause__ = ConnectionRefusedError()
    assert type(translated(error, "http://h", "key")) is StoreUnavailable
    error.__cause__ = _Answered(404)
    assert type(translated(error, "http://h", "key")) is ObjectNotFound


@pytest.mark.parametrize(("kept", "kind"), [(3, ShortRead), (30, RangeMismatch)])
def test_answers_of_another_length_are_refused(
    kept: int, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FsspecStore(parse_uri("memory://lengths"))
    store.put("x", bytes(100))
    monkeypatch.setattr(store._fs, "cat_file", lambda *_, **__: bytes(kept))
    with pytest.raises(kind):
        read_bytes(store, "x", ByteRange(0, 10))


def test_a_version_is_looked_up_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(parse_uri("memory://rechecks"), recheck_s=1000)
    etag = store.put("x", bytes(100)).etag
    asked: list[str] = []
    info = store._fs.info
    monkeypatch.setattr(store._fs, "info", lambda path, **kw: asked.append(path) or info(path, **kw))
    for _ in range(5):
        read_bytes(store, "x", ByteRange(0, 10), etag=etag)
    assert asked == []  # put looked it up
    store._recheck_s = 0
    read_bytes(store, "x", ByteRange(0, 10), etag=etag)
    assert len(asked) == 1
    store._fs.pipe_file(store._path("x"), bytes(100))
    with pytest.raises(ObjectChanged):
        read_bytes(store, "x", ByteRange(0, 10), etag=etag)


def test_an_unknown_version_cannot_be_pinned() -> None:
    store = FsspecStore(parse_uri("memory://pins"))
    store.put("x", bytes(10))
    with pytest.raises(ObjectChanged):
        read_bytes(store, "x", ByteRange(0, 10), etag="another")
