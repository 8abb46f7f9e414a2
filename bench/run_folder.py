"""The folder of one run in tmpfs: gone at its end, or swept by the next run when the process was killed.

    /dev/shm/longshore-bench-XXXXXXXX/
        lock          locked (flock) by the run for as long as it lives: who can lock it has a dead run before him
        nginx/        its pid file, for the sweep
        ...

The kernel frees a lock however a process ends, and a lock cannot be mistaken as a process id that is used again can.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

PREFIXES = ("longshore-bench-", "longshore-link-", "longshore-gpu-")
NGINX = "nginx"  # folder of the server's state
_LOCK = "lock"
_GRACE_S = 5.0


@contextlib.contextmanager
def run_folder(place: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `place`, removed at the end. `prefix`: one of PREFIXES. Sweeps `place` first.

    Raises OSError when it cannot be made.
    """
    sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    lock = -1
    try:
        lock = _lock(folder)
        yield folder
    finally:
        with _signals_ignored():
            shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def sweep(place: Path) -> list[Path]:
    """Remove the folders of runs that are dead, and end what serves them; those that were removed."""
    swept = []
    for prefix in PREFIXES:
        for folder in place.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                if _sweep_one(folder):
                    swept.append(folder)
    return swept


def _sweep_one(folder: Path) -> bool:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if folder.is_symlink() or os.fstat(lock).st_uid != os.geteuid():
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # alive
        _end_server(folder / NGINX)
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(lock)


def _end_server(state: Path) -> None:
    """End the nginx whose pid file lies there, if that process is one that was started with this very folder."""
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
        return  # none, or gone


def _lock(folder: Path) -> int:
    """Lock it: named as the lock only when it is locked, so that nobody finds one that is free."""
    unnamed = folder / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / _LOCK)
    except BaseException:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A second Ctrl-C must not leave half of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
