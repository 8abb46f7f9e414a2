"""The folder of one run in tmpfs: removed at its end, or by the next run when the process was killed.

    /dev/shm/longshore-bench-XXXXXXXX/    locked (flock) for as long as the run lives
        nginx/                            nginx's pid file, among others

The kernel frees a lock however a process ends, and unlike a process id a lock is never taken for another's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

NGINX = "nginx"  # folder of the server's state
_NAME = re.compile(r"longshore-(bench|gpu)-\w{8}")
_GRACE_S = 5.0


@contextlib.contextmanager
def run_folder(place: Path, prefix: str) -> Iterator[Path]:
    """Make a folder in `place`, removed at the end. `prefix`: "longshore-bench-", "longshore-gpu-". Raises OSError."""
    sweep(place)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        if (lock := _lock(folder)) is not None:  # else another run sweeps it: it was not locked yet
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(place: Path) -> list[Path]:
    """Remove the folders of dead runs and end their servers. Returns those that were removed."""
    swept = []
    for folder in place.glob("longshore-*"):
        if _NAME.fullmatch(folder.name) and (lock := _lock(folder)) is not None:
            for state in folder.glob(f"{NGINX}*"):
                _end_server(state)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            swept.append(folder)
    return swept


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user. Returns None when it is another's, is locked, or was removed meanwhile."""
    lock = -1
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid() and folder.exists():
            return lock
    except OSError:
        pass
    if lock >= 0:
        os.close(lock)
    return None


def _end_server(state: Path) -> None:
    """End the nginx whose pid file lies there, if it was started with this very folder."""
    try:
        process = psutil.Process(int((state / "nginx.pid").read_text()))
        words = " ".join(process.cmdline()).split()  # nginx writes its title in one piece
        if not words or "nginx" not in words[0] or str(state) not in words:
            return
        process.terminate()  # the master takes its workers along
        process.wait(_GRACE_S)
    except psutil.TimeoutExpired:
        process.kill()
    except (OSError, ValueError, psutil.Error):
        return  # no such process
