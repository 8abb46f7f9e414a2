"""The benchmark of saves counts memory and files of the processes that it forks, here in a program of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.saves import Cost, Program, table
from tests.support.ray_clusters import REPOSITORY

SCRIPT = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
from bench.harness.contender import NotRunnable
from bench.saves import Program, attempt

def work(part):
    tensors = b"x" * 30_000_000
    part.start()
    more = b"y" * (20_000_000 * (1 + part.rank))
    time.sleep(0.2)
    del more
    (part.target / f"{part.rank}.gone").write_bytes(b"z" * 1_000_000)
    time.sleep(0.3)
    (part.target / f"{part.rank}.gone").rename(part.target / f"{part.rank}.kept")
    (part.target / f"{part.rank}.last").write_bytes(b"z" * 1000)

def fail(part):
    part.start()
    if part.rank:
        raise ValueError("no")
    time.sleep(60)

def absent(part):
    raise NotRunnable("it is not installed")

found = []
for number, run in enumerate((work, fail, absent)):
    program = Program("", run, 2)
    cost = attempt(program, Path(), {}, Path(sys.argv[1]) / str(number))
    found.append([cost and asdict(cost), program.failure, program.absent])
print("found " + json.dumps(found))
"""


def test_memory_and_files_of_all_processes_are_counted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (cost, *_), failed, absent = json.loads(done.stdout.rpartition("found ")[2])
    assert 60e6 <= cost["peak_bytes"] < 70e6
    assert 40e6 <= cost["largest_bytes"] < 45e6
    assert cost["written_bytes"] == 2_002_000
    assert 0.5 <= cost["wall_s"] < 20
    assert failed == [None, "ValueError: no", ""]
    assert absent == [None, "", "it is not installed"]


def test_the_table_has_medians_over_ours_and_reasons() -> None:
    ours = Program("ours", print, costs=[Cost(t, 20, 10, 100) for t in (1.0, 2.0, 9.0)], model_bytes=100)
    slow = Program("other", print, costs=[Cost(3.0, 150, 50, 200)], model_bytes=100)
    gone = Program("third", print, absent="no | such")
    *_, first, second, third = table("saves", [ours, slow, gone]).splitlines()
    assert first == "| ours | no | 2.00 (1.00-9.00) | 1.00 | 0.20 | 0.10 | 1.00 |"
    assert second == "| other | no | 3.00 (3.00-3.00) | 1.50 | 1.50 | 0.50 | 2.00 |"
    assert third == "| third | no | not run: no / such |  |  |  |  |"
