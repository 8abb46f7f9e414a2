"""Checkpoints of FSDP jobs that torch and Accelerate wrote, once in a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("make_fsdp_checkpoints.py")


@pytest.fixture(scope="session")
def fsdp_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make_fsdp_checkpoints.py` fills. Its ranks are processes of their own."""
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("fsdp")
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
