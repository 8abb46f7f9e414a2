"""The folder of a run: removed when the run ends, swept when it was killed, kept while it lives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.harness.run_folder import run_folder, sweep
from bench.harness.store import NoRangeServer, find_nginx

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from bench.harness.run_folder import run_folder
with run_folder(Path(sys.argv[1]), "longshore-bench-") as folder:
    (folder / "www").mkdir()
    (folder / "www" / "model").write_bytes(b"1" * 1000)
    print(folder, flush=True)
    sys.stdin.read()
"""
SERVE = """
import sys
from pathlib import Path
from bench.harness.store import RangeServer
from bench.harness.run_folder import NGINX, run_folder
with run_folder(Path(sys.argv[1]), "longshore-bench-") as folder:
    (folder / "www").mkdir()
    with RangeServer(folder / "www", folder / NGINX):
        print(folder, flush=True)
        sys.stdin.read()
"""


def begin(program: str, place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(place)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process, folder = begin(HOLD, tmp_path)
    with process:
        yield process, folder
        process.kill()


def test_the_folder_is_removed_however_the_run_ends(tmp_path: Path) -> None:
    with run_folder(tmp_path, "longshore-gpu-") as folder:
        assert folder.parent == tmp_path
        (folder / "file").touch()
    with pytest.raises(KeyboardInterrupt), run_folder(tmp_path, "longshore-gpu-"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_living_run_is_kept(tmp_path: Path, alive: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = alive
    assert sweep(tmp_path) == []
    with run_folder(tmp_path, "longshore-bench-"):
        assert (folder / "www" / "model").exists()
    process.communicate("")
    assert not folder.exists()


def test_the_folder_of_a_killed_run_is_swept_by_the_next(
    tmp_path: Path, alive: tuple[subprocess.Popen[str], Path]
) -> None:
    process, folder = alive
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert folder.exists()
    with run_folder(tmp_path, "longshore-gpu-") as own:
        assert list(tmp_path.iterdir()) == [own]


def test_folders_that_no_run_made_are_kept(tmp_path: Path) -> None:
    (tmp_path / "longshore-bench-mine").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").touch()
    target = tmp_path / "target"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "longshore-gpu-link").symlink_to(target)
    assert sweep(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("longshore-bench-mine", "longshore-gpu-link", "other", "target")
    ]


def test_a_process_that_reuses_a_dead_servers_pid_is_kept(
    tmp_path: Path, alive: tuple[subprocess.Popen[str], Path]
) -> None:
    process, folder = alive
    (folder / "nginx").mkdir()
    (folder / "nginx" / "nginx.pid").write_text(f"{os.getpid()}\n")
    process.kill()
    process.wait()
    assert sweep(tmp_path) == [folder]


@pytest.mark.slow
@pytest.mark.long
def test_the_server_of_a_killed_run_is_ended() -> None:
    try:
        find_nginx()
    except NoRangeServer as error:
        pytest.skip(str(error))
    place = Path("/dev/shm") / f"test-run-folder-{os.getpid()}"
    place.mkdir()
    try:
        process, folder = begin(SERVE, place)
        with process:
            server = psutil.Process(int((folder / "nginx" / "nginx.pid").read_text()))
            process.kill()
        assert server.is_running()
        assert sweep(place) == [folder]
        assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    finally:
        shutil.rmtree(place)
