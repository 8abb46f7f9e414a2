"""Folders in shared memory for tests, and processes that use what is in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder in shared memory that is gone after the test."""
    folder = Path(tempfile.mkdtemp(prefix="longshore-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that can import the packages; it is talked to by lines."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def ask(process: subprocess.Popen[str], line: str = "") -> str:
    """Send one line if there is one, then wait for one. Empty when the process has ended."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("not a process of start_python")
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline().rstrip("\n")
