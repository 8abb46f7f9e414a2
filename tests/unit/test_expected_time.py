"""Expected load times, computed from bytes and rates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.planning.plan_summary import STAGES, Rates, expect, measured_rates, parse_rate

rates = st.builds(Rates, *(st.none() | st.floats(1e3, 1e12) for _ in STAGES), start_s=st.floats(0, 100))
sizes = st.integers(0, 1 << 45)


@given(sizes, sizes, sizes, sizes, rates)
def test_the_slowest_stage_is_the_time(store: int, node: int, disk: int, rank: int, given_rates: Rates) -> None:
    found = expect(store, node, rank, given_rates, disk)
    if found is None:
        assert not given_rates.known
        return
    by_hand = {
        stage: size / rate
        for stage, size in zip(STAGES, (store, node, disk, rank), strict=True)
        if (rate := getattr(given_rates, stage)) is not None
    }
    assert found.stages_s == by_hand
    assert found.total_s == max(by_hand.values()) + given_rates.start_s
    assert by_hand[found.limit] == max(by_hand.values())
    idle = {stage for stage, size in zip(STAGES, (store, node, disk, rank), strict=True) if not size}
    assert {*found.unknown, *by_hand} | idle == set(STAGES)
    assert not {*found.unknown} & {*by_hand, *idle}  # a stage without work needs no rate
    assert found.limit in found.sentence


def test_the_sentence_names_the_limit_and_missing_rates() -> None:
    found = expect(
        140 * 10**9, 70 * 10**9, 17 * 10**9, Rates(store=parse_rate("40Gbit/s"), place=parse_rate("20 GB/s"))
    )
    assert found is not None
    assert found.sentence == "28 s, limit: store (store 28 s, place 0.85 s; rates given; no rate of network is known)"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("5GB/s", 5e9), ("40Gbit/s", 5e9), ("5 GB / s", 5e9), (5e9, 5e9), ("1MiB/s", 2**20), ("5GB", 5e9)],
)
def test_rates_are_read_with_their_unit(given: Any, meant: float) -> None:
    assert parse_rate(given) == pytest.approx(meant)


@pytest.mark.parametrize("given", ["", "fast", "0GB/s", 0, -1.0, float("nan"), float("inf"), True, None, "GB/s"])
def test_malformed_rates_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="not a rate"):
        parse_rate(given)


REPORT: dict[str, Any] = {
    "load_s": 2.0,
    "plan_s": 0.5,
    "start_s": 1.5,
    "ranks": [{}, {}],
    "placed_bytes": 4_000,
    "bytes_by_source": {"store_via_arena": 1_500, "store_direct": 500, "arena": 7, "disk": 0, "unknown": 0},
    "limit": {"shares": {"store": 0.5, "verify": 0.1, "place": 0.1, "memory": 0.0, "device": 0.0}},
}


def test_a_report_gives_the_rates_of_its_stages() -> None:
    found = measured_rates(REPORT)
    assert (found.store, found.network, found.start_s, found.source) == (2_000, None, 2.0, "measured")
    assert found.place == pytest.approx(5_000)  # 2,000 per rank and 2 s, busy for a fifth of it
    again = expect(2_000, 2_000, 2_000, found)
    assert again is not None
    assert again.stages_s["store"] == pytest.approx(1.0)  # half of the measured time: it was busy for half of it
    mixed = Rates(store=1e6).over(found)
    assert (mixed.store, mixed.place, mixed.source) == (1e6, found.place, "given and measured")


def test_a_report_gives_the_rate_of_the_disk() -> None:
    sources = {**REPORT["bytes_by_source"], "disk": 6_000}
    shares = {"store": 0.5, "disk": 0.25, "place": 0.5}
    found = measured_rates({**REPORT, "bytes_by_source": sources, "nodes": [{}, {}], "limit": {"shares": shares}})
    assert found.disk == pytest.approx(6_000)  # 3,000 per node in 2 s, busy for a quarter of it
    from_disk = expect(0, 0, 100, found, disk_bytes=3_000)
    assert from_disk is not None
    assert (from_disk.limit, from_disk.stages_s["disk"], from_disk.unknown) == ("disk", pytest.approx(0.5), ())
    assert measured_rates(REPORT).disk is None


def test_an_idle_stage_gives_no_rate() -> None:
    idle = {**REPORT, "limit": {"shares": {"store": 0.01, "place": 0.9}}}
    assert measured_rates(idle).store is None


@pytest.mark.parametrize(
    "broken",
    [{}, {**REPORT, "load_s": 0.0}, {**REPORT, "resident": True}, {**REPORT, "limit": None}, {**REPORT, "ranks": 3}],
)
def test_malformed_reports_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="report"):
        measured_rates(broken)
