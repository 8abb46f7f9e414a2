"""A folder of tensors on disk that one rank writes and then maps: Accelerate's format, as `offload_files` says.

    open --> create each file, its space taken --> write --> seal: on disk, index.json --> readable
                                                     `--> remove: nothing of it is left

The folder is made here or empty. A file called `.longshore` says whose it is: a worker that takes the place of a dead
one begins anew in it, and nobody else uses or removes what is there. Files are opened by name below the folder's own
descriptor, never through a link, so nothing outside of it is touched whatever a tensor is called.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping

from cluster.device_map.offload_files import INDEX_NAME, offload_name
from cluster.errors import ConfigError, DoesNotFit, PlanError
from storage.problems import quote

OWNER_NAME = ".longshore"
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_WRONLY
_PRIVATE = 0o600
_MOST_OWNER_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT)


class OffloadFolder:
    """`owner`: the load and rank it belongs to; `incarnation`: of the worker that writes it."""

    def __init__(self, path: str, owner: str, incarnation: int = 0) -> None:
        self.path = path
        self._owner = owner
        self._mark = f"{owner} {incarnation}".encode()
        self._folder: int | None = None  # descriptor
        self._made = False
        self._sizes: dict[str, int] = {}  # of the files that were created

    @property
    def size_bytes(self) -> int:
        """Of the files that were created."""
        return sum(self._sizes.values())

    def open(self, need_bytes: int) -> None:
        """Take the folder for files of so many bytes. Raises ConfigError, DoesNotFit."""
        with _refused(self.path, need_bytes):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
                self._made = True
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._take()
            space = os.fstatvfs(self._folder)
            free_bytes = space.f_bavail * space.f_frsize
        if need_bytes > free_bytes:
            raise DoesNotFit(
                "the disk of the offload folder is too small",
                need_bytes=need_bytes,
                free_bytes=free_bytes,
                path=self.path,
            )

    def create(self, tensor: str, size_bytes: int) -> None:
        """An empty file for the tensor, its space taken. Raises ConfigError, DoesNotFit, PlanError for the name."""
        name = offload_name(tensor)
        if name is None:
            raise PlanError(f"no file can have the name of the tensor {quote(tensor)}")
        with _refused(self.path, size_bytes):
            descriptor = os.open(name, _NEW, _PRIVATE, dir_fd=self._descriptor)
            self._sizes[tensor] = size_bytes
            try:
                if size_bytes:
                    os.posix_fallocate(descriptor, 0, size_bytes)
            finally:
                os.close(descriptor)

    def write(self, tensor: str, data: memoryview, offset: int) -> None:
        """Bytes of the tensor from `offset` on. Raises ConfigError, DoesNotFit."""
        with _refused(self.path, len(data)), self._file(tensor, os.O_WRONLY) as descriptor:
            while len(data):
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written

    def seal(self, index: Mapping[str, object]) -> None:
        """Everything is written: returns when it is on the disk, the index too. Raises ConfigError, DoesNotFit."""
        text = json.dumps(index, indent=2).encode()
        with _refused(self.path, len(text)):
            for tensor in self._sizes:
                with self._file(tensor, os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
            self._replace(INDEX_NAME, text)
            os.fsync(self._descriptor)  # the names, too

    @contextlib.contextmanager
    def readable(self, tensor: str) -> Iterator[str]:
        """A path at which the tensor's file, and no other, can be opened for the length of the block.

        Raises ConfigError, also for what the system refuses in the block.
        """
        with _refused(self.path, 0), self._file(tensor, os.O_RDONLY) as descriptor:
            yield f"/proc/self/fd/{descriptor}"

    def close(self) -> None:
        """Leave the files as they are. Idempotent."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def remove(self) -> None:
        """Nothing of this rank's is left in the folder, nor the folder if it was made here. Never raises."""
        with contextlib.suppress(OSError):
            if self._folder is not None and self._read_owner() == self._mark:
                self._empty()
                os.unlink(OWNER_NAME, dir_fd=self._descriptor)
            if self._made:
                os.rmdir(self.path)  # which fails when there is something of somebody else's
                self._made = False
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        found = self._read_owner()
        if found is None:
            if os.listdir(self._descriptor):
                raise ConfigError(
                    "the offload folder is not empty",
                    hint="name a new folder, or remove what is there when no loaded model uses it any more",
                    path=self.path,
                )
            try:
                self._create(OWNER_NAME, self._mark)
                return
            except FileExistsError:  # somebody was faster
                found = self._read_owner() or b""
        if found.rpartition(b" ")[0] != self._owner.encode():
            raise ConfigError(
                "the offload folder belongs to another load",
                hint="name a new folder, or remove this one when no loaded model uses it any more",
                path=self.path,
            )
        self._replace(OWNER_NAME, self._mark)
        self._empty()

    def _read_owner(self) -> bytes | None:
        try:
            descriptor = os.open(OWNER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        try:
            return os.read(descriptor, _MOST_OWNER_BYTES)
        finally:
            os.close(descriptor)

    def _replace(self, name: str, data: bytes) -> None:
        part = f"{name}.part"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=self._descriptor)
        self._create(part, data)
        os.rename(part, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def _create(self, name: str, data: bytes) -> None:
        """A new file of these bytes, on the disk; none at all when there is no room for it."""
        descriptor = os.open(name, _NEW, _PRIVATE, dir_fd=self._descriptor)
        try:
            view = memoryview(data)
            while len(view):
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            os.unlink(name, dir_fd=self._descriptor)
            raise
        finally:
            os.close(descriptor)

    def _empty(self) -> None:
        """Remove what this class writes, but for the owner's file."""
        for name in os.listdir(self._descriptor):
            if name.endswith(".dat") or name in (INDEX_NAME, f"{INDEX_NAME}.part", f"{OWNER_NAME}.part"):
                os.unlink(name, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def _file(self, tensor: str, flags: int) -> Iterator[int]:
        descriptor = os.open(f"{tensor}.dat", flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @property
    def _descriptor(self) -> int:
        if self._folder is None:
            raise ConfigError("the offload folder is not open", path=self.path)
        return self._folder


@contextlib.contextmanager
def _refused(path: str, need_bytes: int) -> Iterator[None]:
    """Says what the system refused."""
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
