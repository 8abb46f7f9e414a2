"""Sources that the operator does not list are refused before any request, however they are spelled."""

from __future__ import annotations

from contextlib import closing

import pytest

from cluster.config import Config
from storage.errors import LongshoreError, SourceRefused, UnsupportedStore
from storage.store_ref import DEFAULT_SCHEMES, Credentials, SourceRules, StoreRef, origin, parse_uri
from storage.stores.fsspec_store import FsspecStore
from storage.stores.s3.store import S3Store


def allowed(rules: SourceRules, uri: str, **options: object) -> bool:
    try:
        rules.check(parse_uri(uri, environ={}, **options))  # type: ignore[arg-type]
    except (SourceRefused, UnsupportedStore):
        return False
    return True


@pytest.mark.parametrize(
    ("uri", "fine"),
    [
        ("/data/model", True),
        ("s3://models/llama", True),
        ("S3A://models/llama", True),
        ("gcs://models/llama", True),
        ("https://host/llama", True),
        ("memory://llama", True),
        ("local://etc/x", False),
        ("LOCAL://etc/x", False),
        ("reference://a/b", False),
        ("zip://a.zip/b", False),
        ("ssh://host/etc", False),
        ("github://org/repo", False),
        ("simplecache://a/b", False),
        ("gs://bucket/a::file:///etc", False),
        ("http://host/a::local:///etc", False),
        ("memory://x::local:///etc", False),
    ],
)
def test_schemes_without_any_setting(uri: str, fine: bool) -> None:
    assert allowed(SourceRules(), uri) == fine


def test_only_listed_schemes_are_allowed() -> None:
    rules = SourceRules.parse("S3A, gcs", "any", "any")
    assert allowed(rules, "s3://models/llama")
    assert allowed(rules, "gs://models/llama")
    assert not allowed(rules, "/etc")
    assert not allowed(rules, "file:///etc")
    assert allowed(SourceRules.parse("any", "any", "any"), "ssh://host/etc")
    assert SourceRules.parse(DEFAULT_SCHEMES, "any", "any") == SourceRules()


@pytest.mark.parametrize(
    ("endpoint", "fine"),
    [
        ("https://store.example", True),
        ("https://STORE.example:443/", True),
        ("https://store.example.", True),
        ("http://127.0.0.1:9000", True),
        ("http://store.example", False),  # without TLS it is another server
        ("https://store.example:444", False),
        ("https://store.example.evil.net", False),
        ("http://127.0.0.1:9001", False),
        ("http://localhost:9000", False),
        ("http://169.254.169.254", False),
        (None, False),
    ],
)
def test_endpoints(endpoint: str | None, fine: bool) -> None:
    rules = SourceRules.parse("s3", "https://store.example,http://127.0.0.1:9000/", "any")
    assert allowed(rules, "s3://models/llama", endpoint_url=endpoint) == fine


def test_endpoints_of_other_schemes_and_the_default_one() -> None:
    rules = SourceRules.parse("any", "default,https://models.example", "any")
    assert allowed(rules, "s3://models/llama")
    assert allowed(rules, "gs://models/llama")
    assert not allowed(rules, "gs://models/llama", endpoint_url="http://127.0.0.1:1")
    assert allowed(rules, "https://models.example/llama")
    assert not allowed(rules, "http://models.example/llama")
    assert not allowed(rules, "https://models.example:8443/llama")
    assert allowed(rules, "/data/llama")


def test_buckets() -> None:
    rules = SourceRules.parse("any", "any", "models,more-models")
    assert allowed(rules, "s3://models/llama")
    assert not allowed(rules, "s3://models2/llama")
    assert not allowed(rules, "gs://secrets/llama")
    assert allowed(rules, "/data/llama")


def test_options_that_redirect_are_refused_only_with_a_list() -> None:
    ref = parse_uri("gs://models/llama", environ={})
    plain, elsewhere = Credentials(fsspec_options={"token": "x"}), Credentials(fsspec_options={"endpoint_url": "x"})
    rules = SourceRules.parse("gs", "default", "any")
    rules.check(ref, plain)
    SourceRules().check(ref, elsewhere)
    for options in ({"endpoint_url": "http://x"}, {"client_kwargs": {}}, {"token": {"token_uri": "http://x"}}):
        with pytest.raises(SourceRefused):
            rules.check(ref, Credentials(fsspec_options=options))


@pytest.mark.parametrize("text", ["", ",", "s3,", "s3,any"])
def test_invalid_lists_are_refused(text: str) -> None:
    for lists in ((text, "any", "any"), ("any", text, "any"), ("any", "any", text)):
        with pytest.raises(ValueError, match=r"\w"):
            SourceRules.parse(*lists)


@pytest.mark.parametrize(
    "text", ["store", "ftp://store", "https://", "https://u:p@store", "https://store/path", "https://store:99999"]
)
def test_invalid_endpoints_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        SourceRules.parse("s3", text, "any")


def test_one_spelling_of_a_server() -> None:
    assert origin("HTTPS://Host./x") == "https://host:443"
    assert origin("http://[::1]:9000") == "http://[::1]:9000"


def test_a_chain_is_refused_also_where_a_ref_was_made_by_hand() -> None:
    with pytest.raises(LongshoreError, match="::"):
        FsspecStore(StoreRef("memory", "", "x::file:///etc"))


@pytest.mark.parametrize(
    "uri",
    [
        "file:///data/../etc",
        "file:///data/%2e%2e/etc",
        "file:///data/%2E./etc",
        "file://host/etc",
        "/data/../etc",
        "memory://a/../b",
        "memory://a/%2e%2e/b",
        "http://host/a/../b",
        "http://host/%2e%2e/b",
        "gs://bucket/a\\..\\b",
        "hf://owner/model/../other",
        "az://box@account/a/%2e%2e/b",
        "http://allowed@evil/m",
        "http://allowed\\@evil/m",
        "simplecache::s3://bucket/m",
        "http::file:///etc",
    ],
)
def test_uris_that_climb_or_chain_name_no_place(uri: str) -> None:
    with pytest.raises(LongshoreError):
        SourceRules.parse("any", "http://allowed", "any").check(parse_uri(uri, environ={}))


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_is_one_like_any_other(name: str) -> None:
    """The request contains the client's endpoint. `default` covers only that of the list's own environment."""
    ref = parse_uri("s3://models/llama", environ={name: "http://169.254.169.254"})
    assert ref.endpoint_url == "http://169.254.169.254"
    for listed in ("default", "https://store.example"):
        with pytest.raises(SourceRefused):
            SourceRules.parse("s3", listed, "any").check(ref)
    SourceRules.parse("s3", "http://169.254.169.254", "any").check(ref)
    ignored = parse_uri("s3://models/x", environ={name: "http://h", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"})
    assert ignored.endpoint_url is None
    with pytest.raises(SourceRefused):  # without `default`, what the node's configuration says is not asked
        SourceRules.parse("s3", "https://store.example", "any").check(ignored)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_default_covers_the_endpoint_of_its_environment(name: str) -> None:
    environ = {name: "https://Store.example/", "LONGSHORE_ALLOWED_ENDPOINTS": "https://other.example, default"}
    rules = Config.from_env(environ).source_rules()
    rules.check(parse_uri("s3://models/llama", environ=environ))
    rules.check(parse_uri("s3://models/llama", environ={}))
    with pytest.raises(SourceRefused):
        rules.check(parse_uri("s3://models/llama", environ={name: "https://third.example"}))
    for changed in ({"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, {"LONGSHORE_ALLOWED_ENDPOINTS": "https://other"}):
        with pytest.raises(SourceRefused):
            Config.from_env(environ | changed).source_rules().check(parse_uri("s3://models/llama", environ=environ))


@pytest.mark.parametrize(
    "url", ["https://me:hunter2@store.example", "https://me:hunter2@[store", "https://me:hunter\u21002@h"]
)
def test_no_message_shows_the_password_in_an_endpoint(url: str) -> None:
    environ = {"AWS_ENDPOINT_URL": url, "LONGSHORE_ALLOWED_ENDPOINTS": "default"}
    assert Config.from_env(environ).allowed_endpoints == "default"
    for scheme in ("s3", "gs"):
        with pytest.raises(LongshoreError) as refused:
            parse_uri(f"{scheme}://models/llama", endpoint_url=url, environ=environ)
        assert "hunter" not in str(refused.value)
    with pytest.raises(LongshoreError) as bad:
        Config.from_env({"LONGSHORE_ALLOWED_ENDPOINTS": url})
    assert "hunter" not in str(bad.value)


@pytest.mark.parametrize("region", ["evil.example/", "x@evil.example", "evil.example#", "a b", "x.evil.example:80"])
def test_a_region_cannot_select_another_host(region: str) -> None:
    with pytest.raises(LongshoreError), closing(S3Store(parse_uri("s3://b/m", region=region, environ={}))) as store:
        store.stat("key")


@pytest.mark.parametrize(
    "ref",
    [
        StoreRef("FILE", "", "/etc"),
        StoreRef("local", "", "/etc"),
        StoreRef("http", "allowed@evil", "m"),
        StoreRef("http", "evil\\.allowed", "m"),
        StoreRef("s3", "bucket", "m", endpoint_url="http://allowed@evil"),
        StoreRef("s3", "bucket", "m", endpoint_url="http://evil#allowed"),
        StoreRef("s3", "bucket", "m", endpoint_url="file:///etc"),
    ],
    ids=range(7),
)
def test_hand_made_requests_obey_the_same_rules(ref: StoreRef) -> None:
    with pytest.raises(SourceRefused):
        SourceRules.parse("file,s3,http", "http://allowed", "any").check(ref)
