"""`longshore demo` as a user runs it: in a process group of its own, to its end and interrupted on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest

from storage.arena.arena_files import arena_names
from tests.support.ray_clusters import eventually

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

SIZE = "40MB"
WAIT_S = 300.0  # for what must come, on however slow a machine
RAY = {"gcs_server", "raylet"}  # processes


class Demo:
    """A running demo; its lines as they come. Nothing of it outlives the block."""

    def __init__(self, folder: Path, *options: str) -> None:
        # A mark in the environment finds every process that the demo began, even after its parent ended.
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
        self.is_over = False  # no line comes any more
        self.seen = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with self.seen:
                self.lines.append(line)
                self.seen.notify_all()
        with self.seen:
            self.is_over = True
            self.seen.notify_all()

    def wait_for(self, text: str) -> None:
        with self.seen:
            self.seen.wait_for(lambda: self.is_over or self._said(text), WAIT_S)
            assert self._said(text), self.lines

    def _said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def end(self) -> tuple[int, str]:
        output = self.process.stdout.read() if self.process.stdout else ""
        code = self.process.wait(WAIT_S)
        self.reader.join(WAIT_S)
        return code, output

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
                if self.mark in environment.split("\0") and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def names(self) -> set[str]:
        """Return the names of its processes."""
        found = set()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                found.add(process.name())
        return found

    def left_processes(self) -> list[str]:
        left = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                left.append(" ".join(process.cmdline())[:200])
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        while left := list(self._processes()):  # again: one of them may just have begun another
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        self.process.wait(WAIT_S)
        self.reader.join(WAIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    # Ray puts sockets under it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


def shared_memory() -> set[str]:
    return set(arena_names())


def unused_memory() -> set[str]:
    """List the shared memory that no process has mapped: other loads may run on this machine."""
    names = shared_memory()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped = maps.read_text(errors="replace")
            names -= {name for name in names if name in mapped}
    return names


def check_nothing_left(demo: Demo, folder: Path, before: set[str]) -> None:
    assert demo.left_processes() == []
    eventually(lambda: unused_memory() <= before, lambda: f"left: {unused_memory() - before}")
    assert [path for path in folder.glob("longshore-demo-*")] == []


def test_demo_compares_every_slice_and_leaves_nothing(folder: Path) -> None:
    before = shared_memory()
    with Demo(folder, "--json") as demo:
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
    with Demo(folder) as demo:
        demo.wait_for(moment)
        # Ray is imported before it starts anything, and Python only prints an interrupt that comes as an import ends.
        eventually(lambda: demo.is_over or demo.names() & RAY, lambda: f"no Ray: {demo.lines}", WAIT_S)
        os.killpg(demo.process.pid, number)
        code, _ = demo.end()
        assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], demo.lines
        check_nothing_left(demo, folder, before)
