"""Files being written beside their place: no key names them, and their writer locks them for as long as it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets

TEMP_PREFIX = ".longshore-"
TEMP_SUFFIX = ".part"


def is_temporary(name: str) -> bool:
    """Whether the name is one of ours."""
    return name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)


def open_locked(folder: str, *, mode: int = 0o666, dir_fd: int | None = None) -> tuple[str, int]:
    """Path and descriptor of a new temporary file; its lock goes with its writer, however that dies.

    With `dir_fd`, `folder` is relative to that open folder.
    """
    while True:
        path = os.path.join(folder, f"{TEMP_PREFIX}{secrets.token_hex(8)}{TEMP_SUFFIX}")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=dir_fd)
        with contextlib.suppress(OSError):  # a file system without locks: nobody can take it for left over either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # somebody swept in the moment before the lock


def remove_unless_locked(path: str, *, dir_fd: int | None = None) -> None:
    """Remove what a killed writer left; a file that is being written stays."""
    with contextlib.suppress(OSError):  # locked, gone, not ours, or no locks here: it stays
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path, dir_fd=dir_fd)
        finally:
            os.close(file)
