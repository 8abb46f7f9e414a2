"""The benchmark works from end to end, on a small model. What is fast is no question here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.harness.hosts import why_not
from bench.harness.store import NoRangeServer, find_nginx
from tests.support.head_cluster import run_to_its_end

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2500)]

ROOT = Path(__file__).resolve().parents[2]
# each kind of contender once, from each source; peers that are not installed must say so
LINES = "limit_arena@tp2/http,limit_direct@fsdp2/file,longshore_arena@tp2/http,longshore_direct@fsdp2/file"
PEERS = "runai@tp2/http,obstore_rows@tp4/https,obstore_whole@tp2/http,download@tp2/http,safetensors@fsdp2/file"
ENGINES = "longshore_vllm@vllm2/http,*_transformers@transformers/http"


@pytest.fixture(scope="module")
def needs_nginx() -> None:
    try:
        find_nginx()
    except NoRangeServer as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def run_of_bench(needs_nginx: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    out = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench.run", "--small", "--only", f"{LINES},{PEERS},{ENGINES}"]
    done = run_to_its_end([*command, "--out", str(out)], 2400, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "results.json").read_text()), out, done.stdout


def test_every_entry_has_stats_or_a_reason(run_of_bench: tuple[dict[str, Any], Path, str]) -> None:
    results, _, printed = run_of_bench
    for entry in results["entries"]:
        assert not entry["failure"], entry["id"]
        assert bool(entry["runs"]) != bool(entry["absent"]), entry["id"]
        assert entry["title"] in printed
        for run in entry["runs"]:
            assert run["wall_s"] > 0
            assert run["cpu_s"] > 0
    cases = {entry["id"]: set(entry["cases"]) for entry in results["entries"]}
    assert cases["limit_direct@fsdp2/file"] == {"warm", "warm_unverified"}
    assert {"cold", "cold_unverified", "warm", "warm_unverified", "part"} <= cases["longshore_arena@tp2/http"]
    assert {"python", "nginx", "ray", "obstore"} <= results["versions"].keys()


def test_the_server_counts_the_bytes_of_each_load(run_of_bench: tuple[dict[str, Any], Path, str]) -> None:
    results, _, _ = run_of_bench
    for entry in results["entries"]:
        ratios = {round(run["store_bytes"] / run["bytes"], 1) for run in entry["runs"]}
        if entry["runs"] and entry["scene"] == "tp2/http":
            whole = entry["contender"] in ("runai", "obstore_whole")
            assert min(ratios) == (2.0 if whole else 1.0), entry["id"]  # more where a slow request was duplicated


def test_ours_check_what_is_published(run_of_bench: tuple[dict[str, Any], Path, str]) -> None:
    results, _, _ = run_of_bench
    wanted = {"cold": "blake3", "warm": "blake3", "warm_xxh3": "xxh3_128", "part": "blake3"}
    for entry in results["entries"]:
        for run in entry["runs"] if entry["contender"] in ("longshore_arena", "longshore_direct") else ():
            assert (run["extra"]["verified"] == wanted.get(run["case"])) == (run["case"] in wanted), run["case"]
            assert bool(run["extra"]["stages"]["verify_bytes"]) == (run["case"] in wanted), run["case"]


def test_a_program_without_nginx_says_so(tmp_path: Path) -> None:
    code = "import bench.harness.store as r, bench.run as b; r._PATH = '/nowhere'; raise SystemExit(b.main())"
    command = [sys.executable, "-c", code, "--small", "--size", "8MB", "--out", str(tmp_path)]
    done = run_to_its_end(command, 2400, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "nginx is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_nodes_that_feed_each_other_are_measured_beside_others(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "bench.peers", "--nodes", "2", "--size", "40MB", "--rounds", "1"]
    done = run_to_its_end([*command, "--out", str(tmp_path)], 600, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers_loads.json").read_text())
    together, alone = found["loads"]
    assert (together["way"], alone["way"]) == ("each other", "the store")
    assert together["bytes_by_source"]["peer"] > 0 == alone["bytes_by_source"]["peer"]
    assert alone["store_bytes"] > 1.9 * found["model_bytes"] > together["store_bytes"]
    assert "| 2 | each other |" in done.stdout


def test_saves_and_merges_make_the_same_tensors_as_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.saves", "--size", "20MB", "--rounds", "1", "--folder", str(tmp_path)]
    done = run_to_its_end(command, 600, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr  # it compares the tensors
    written = {row[0]: row[-1] for row in _rows(done.stdout)}
    assert len(written) == 2 + 4 + 9, done.stdout
    assert (written["`cluster.save`"], written["DCP, consolidated by rank 0"]) == ("1.00", "2.00")
    assert written["verl: `longshore convert`"] == written["Accelerate: `merge_fsdp_weights`"] == "1.00"
    assert not list(tmp_path.iterdir())


def test_updates_are_measured_beside_loads(needs_nginx: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.update", "--size", "40MB", "--rounds", "1", "--folder", str(tmp_path)]
    done = run_to_its_end(command, 600, cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    _, *rows, of_update, of_all, of_restart = _rows(done.stdout)
    update, streaming, *others = ([float(share) for share in row[3:]] for row in rows)
    assert 0.05 < update[0] == streaming[0] < 0.9, done.stdout  # the chunks are large for this model
    assert [round(store, 1) for store, _ in others] == [1.0, 1.0, 1.0]
    assert update[1] > 0.02
    assert [staged > 0 for _, staged in (streaming, *others)] == [False, True, False, False]
    if (ROOT / ".venv-vllm/.made").exists():
        assert 0.05 < float(of_update[3]) < 0.9 < float(of_restart[3]) < 1.1, done.stdout
        assert 0.9 < float(of_all[3]) < 1.1, done.stdout
    else:
        assert of_update[1].startswith("not run: there is no .venv-vllm"), done.stdout
    assert not list(tmp_path.iterdir())


def _rows(printed: str) -> list[list[str]]:
    """Return the cells of all tables, without their lines."""
    return [line[2:-2].split(" | ") for line in printed.splitlines() if line.startswith("| ") and "---" not in line]
