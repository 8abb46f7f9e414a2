"""Python processes that a test talks to by lines, and programs that make them hard to see in /proc."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.shared_memory import REPOSITORY

# The first thread ends, and the process goes on in another, until its input ends.
LEADERLESS = """
import ctypes, sys, threading
def work():
    {work}
    print("at work", flush=True)
    sys.stdin.read()
threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(None)
"""
CUT_TITLE = "ray::モデル読込".encode()[:15]  # what the kernel keeps of it ends inside of a character
TITLED = f"""
import ctypes, sys
ctypes.CDLL(None).prctl(15, {CUT_TITLE!r}, 0, 0, 0)
print("at work", flush=True)
sys.stdin.read()
"""


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python process that can import the packages; it is talked to by lines."""
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


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program that prints "at work" and then reads its input; killed at the end."""
    with start_python(program, *arguments) as process:
        try:
            assert ask(process) == "at work"
            yield process
        finally:
            process.kill()
