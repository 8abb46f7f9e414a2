"""`shm_dir`: a folder in shared memory for one test."""

from __future__ import annotations

import shutil
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
