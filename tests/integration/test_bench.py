"""The benchmark works from end to end, on a small model. What is fast is no question here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.harness.store import NoRangeServer, find_nginx
from tests.support.head_cluster import run_to_its_end

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2500)]

ROOT = Path(__file__).resolve().parents[2]
# each kind of contender once, from each source; peers that are not installed must say so
LINES = "ceiling_raw,limit_arena:verified,limit_direct:recycled,longshore_arena:*,longshore_load:via_arena_fresh"
PEERS = "runai_s3*,obstore_ranges*,safetensors_clone*"


@pytest.fixture(scope="module")
def needs_nginx() -> None:
    try:
        find_nginx()
    except NoRangeServer as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def run_of_bench(needs_nginx: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    out = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench.run", "--small", "--only", f"{LINES},{PEERS}"]
    done = run_to_its_end([*command, "--out", str(out)], 2400, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "results.json").read_text()), out, done.stdout


def test_every_line_has_stats_or_a_reason(run_of_bench: tuple[dict[str, Any], Path, str]) -> None:
    results, _, printed = run_of_bench
    lines = {line["id"]: line for line in results["lines"]}
    wanted = [
        *("ceiling_raw@http", "ceiling_raw@file", "limit_arena:verified@http", "limit_direct:recycled@file"),
        *("longshore_arena:verified@http", "longshore_arena:unverified@http", "longshore_load:via_arena_fresh@file"),
    ]
    for name in wanted:
        (run,) = lines[name]["runs"]
        assert run["bytes"] == results["model"]["bytes"] > 30e6
        assert run["wall_s"] > 0
        assert run["cpu_s"] > 0
    for name, line in lines.items():
        assert not line["failure"], name
        assert bool(line["runs"]) != bool(line["absent"]), name
        assert line["title"] in printed
    assert {"python", "nginx", "ray", "obstore"} <= results["versions"].keys()


def test_ours_read_each_byte_once_and_check_what_is_published(
    run_of_bench: tuple[dict[str, Any], Path, str],
) -> None:
    results, _, _ = run_of_bench
    ours = [line for line in results["lines"] if line["id"].startswith("longshore_") and line["runs"]]
    for line in ours:
        (run,) = line["runs"]
        # all but the headers of the shards, and never a chunk twice
        assert 0.99 < run["extra"]["store_bytes"] / run["bytes"] <= 1.02, line["id"]
        assert bool(run["extra"]["stages"]["verify_bytes"]) == line["checks"], line["id"]
    assert {line["checks"] for line in ours} == {True, False}


def test_memory_that_is_kept_is_seen(run_of_bench: tuple[dict[str, Any], Path, str]) -> None:
    results, _, _ = run_of_bench
    for line in results["lines"]:
        if line["keeps"] and line["runs"]:
            assert line["memory_over_bytes"] > 0.9, line["id"]


def test_it_writes_the_tables(run_of_bench: tuple[dict[str, Any], Path, str]) -> None:
    results, out, _ = run_of_bench
    text = (out / "benchmarks.md").read_text()
    for line in results["lines"]:
        assert f"| {line['title']} |" in text


def test_a_program_without_nginx_says_so(tmp_path: Path) -> None:
    code = "import bench.harness.store as r, bench.run as b; r._PATH = '/nowhere'; raise SystemExit(b.main())"
    command = [sys.executable, "-c", code, "--small", "--size", "8MB", "--out", str(tmp_path)]
    done = run_to_its_end(command, 2400, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "nginx is not installed" in done.stderr
    assert "Traceback" not in done.stderr
