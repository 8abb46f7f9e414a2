"""bench.hashes: every hash is measured in every case, and the stats are consistent."""

from __future__ import annotations

import pytest

from bench import hashes
from bench.hashes import main, measure_hashes, table
from storage.checksum import HASH_NAMES

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "COLD_CHUNKS", 2)


def test_every_hash_is_measured_in_every_case() -> None:
    costs = measure_hashes(0.002, 1)
    assert set(costs) == {
        (name, memory, count) for name in HASH_NAMES for memory in ("warm", "cold") for count in (1, 2)
    }
    assert all(gb_per_s > 0 and cpu_s_per_gb > 0 for gb_per_s, cpu_s_per_gb in costs.values())
    assert len(table(costs).splitlines()) == 2 + len(HASH_NAMES)


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seconds", "0.002", "--rounds", "1"])
    assert "| blake3 |" in capsys.readouterr().out
