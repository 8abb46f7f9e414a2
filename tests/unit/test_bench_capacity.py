"""Cores, requests and memory of a node follow from loads of two sizes, and from the assumptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.capacity import cores_table, main, node_table, path_costs

GB = 1_000_000_000
WARM, PART = {"bytes": GB, "cpu_s": 1.1}, {"bytes": GB // 4, "cpu_s": 0.35}
RESULTS: dict[str, Any] = {
    "entries": [
        {"id": "longshore_arena@tp4/http", "cases": {"warm": WARM, "part": PART, "warm_unverified": WARM}},
        {"id": "runai@tp4/http", "cases": {"warm": WARM}},
    ]
}


def test_capacity_follows_from_two_sizes() -> None:
    (cost,) = path_costs(RESULTS)
    assert cost.cpu_s_per_gb == pytest.approx(1.0)  # (1.1 - 0.35) / 0.75
    assert cost.fixed_cpu_s == pytest.approx(0.1)
    assert "| through the arena, BLAKE3 | 0.10 | 1.00 | 5.0 | 50.0 |" in cores_table([cost], [5.0, 50.0])


def test_a_faster_store_needs_fewer_requests() -> None:
    assert "| 5 GB/s | 42.5 Gbit/s | 50 | 0.39 GiB |" in node_table([5.0], 0.1)
    assert "| 5 GB/s | 42.5 Gbit/s | 10 | 0.08 GiB |" in node_table([5.0], 0.5)


def test_the_command_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    assert main(["--results", str(tmp_path / "results.json"), "--rates", "2.5", "--json", str(tmp_path / "costs")]) == 0
    printed = capsys.readouterr().out
    assert "cores at 2.5 GB/s" in printed
    assert "| 2.5 GB/s | 21.2 Gbit/s | 25 |" in printed
    (cost,) = json.loads((tmp_path / "costs").read_text())
    assert cost["title"] == "through the arena, BLAKE3"
