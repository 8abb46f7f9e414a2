"""Memory as a person gives it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.fit.search import parse_memory

GB = 10**9


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("4x24GB", (24 * GB,) * 4),
        (" 2 x 80 GB , 24GiB", (80 * GB, 80 * GB, 24 << 30)),
        ("24000000000", (24 * GB,)),
        (24 * GB, (24 * GB,)),
        (["80GB", 24 * GB, "2x1GB"], (80 * GB, 24 * GB, GB, GB)),
        ("8X141gb", (141 * GB,) * 8),
    ],
)
def test_valid_memory_specs_are_parsed(given: Any, meant: tuple[int, ...]) -> None:
    assert parse_memory(given) == meant


@pytest.mark.parametrize(
    "given",
    [
        "",
        "x",
        "4x",
        "x24GB",
        "0x24GB",
        "4x0GB",
        "4y24GB",
        [],
        [None],
        True,
        0,
        -5,
        2.5,
        {},
        "99999x1GB",
        ",",
        b"4x24GB",
        bytearray(b"4x24GB"),
        "4x24",
        [24],
        24,
        "24000",
    ],
)
def test_invalid_memory_specs_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="memory"):
        parse_memory(given)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(10**6, 1 << 40)), min_size=1, max_size=8))
def test_a_memory_spec_reads_back_as_written(groups: list[tuple[int, int]]) -> None:
    meant = tuple(size for count, size in groups for _ in range(count))
    assert parse_memory(",".join(f"{count}x{size}" for count, size in groups)) == meant == parse_memory(list(meant))
