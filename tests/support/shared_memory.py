"""What one test has to itself: `shm_dir` in shared memory, `small_tmpfs` of 8 MiB, `process_host` for readers."""

from __future__ import annotations

import os
import shutil
import subprocess
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


@pytest.fixture
def small_tmpfs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB, or with other options as a parameter; skipped where this user may not mount one."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", getattr(request, "param", "size=8m"), "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def process_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders for sockets and configs that no other test uses, and a host of this process that ends with the test."""
    from actors.reader.host import PROCESS_HOST

    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    PROCESS_HOST.close()
