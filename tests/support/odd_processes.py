"""Processes that are hard to see in /proc: their first thread has ended, or their title is no text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that says "at work" and then reads its input; killed at the end."""
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "at work\n"
            yield process
        finally:
            process.kill()
