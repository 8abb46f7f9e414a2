"""The clock, the CPU meter and the memory watch, on programs whose stats are known."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from bench.harness.contender import EXIT_NOT_RUNNABLE, BenchFile, Spec

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SPEC = Spec("http", "http://127.0.0.1:1", "bench", "/m", (BenchFile("model/a", "/m/a", 1000),), 1000)


def run(code: str, needs: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `code` as a contender's main, indented as a function's body."""
    head = "import os, subprocess, sys, time\n"
    head += "from bench.harness.contender import Contender, NotRunnable, run_contender\n"
    head += "from bench.harness.measure import measured\ndef main(spec):\n"
    program = head + textwrap.indent(textwrap.dedent(code), "    ")
    program += f"\nsys.exit(run_contender(Contender('x', '', main, (), needs={needs!r}), sys.argv[1]))\n"
    command = [sys.executable, "-c", program, SPEC.to_json()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def stats(code: str) -> dict[str, Any]:
    done = run(code)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


BURN = "'import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass'"


def test_options_of_a_spec_add_up() -> None:
    assert SPEC.with_options(a=1).with_options(b=[2]).options == {"a": 1, "b": [2]}


def test_a_written_spec_is_read_back() -> None:
    spec = SPEC.with_options(threads=4)
    assert Spec.from_json(spec.to_json()) == spec


def test_the_cpu_of_ended_and_of_living_children_counts() -> None:
    ended = stats(f"with measured(spec):\n    subprocess.run([sys.executable, '-c', {BURN}], check=True)")
    assert ended["cpu_s"] >= 0.28
    code = f"""
    with measured(spec):
        child = subprocess.Popen([sys.executable, '-c', {BURN[:-1]}\\nprint(1, flush=True); input()'],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
    child.communicate(b'x')
    """
    assert stats(code)["cpu_s"] >= 0.25


def test_work_before_and_after_the_run_is_not_counted() -> None:
    code = f"""
    exec({BURN})
    with measured(spec) as m:
        m.stop()
        exec({BURN})
        m.extra['late'] = True
    """
    found = stats(code)
    assert found["cpu_s"] < 0.25
    assert found["extra"] == {"late": True}


def test_late_and_child_memory_over_the_baseline_is_measured() -> None:
    code = """
    before = bytearray(b'1' * 50_000_000)
    with measured(spec, "warm") as m:
        kept = bytearray(b'1' * 30_000_000)
    """
    found = stats(code)
    assert 30e6 <= found["peak_bytes"] < 50e6 + 30e6
    assert found["baseline_bytes"] > 50e6
    assert found["case"] == "warm"
    assert found["bytes"] == 1000
    code = """
    with measured(spec) as m:
        child = subprocess.Popen([sys.executable, '-c', "x = b'1' * 40_000_000; print(1, flush=True); input()"],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
    child.communicate(b'x')
    """
    assert stats(code)["peak_bytes"] >= 40e6


def test_a_run_that_raises_prints_no_stats() -> None:
    done = run("with measured(spec):\n    raise OSError('gone')")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "gone" in done.stderr


@pytest.mark.parametrize(
    ("code", "needs", "reason"),
    [
        ("raise NotRunnable('no such device')", (), "no such device"),
        ("pass", ("json", "no_such_peer"), "no_such_peer is not installed"),
    ],
)
def test_a_contender_that_cannot_run_here_says_why(code: str, needs: tuple[str, ...], reason: str) -> None:
    done = run(code, needs)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (EXIT_NOT_RUNNABLE, "", reason)


def test_a_module_missing_by_mistake_is_no_missing_peer() -> None:
    done = run("import bench.no_such_module")
    assert done.returncode == 1
