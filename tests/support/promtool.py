"""Prometheus's own tools, where they are installed: Debian's package `prometheus` has both."""

from __future__ import annotations

import shutil
import subprocess

import pytest

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on PATH")


def promtool(*arguments: str, stdin: str = "") -> str:
    """Run promtool and return its output. AssertionError with that output when promtool finds a problem."""
    done = subprocess.run(
        ["promtool", *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
