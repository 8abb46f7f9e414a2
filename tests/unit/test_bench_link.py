"""bench.link: its table, its refusals and, as root, the removal of every link it made."""

from __future__ import annotations

import os
import subprocess

import pytest

from bench import link
from bench.contenders.table import CONTENDERS
from bench.harness.contender import Case
from bench.harness.results import Line, Run
from bench.link import NoLink, RateLimitedLink, main, make_lines, table


def line(name: str, *speeds: float) -> Line:
    runs = [Run(1_000_000_000, 1 / speed, 0.5) for speed in speeds]
    return Line("longshore_load", "Longshore", Case(name, name, checks=True), "http", ({},), runs=runs)


def test_ratio_is_to_the_unverified_load_at_the_same_rate() -> None:
    failed = line("xxh3")
    failed.failure = "exit code 1"
    rows = table({1000: [line("blake3", 0.1, 0.099, 0.2), failed, line("direct_fresh_unverified", 0.1)]}).splitlines()
    assert rows[2] == "| 1000 Mbit/s | Longshore, blake3 | 0.800 | 1.000 | - | 0.50 |"
    assert rows[3] == "| 1000 Mbit/s | Longshore, xxh3 | exit code 1 |  |  |  |"


def test_every_contender_gets_the_settings_it_reads() -> None:
    for made in make_lines():
        contender = CONTENDERS[made.contender]
        given = {**made.case.options, **made.setting}
        assert made.case in contender.cases
        assert made.setting in contender.settings
        for case in contender.cases:  # of its own lines, the options that every case has
            everywhere = {**case.options, **contender.settings[0]}.keys()
            assert everywhere - {"model"} <= given.keys(), made.id


def test_kinds_of_loads_are_shown_with_their_mode() -> None:
    titles = [made.title for made in make_lines()]
    assert len(set(titles)) == 4
    assert all("direct" in title for title in titles[1:])
    assert [made.case.checks for made in make_lines()] == [False, True, True, False]
    assert [made.case.options.get("model", "model") for made in make_lines()[1:3]] == ["model", "xxh3"]


def test_without_root_it_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([]) == 2
    assert capsys.readouterr().err == "bench-link: a network namespace and a rate limit need root\n"


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoLink, match="ip: No such file or directory"):
        RateLimitedLink().__enter__()


@pytest.mark.slow
@pytest.mark.long
def test_no_part_of_a_link_is_left() -> None:
    try:
        with RateLimitedLink() as made:
            made.limit(1000)
            assert made.namespace in _said("ip", "netns")
            assert "tbf" in _said("tc", "-n", made.namespace, "qdisc")
            raise RuntimeError("a load failed")
    except NoLink as error:
        pytest.skip(str(error))
    except RuntimeError:
        pass
    assert made.namespace not in _said("ip", "netns")
    assert made._near not in _said("ip", "link")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
