"""A URI names the same place on every node, and output never shows its secrets."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import LongshoreError, StoreError, UnsupportedStore
from storage.store_ref import Credentials, StoreRef, parse_uri
from storage.stores.local import LocalStore
from storage.stores.open_store import open_store


@pytest.mark.parametrize(
    ("uri", "scheme", "bucket", "prefix"),
    [
        ("s3://models/llama/8b", "s3", "models", "llama/8b"),
        ("s3://models", "s3", "models", ""),
        ("s3a://models/x/", "s3", "models", "x"),
        ("S3://models/X", "s3", "models", "X"),
        ("file:///srv/models", "file", "", "/srv/models"),
        ("file:///srv/with%20space", "file", "", "/srv/with space"),
        ("file://localhost/srv", "file", "", "/srv"),
        ("/srv/models/", "file", "", "/srv/models"),
        ("gs://b/p/q", "gs", "b", "p/q"),
        ("gcs://b/p", "gs", "b", "p"),
        ("az://container@account/p", "az", "container@account", "p"),
        ("hf://org/model@main", "hf", "org", "model@main"),
        ("http://host:8080/a/b/", "http", "host:8080", "a/b"),
        ("memory://a/b", "memory", "", "a/b"),
    ],
)
def test_uris_name_a_store_and_a_key(uri: str, scheme: str, bucket: str, prefix: str) -> None:
    ref = parse_uri(uri, environ={})
    assert (ref.scheme, ref.bucket, ref.prefix) == (scheme, bucket, prefix)
    assert parse_uri(ref.uri.replace(" ", "%20"), environ={}) == ref
    assert pickle.loads(pickle.dumps(ref)) == ref


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "s3://",
        "s3:///prefix",
        "s3://KEY:SECRET@bucket/x",
        "s3://b",
        "s3://bad bucket/x",
        "s3://bucket/../other",
        "s3://bucket/a/..%2f..",
        "s3://bucket/%2e%2e/x",
        "s3://bucket/x?X-Amz-Signature=abc",
        "az://container/models?sig=abc",
        "az://container:hunter2@account/models",
        "gs://bucket/x#abc",
        "hf://org/model?token=1",
        "memory://a?token=1",
        "file:///srv/x?token=1",
        "file:///srv/x#abc",
        "foo://a/b?token=1",
        "simplecache::az://c/x?sig=abc",
        "KEY:SECRET@host?sig=abc://x",
        "s3:/bucket/x?sig=abc",
        "host.example/x?sig=abc",
        "s3://KEY:SE/CRET@bucket/x",
        "s3://KEY:SECRET@b/x?sig=abc",
        "http://h?",
        "gs://",
        "file://otherhost/x",
        "file:///a/../b",
        "/a/../b",
        "https://user:hunter2@host/x",
        "https://host/x?token=1",
        "memory://a/../b",
        "simplecache::s3://bucket/x",
        "a\0b",
    ],
)
def test_refused(uri: str) -> None:
    with pytest.raises(StoreError) as caught:
        parse_uri(uri, environ={})
    for secret in ("SECRET", "SE/CRET", "hunter2", "abc", "token=1"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x", "host:80", "http://u:p@host", "http://", "http://h:99999", "http://h?x"])
def test_bad_endpoints(url: str) -> None:
    with pytest.raises(StoreError, match="endpoint"):
        parse_uri("s3://bucket", endpoint_url=url, environ={})


def test_the_environment_fills_missing_options() -> None:
    environ = {
        "AWS_ENDPOINT_URL": "http://one:1",
        "AWS_ENDPOINT_URL_S3": "http://two:2/",
        "AWS_DEFAULT_REGION": "eu-1",
        "AWS_REGION": "eu-2",
    }
    ref = parse_uri("s3://bucket", environ=environ)
    assert (ref.endpoint_url, ref.region) == ("http://two:2", "eu-2")
    ref = parse_uri("s3://bucket", endpoint_url="http://given", region="us-1", environ=environ)
    assert (ref.endpoint_url, ref.region) == ("http://given", "us-1")
    ignoring = environ | {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    assert parse_uri("s3://bucket", environ=ignoring).endpoint_url is None
    assert parse_uri("gs://bucket", environ=environ).endpoint_url is None


def test_identity_is_of_the_place_and_not_of_the_reader() -> None:
    ref = parse_uri("s3://bucket/x", environ={})
    assert ref.identity() == parse_uri("s3://bucket/x", anonymous=True, ca_bundle="/ca", environ={}).identity()
    there = parse_uri("s3://bucket/x", endpoint_url="http://h", environ={})
    assert there.identity() == replace(there, profile="me").identity()
    others = [
        parse_uri("s3://bucket/y", environ={}),
        parse_uri("s3://bucket2/x", environ={}),
        parse_uri("s3://bucket/x", endpoint_url="http://h", environ={}),
        parse_uri("s3://bucket/x", region="r", environ={}),
        parse_uri("s3://bucket/x", profile="me", environ={}),  # it may name an endpoint
        parse_uri("gs://bucket/x", environ={}),
        parse_uri("s3://bucket/x/", environ={}).child("sub"),
    ]
    assert len({ref.identity(), *(other.identity() for other in others)}) == len(others) + 1


def test_child() -> None:
    assert parse_uri("s3://bucket/x", environ={}).child("a/b/").uri == "s3://bucket/x/a/b"
    assert parse_uri("/srv", environ={}).child("m").uri == "file:///srv/m"
    for path in ("../up", "/abs", "a/../../b"):
        with pytest.raises(StoreError):
            parse_uri("s3://bucket/x", environ={}).child(path)


@given(key=st.text(min_size=8), secret=st.text(min_size=8), token=st.text(min_size=8))
def test_credentials_never_show(key: str, secret: str, token: str) -> None:
    credentials = Credentials(key, secret, token, {"account_key": secret})
    plain = repr(Credentials("a", "b", "c", {"x": 1}))
    assert repr(credentials) == str(credentials) == f"{credentials}" == plain
    assert pickle.loads(pickle.dumps(credentials)) == credentials


@given(st.text())
def test_no_text_crashes_the_parser(text: str) -> None:
    try:
        ref = parse_uri(text, environ={})
    except LongshoreError:
        return
    assert ".." not in ref.prefix.split("/")
    assert isinstance(ref, StoreRef)


def test_open_store_by_scheme(tmp_path: object) -> None:
    assert isinstance(open_store(parse_uri(str(tmp_path))), LocalStore)
    with pytest.raises(UnsupportedStore, match="no store for the scheme 'nonsense'"):
        open_store(parse_uri("nonsense://bucket/x"))


@pytest.mark.parametrize(
    ("uri", "package"), [("gs://bucket/x", "gcsfs"), ("az://bucket/x", "adlfs"), ("hf://org/model", "huggingface_hub")]
)
def test_missing_package_is_named(uri: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)  # as if it were not installed
    scheme = uri.partition(":")[0]
    with pytest.raises(UnsupportedStore, match=rf"not installed \({package}.*\. pip install '\.\[{scheme}\]'"):
        open_store(parse_uri(uri))
