"""Sizes as people read and write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.units import parse_bytes, printable, show_bytes, show_rate, show_some


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1.00 kB"),
        (1000, "1.00 kB"),
        (1_073_741_824, "1.07 GB"),
        (15_500_000, "15.5 MB"),
        (512_000, "512 kB"),
        (999_999_999, "1.00 GB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_show_bytes(count: float, text: str) -> None:
    assert show_bytes(count) == text


def test_show_rate_of_no_time() -> None:
    assert show_rate(10**9, 2) == "500 MB/s"
    assert show_rate(10**9, 0) == "-"


@given(st.integers(0, 10**17))
def test_shown_sizes_are_within_half_a_percent(count: int) -> None:
    assert abs(parse_bytes(show_bytes(count)) - count) <= 0.006 * count


@pytest.mark.parametrize(
    ("text", "count"),
    [("8MiB", 8 << 20), ("8 MB", 8_000_000), ("123", 123), ("1.5k", 1500), ("2 GiB", 2 << 30), ("7B", 7)],
)
def test_parse_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 XB", "1e9", "8MiBs", "0x10"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


@given(st.text())
def test_printable_text_has_no_escape_codes(text: str) -> None:
    assert all(char.isprintable() or char == "\n" for char in printable(text))


def test_printable_keeps_readable_names() -> None:
    assert printable("Größe 模型") == "Größe 模型"
    assert printable("\x1b[2Jred") == "\\x1b[2Jred"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 more nodes"), (50, "0, 1, 2 and 47 more nodes")],
)
def test_a_shortened_list_counts_the_rest(count: int, text: str) -> None:
    assert show_some(range(count), 3, "more nodes") == text
    assert show_some((str(number) for number in range(count)), 3) == text.removesuffix(" nodes")
