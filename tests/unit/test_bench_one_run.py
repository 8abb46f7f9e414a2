"""One run of a contender: the settings it receives, and the meaning of its end."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench.harness.rounds
from bench.harness.contender import Contender, NotRunnable, Spec
from bench.harness.results import Entry, Run
from bench.harness.rounds import RunFailed, run_once
from storage.host.processes import ProcessId
from tests.support.ray_clusters import eventually

pytestmark = pytest.mark.long

SPEC = Spec("http", "http://127.0.0.1:1", "bench", "/m", (), 1000)
FIGURES = "print('chatter'); print('{\"bytes\": 10, \"wall_s\": 2.0, \"cpu_s\": 1.0}'); print('more')"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose only contender is written by a test."""
    folder = tmp_path / "bench" / "contenders"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    monkeypatch.setattr(bench.harness.rounds, "REPOSITORY", tmp_path)
    return tmp_path


def run(repository: Path, program: str, timeout_s: float = 30.0) -> list[Run]:
    (repository / "bench" / "contenders" / "__main__.py").write_text(program)
    contender = Contender("one", "one", lambda _: None, (), options={"memory": "fresh", "threads": 1})
    return run_once(Entry(contender, "tp2/http"), {"threads": 2}, SPEC, timeout_s)


def test_every_line_of_json_is_a_run(repository: Path) -> None:
    both = FIGURES + '; print(\'{"bytes": 10, "case": "warm", "wall_s": 1.0}\')'
    assert run(repository, both) == [Run(10, "", 2.0, 1.0), Run(10, "warm", 1.0)]


def test_options_of_the_setting_override_those_of_its_contender(repository: Path) -> None:
    program = "import json, sys; options = json.loads(sys.argv[2])['options']\n"
    program += "if options != {'memory': 'fresh', 'threads': 2}: raise SystemExit(f'{options}')\n"
    assert run(repository, program + FIGURES)[0].bytes == 10


def test_settings_and_proxies_of_the_user_are_not_passed_on(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "AWS_PROFILE", "LONGSHORE_SLOT_BYTES"):
        monkeypatch.setenv(name, "x")
    program = "import os; bad = [n for n in os.environ if os.environ[n] == 'x']\nif bad: raise SystemExit(f'{bad}')\n"
    assert run(repository, program + FIGURES)[0].bytes == 10


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ("import sys; print('no GPU', file=sys.stderr); sys.exit(3)", NotRunnable, "no GPU"),
        ("raise OSError('refused')", RunFailed, "exit code 1: OSError: refused"),
        ("print('hello')", RunFailed, "no measurements"),
        ("print('{}')", RunFailed, "no measurements"),
    ],
)
def test_the_result_says_how_the_run_ended(repository: Path, program: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run(repository, program)


@pytest.mark.slow  # it waits for the limit
@pytest.mark.long
def test_a_run_past_its_limit_is_ended_with_its_children(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.harness.rounds, "_GRACE_S", 0.5)
    pid_file = repository / "pid"
    program = "import subprocess, sys, time\n"
    program += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    program += f"open({str(pid_file)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    with pytest.raises(RunFailed, match="not done after 10 s"):
        run(repository, program, timeout_s=10.0)
    child = int(pid_file.read_text())
    eventually(lambda: ProcessId.of(child) is None, "its child goes on", 60)  # the kernel takes its time
