"""The clock, the CPU meter and the memory watch, on programs whose stats are known."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bench.contender import EXIT_NOT_RUNNABLE
from bench.spec import BenchFile, Spec

ROOT = Path(__file__).resolve().parents[2]
SPEC = Spec("http", "http://127.0.0.1:1", "bench", "model", "/m", (BenchFile("model/a", "/m/a", 1000),), 1000)


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a contender's main, indented as a function's body."""
    SPEC.write(tmp_path / "spec.json")
    head = "import os, subprocess, sys, time\nfrom bench.contender import NotRunnable, run_contender\n"
    head += "from bench.measure import measured\ndef main(spec):\n"
    program = head + textwrap.indent(textwrap.dedent(code), "    ") + "\nrun_contender(main)\n"
    command = [sys.executable, "-c", program, str(tmp_path / "spec.json")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def stats(tmp_path: Path, code: str) -> dict[str, Any]:
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


BURN = "'import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass'"


def test_a_spec_travels() -> None:
    assert SPEC.with_options(a=1).with_options(b=[2]).options == {"a": 1, "b": [2]}


def test_a_written_spec_is_read_back(tmp_path: Path) -> None:
    spec = SPEC.with_options(threads=4)
    spec.write(tmp_path / "spec.json")
    assert Spec.read(tmp_path / "spec.json") == spec


def test_the_cpu_of_ended_and_of_living_children_counts(tmp_path: Path) -> None:
    ended = stats(tmp_path, f"with measured(spec):\n    subprocess.run([sys.executable, '-c', {BURN}], check=True)")
    assert ended["cpu_s"] >= 0.28
    code = f"""
    with measured(spec):
        child = subprocess.Popen([sys.executable, '-c', {BURN[:-1]}\\nprint(1, flush=True); input()'],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
    child.communicate(b'x')
    """
    assert stats(tmp_path, code)["cpu_s"] >= 0.25


def test_what_is_done_before_and_after_is_not_counted(tmp_path: Path) -> None:
    code = f"""
    exec({BURN})
    with measured(spec) as m:
        m.stop()
        exec({BURN})
        m.extra['late'] = True
    """
    found = stats(tmp_path, code)
    assert found["cpu_s"] < 0.25
    assert found["extra"] == {"late": True}


def test_memory_over_the_baseline_is_seen_at_the_end_and_in_children(tmp_path: Path) -> None:
    code = """
    before = bytearray(b'1' * 50_000_000)
    with measured(spec, touched_before_bytes=7) as m:
        kept = bytearray(b'1' * 30_000_000)
    """
    found = stats(tmp_path, code)
    assert 30e6 <= found["peak_bytes"] < 50e6 + 30e6
    assert found["baseline_bytes"] > 50e6
    assert found["touched_before_bytes"] == 7
    assert found["bytes"] == 1000
    code = """
    with measured(spec) as m:
        child = subprocess.Popen([sys.executable, '-c', "x = b'1' * 40_000_000; print(1, flush=True); input()"],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
    child.communicate(b'x')
    """
    assert stats(tmp_path, code)["peak_bytes"] >= 40e6


def test_shared_memory_of_the_peak_is_named_apart(tmp_path: Path) -> None:
    code = """
    import mmap
    with measured(spec) as m:
        private = b'1' * 30_000_000
        shared = mmap.mmap(-1, 20_000_000)
        shared.write(b'1' * 20_000_000)
    """
    found = stats(tmp_path, code)
    assert 20e6 <= found["peak_shared_bytes"] < 21e6
    assert found["peak_bytes"] >= 50e6


def test_a_run_that_raises_prints_no_stats(tmp_path: Path) -> None:
    done = run(tmp_path, "with measured(spec):\n    raise OSError('gone')")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "gone" in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise NotRunnable('no such device')", "no such device"),
        ("import no_such_peer", "no_such_peer is not installed"),
    ],
)
def test_what_cannot_run_here_says_why(tmp_path: Path, code: str, said: str) -> None:
    done = run(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (EXIT_NOT_RUNNABLE, "", said)


def test_a_mistake_of_ours_is_no_missing_peer(tmp_path: Path) -> None:
    done = run(tmp_path, "import bench.no_such_module")
    assert done.returncode == 1
