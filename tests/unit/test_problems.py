"""Messages about hostile input stay short and printable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.problems import MAX_LISTED, MAX_QUOTED, Problems, printable_uri, quote, without_secrets


@given(st.text() | st.text(min_size=MAX_QUOTED * 3))
def test_a_quoted_name_is_printable_and_short(name: str) -> None:
    assert quote(name).isprintable()
    assert len(quote(name)) < 10 * MAX_QUOTED + 60


@given(st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=60))
def test_any_value_can_be_quoted(value: object) -> None:
    assert len(quote(value)) < 2000


def test_deep_values_do_not_exhaust_the_stack() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(quote(deep)) < 100
    while deep:  # taken apart here: the interpreter's own way is recursive
        deep = deep.pop()  # type: ignore[assignment]


@given(st.integers(0, 100))
def test_the_list_is_bounded_and_the_count_is_not(count: int) -> None:
    problems = Problems(str(number) for number in range(count))
    assert len(problems) == count
    assert list(problems) == [str(number) for number in range(min(count, MAX_LISTED))]
    assert ("more" in str(problems)) == (count > MAX_LISTED)
    assert bool(problems) == (count > 0)


def test_readable_characters_of_names_are_kept() -> None:
    assert quote("層.重み") == "'層.重み'"
    assert quote("a\nb\x00") == "'a\\nb\\x00'"
    assert quote("x" * 500).startswith("'xxx")
    assert "500 characters" in quote("x" * 500)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("az://container@account/x", "az://container@account/x"),
        ("hf://org/model@main", "hf://org/model@main"),
        ("http://[::1]:9000/a", "http://[::1]:9000/a"),
        ("file:///srv/a:b@c", "file:///srv/a:b@c"),
        ("/srv/what?/a#b", "/srv/what?/a#b"),
        ("az://container/x?sv=1&sig=SECRET", "az://container/x"),
        ("az://container:SECRET@account/x", "az://account/x"),
        ("https://me:SECRET@host/a", "https://host/a"),
        ("https://SECRET@host:1/a#SECRET", "https://host:1/a"),
        ("s3://KEY:SE/CR?ET@bucket/x", "s3://bucket/x"),
        ("s3:/bucket/x?sig=SECRET", "s3:/bucket/x"),
        ("a::az://c/x?sig=SECRET", "a::az://c/x"),
        ("host.example/x?sig=SECRET", "host.example/x"),
        ("me:SECRET@host/x", "host/x"),
    ],
)
def test_uris_are_printed_without_secrets(uri: str, shown: str) -> None:
    assert printable_uri(uri) == shown
    assert printable_uri(shown) == shown
    assert "SECRET" not in without_secrets(f"cannot read '{uri}', twice: ({uri})")
    assert printable_uri("s3://KEY:SECRET") == "s3://"


@given(st.text(max_size=40), st.sampled_from(["s3", "az", "hf", "file", "x"]), st.text(max_size=20))
def test_no_query_is_ever_printed(place: str, scheme: str, query: str) -> None:
    assert not printable_uri(f"{scheme}://{place}?QUERY{query}".replace("@", "")).count("QUERY")
