"""`longshore demo` as a user runs it: in a process group of its own, to its end and interrupted on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZE = "40MB"


class Demo:
    """A running demo; its lines as they come."""

    def __init__(self, folder: Path, *options: str) -> None:
        # A mark in the environment finds every process that the demo began, whoever its parent is by then.
        self.mark = f"LONGSHORE_TEST_MARK={folder}"
        environment = {**os.environ, "TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}
        environment.update([self.mark.split("=", 1)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "longshore", "demo", "--size", SIZE, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            # A shell's background job ignores SIGINT, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.lines: list[str] = []
        self.seen = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self.seen:
                self.lines.append(line)
                self.seen.notify_all()

    def wait_for(self, text: str) -> None:
        with self.seen:
            assert self.seen.wait_for(lambda: any(text in line for line in self.lines), 120), self.lines

    def end(self) -> tuple[int, str]:
        output = self.process.stdout.read() if self.process.stdout else ""
        code = self.process.wait(120)
        self.reader.join(10)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()
        return code, output

    def left_processes(self) -> list[str]:
        left = []
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
                if self.mark in environment.split("\0") and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(" ".join(process.cmdline())[:200])
            except (OSError, psutil.Error):
                continue
        return left


@pytest.fixture
def folder() -> Iterator[Path]:
    # Ray puts sockets under it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp") as path:
        yield Path(path)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("longshore-arena-")}


def check_nothing_left(demo: Demo, folder: Path, before: set[str]) -> None:
    assert demo.left_processes() == []
    assert shared_memory() <= before
    assert [path for path in folder.glob("longshore-demo-*")] == []


def test_demo_compares_every_slice_and_leaves_nothing(folder: Path) -> None:
    before = shared_memory()
    demo = Demo(folder, "--json")
    code, output = demo.end()
    assert code == 0, demo.lines
    report = json.loads(output)
    assert report["first"]["verified"] == "blake3"
    assert report["first"]["nodes"][0]["cached_chunks"] == 0
    assert report["again"]["nodes"][0]["store_chunks"] == 0
    assert report["again"]["nodes"][0]["cached_chunks"] == report["first"]["nodes"][0]["store_chunks"] > 0
    # Both loads, all ranks: norms are held by every rank, so a little more than twice the model.
    assert 2 * report["model_bytes"] < report["compared_bytes"] < 2.1 * report["model_bytes"]
    check_nothing_left(demo, folder, before)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting a local Ray cluster", signal.SIGINT),
        ("loading again", signal.SIGTERM),
    ],
)
def test_interrupted_demo_leaves_nothing(folder: Path, moment: str, number: signal.Signals) -> None:
    before = shared_memory()
    demo = Demo(folder)
    demo.wait_for(moment)
    os.killpg(demo.process.pid, number)
    code, _ = demo.end()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], demo.lines
    check_nothing_left(demo, folder, before)
