"""A folder of tensors on disk that one rank writes and then maps: Accelerate's format, as `offload_files` says.

    open: locked, leftovers removed, files created --> write --> seal: on disk, index.json --> readable
       `--> remove: nothing of it is left  <-----------------------------------------'

The folder is new or empty. Its file `.longshore` is locked for as long as a worker uses the folder, and lists the
tensors that have files there. The lock ends with its process: the next load removes what a killed worker left, by that
list, and nothing else. Files are opened by name below the folder's own descriptor, never through a link, so nothing
outside of it is touched whatever a tensor is called.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping

from cluster.device_map.options import INDEX_NAME, offload_name
from cluster.errors import ConfigError, DoesNotFit, PlanError
from storage.problems import quote

LOCK_NAME = ".longshore"
LOCK_TITLE = "files of longshore, which may be removed when no process locks this one; used by "
SAME_LOAD_S = 30.0  # the worker that this one replaces has been killed, and has ended by then
OTHER_LOAD_S = 5.0  # a load that was just released has ended by then
LOCK_EVERY_S = 0.1
TRIES = 5  # of a folder that others remove meanwhile
_PRIVATE = 0o600
_MOST_LIST_BYTES, _MOST_TITLE_BYTES = 64 << 20, 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


class OffloadFolder:
    """Files of one rank. Not thread-safe; different files may be written by different threads."""

    def __init__(self, path: str, owner: str) -> None:
        """`owner`: the load and rank that the files belong to, in one line."""
        self.path = path
        self._owner = owner
        self._folder: int | None = None  # descriptor
        self._lock: int | None = None  # descriptor of the locked file
        self._made = False
        self._sizes: dict[str, int] = {}  # of the files that were created

    @property
    def size_bytes(self) -> int:
        """Bytes of the files that were created."""
        return sum(self._sizes.values())

    def open(self, sizes: Mapping[str, int]) -> None:
        """Lock the folder and create a file of so many bytes for each tensor, its space taken.

        Raises ConfigError, also when another load uses the folder; DoesNotFit; PlanError for a tensor's name.
        """
        need_bytes = sum(sizes.values())
        for tensor in sizes:
            if offload_name(tensor) is None:
                raise PlanError(f"no file can have the name of the tensor {quote(tensor)}")
        with _refused(self.path, need_bytes):
            lock = self._take_folder()
            space = os.fstatvfs(lock)
            free_bytes = space.f_bavail * space.f_frsize
            if need_bytes > free_bytes:
                raise DoesNotFit(
                    "the disk of the offload folder is too small",
                    need_bytes=need_bytes,
                    free_bytes=free_bytes,
                    path=self.path,
                )
            self._list(sizes, lock)
            for tensor, size_bytes in sizes.items():
                self._create(tensor, size_bytes)

    def write(self, tensor: str, data: memoryview, offset: int) -> None:
        """Write bytes of the tensor from `offset` on. Raises ConfigError, DoesNotFit."""
        with _refused(self.path, len(data)), self._file(f"{tensor}.dat", os.O_WRONLY) as descriptor:
            while len(data):
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written

    def seal(self, index: Mapping[str, object]) -> None:
        """Return when all that was written is on the disk, and the index too. Raises ConfigError, DoesNotFit."""
        text = json.dumps(index, indent=2).encode()
        with _refused(self.path, len(text)):
            for tensor in self._sizes:
                with self._file(f"{tensor}.dat", os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
            with self._file(f"{INDEX_NAME}.part", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as descriptor:
                _write_all(descriptor, text)
            os.rename(f"{INDEX_NAME}.part", INDEX_NAME, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            os.fsync(self._descriptor)  # the names, too

    @contextlib.contextmanager
    def readable(self, tensor: str) -> Iterator[str]:
        """Give the block a path at which the tensor's file, and no other, can be opened.

        Raises ConfigError, also for what the system refuses in the block.
        """
        with _refused(self.path, 0), self._file(f"{tensor}.dat", os.O_RDONLY) as descriptor:
            yield f"/proc/self/fd/{descriptor}"

    def remove(self) -> None:
        """Remove this rank's files, and the folder if it was made here. Never raises. Idempotent.

        What maps a file keeps its bytes.
        """
        if self._lock is not None:
            for name in (*_names(self._sizes), LOCK_NAME):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)
        if self._made:
            self._made = False
            with contextlib.suppress(OSError):  # there is something of somebody else's
                os.rmdir(self.path)
        for descriptor in (self._lock, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._lock = self._folder = None

    # -- inside ------------------------------------------------------------------------------------------------

    def _take_folder(self) -> int:
        """Open or make the folder and lock it; the locked descriptor."""
        for _ in range(TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
                self._made = True
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(FileNotFoundError):  # the load that was just released has removed its folder
                self._lock = self._take()
                return self._lock
            os.close(self._folder)
            self._folder = None
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)

    def _take(self) -> int:
        """Lock the folder and remove what a worker that died left there; the locked descriptor."""
        lock = self._locked()
        try:
            ours = self._listed(lock)
            found = set(os.listdir(self._descriptor))
            if found - ours:
                raise ConfigError(
                    "the offload folder is not empty",
                    hint="name a new folder, or remove what is there when no loaded model uses it any more",
                    path=self.path,
                    found=quote(min(found - ours)),
                )
            for name in found - {LOCK_NAME}:
                os.unlink(name, dir_fd=self._descriptor)
        except BaseException:
            if not os.fstat(lock).st_size:  # it was made just now
                with contextlib.suppress(OSError):
                    os.unlink(LOCK_NAME, dir_fd=self._descriptor)
            os.close(lock)
            raise
        return lock

    def _locked(self) -> int:
        """Lock the file that stands for the folder; its descriptor. Waits for a process that is about to end."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        began_s = time.monotonic()
        while True:
            lock = os.open(LOCK_NAME, flags, _PRIVATE, dir_fd=self._descriptor)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:  # else whoever had the lock has removed the file
                    return lock
            except BlockingIOError:
                owner = _lines(lock, _MOST_TITLE_BYTES)[0].removeprefix(LOCK_TITLE)
                if time.monotonic() - began_s > (SAME_LOAD_S if owner == self._owner else OTHER_LOAD_S):
                    os.close(lock)
                    raise ConfigError(
                        "another load uses the offload folder",
                        hint="name a new folder, or release the model that uses this one",
                        path=self.path,
                        used_by=quote(owner),
                    ) from None
                time.sleep(LOCK_EVERY_S)
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _listed(self, lock: int) -> set[str]:
        """Return the names of files that are ours by the locked one's list, itself included."""
        status = os.fstat(lock)
        if not status.st_size:  # it was made just now, or before the first other file
            return {LOCK_NAME}
        title, *tensors = _lines(lock, _MOST_LIST_BYTES)
        if not title.startswith(LOCK_TITLE) or status.st_uid != os.geteuid():
            return set()
        names = _names(tensor for tensor in tensors if offload_name(tensor) is not None)
        return {LOCK_NAME, *(name for name in names if self._is_file(name))}

    def _is_file(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISREG(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode)
        return False

    def _list(self, tensors: Iterable[str], lock: int) -> None:
        """Write which files are ours before the first of them is there."""
        os.ftruncate(lock, 0)
        _write_all(lock, "\n".join((LOCK_TITLE + self._owner, *tensors)).encode())
        os.fsync(self._descriptor)

    def _create(self, tensor: str, size_bytes: int) -> None:
        with self._file(f"{tensor}.dat", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as descriptor:
            self._sizes[tensor] = size_bytes
            if size_bytes:
                os.posix_fallocate(descriptor, 0, size_bytes)

    @contextlib.contextmanager
    def _file(self, name: str, flags: int) -> Iterator[int]:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE, dir_fd=self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @property
    def _descriptor(self) -> int:
        if self._folder is None:
            raise ConfigError("the offload folder is not open", path=self.path)
        return self._folder


def _names(tensors: Iterable[str]) -> list[str]:
    """Return the names of all files that a folder with these tensors may have, but for the locked one."""
    return [*(f"{tensor}.dat" for tensor in tensors), INDEX_NAME, f"{INDEX_NAME}.part"]


def _lines(lock: int, most_bytes: int) -> list[str]:
    """Return the lines at the beginning of the locked file."""
    return os.pread(lock, most_bytes, 0).decode(errors="replace").split("\n")


def _write_all(descriptor: int, data: bytes) -> None:
    """Write from the file's beginning, and return when the bytes are on the disk."""
    view, offset = memoryview(data), 0
    while offset < len(view):
        offset += os.pwrite(descriptor, view[offset:], offset)
    os.fsync(descriptor)


@contextlib.contextmanager
def _refused(path: str, need_bytes: int) -> Iterator[None]:
    """Raise a typed error for what the system refuses in the block."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DoesNotFit(
                "the disk of the offload folder is full", need_bytes=need_bytes, path=path, cause=error.strerror
            ) from error
        raise ConfigError(
            "the offload folder cannot be used",
            hint="its parent must exist on the node that loads, and the worker must be allowed to write there",
            path=path,
            cause=error.strerror or type(error).__name__,
        ) from error
