"""The cost of metrics is measured on what agents really say: counted here, not timed."""

from __future__ import annotations

import pytest

from bench.metrics_cost import main, measure


def test_series_and_heartbeats_are_bounded() -> None:
    small, wide, crowded = measure(1, 1, 2), measure(4, 1, 2), measure(1, 4, 2)
    assert small.beat_bytes == pytest.approx(wide.beat_bytes, rel=0.05)
    assert small.beat_bytes < crowded.beat_bytes < 4 * small.beat_bytes
    assert 50 < small.series < wide.series < 4 * small.series
    assert small.series < crowded.series < 4 * small.series
    assert small.answer_bytes > 40 * small.series


def test_the_table_has_a_line_for_the_case_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--nodes", "2", "--models", "3", "--rounds", "1"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("| 2 | 3 | ")
    assert last.count(" ms ") == 3
