"""A folder as an object store: positioned reads, versions from file metadata, atomic writes.

A key is a path below the root. Symbolic links are followed only below the root and into the blob folder of a Hugging
Face cache (`_allowed_roots`). Fifos, devices and sockets are refused, because opening one can block or have effects.

Temporary files are in the folder of their final place. No key names them, and their writer holds a lock on them.
Files that several processes write in parts (`storage.stores.parts`) are hidden in the same way. They outlive their
writers, each of which holds a shared lock only while it writes a part.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat as stat_bits
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from storage.errors import (
    AccessDenied,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    ShortRead,
    StoreError,
    StoreUnavailable,
    UnsupportedStore,
)
from storage.stores.object_store import ByteRange, ObjectInfo, check_key, cut
from storage.stores.parts import OpenUpload
from storage.stores.requests import ReadLimit

TEMP_PREFIX = ".longshore-"
TEMP_SUFFIX = ".part"
PARTS_SUFFIX = ".save"  # of a file that is written in parts
TAKEOVER_S = 5.0  # longest wait for writers of parts when another save continues their upload
COMPARED_BYTES = 1 << 20  # read at a time to compare a part
_UPLOAD = re.compile(rf"{re.escape(TEMP_PREFIX)}[0-9a-f]{{16}}-([^/\0]+){re.escape(PARTS_SUFFIX)}")


def is_temporary(name: str) -> bool:
    """Return whether the name is that of a temporary file of Longshore."""
    return name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)


def is_hidden(name: str) -> bool:
    """Return whether the name is that of a file of Longshore which is no object: temporary, or written in parts."""
    return is_temporary(name) or (name.startswith(TEMP_PREFIX) and name.endswith(PARTS_SUFFIX))


def open_locked(folder: str, *, mode: int = 0o666, dir_fd: int | None = None) -> tuple[str, int]:
    """Create a temporary file and return its path and descriptor. Its lock ends with its writer, however that dies.

    With `dir_fd`, `folder` is relative to that open folder.
    """
    while True:
        path = os.path.join(folder, f"{TEMP_PREFIX}{secrets.token_hex(8)}{TEMP_SUFFIX}")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=dir_fd)
        with contextlib.suppress(OSError):  # without locks in this file system, nobody can take the file for abandoned
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # another process swept it before it was locked


def remove_unless_locked(path: str, *, dir_fd: int | None = None) -> None:
    """Remove a temporary file of a killed writer. A file that is being written is locked, and stays."""
    with contextlib.suppress(OSError):  # it stays when it is locked, gone, not ours, or locks are not supported
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path, dir_fd=dir_fd)
        finally:
            os.close(file)


_HINT_SAME_FILE = (
    "check whether the file was replaced, and that all nodes see the same copy; a local path must be on one shared"
    " file system"
)


class LocalStore:
    """Files below one folder of this host. Thread-safe."""

    in_order = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Set the root. The folder may be missing: reads then raise ObjectNotFound, and the first write creates it."""
        self._root = os.path.abspath(root)
        self._real_roots = tuple(_allowed_roots(self._root))
        self.uri = f"file://{self._root}"
        self._swept: set[str] = set()  # folders that were already checked for files of killed writers
        self._lock = threading.Lock()

    def stat(self, key: str) -> ObjectInfo:
        """Return size and version. Raises ObjectNotFound (which names this host), AccessDenied, StoreError."""
        with self._translated(key), self._opened(key) as (_, facts):
            return _info(key, facts)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the files whose key begins with `prefix`, in key order. `left_out` names the others."""
        with self._translated(None):
            if not os.path.isdir(self._root):
                raise FileNotFoundError(errno.ENOENT, "no such folder")
            infos = [info for key, info in self._walk() if info is not None and key.startswith(prefix)]
        yield from sorted(infos, key=lambda info: info.key)

    def left_out(self) -> Iterator[str]:
        """Yield what `list` leaves out: special files, links to folders, broken links, names that are not keys."""
        with self._translated(None):
            names = [key for key, info in self._walk() if info is None]
        yield from names

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        """Read like ObjectStore.read_into. The version is checked before and after, so a concurrent write is seen."""
        byte_range.check_buffer(buffer)
        return self.read_pieces(key, byte_range, cut(buffer), etag=etag)

    def read_pieces(
        self,
        key: str,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        etag: str | None = None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        """Read like ReadsPieces.read_pieces."""
        check_key(key)
        if not byte_range.size_bytes:
            return etag
        where: dict[str, Any] = {"uri": self.uri, "key": key, "range": str(byte_range)}
        with self._translated(key), self._opened(key) as (file, facts):
            found = _version(facts)
            if etag is not None and found != etag:
                raise ObjectChanged(
                    "file is not the pinned version", hint=_HINT_SAME_FILE, expected=etag, found=found, **where
                )
            if byte_range.end > facts.st_size:
                raise RangeMismatch("range reaches past the file's end", size_bytes=facts.st_size, **where)
            position = byte_range.start
            for piece in pieces:
                if limit is not None:
                    limit.check()
                end = position + len(piece)
                while position < end:
                    count = os.preadv(file, [piece[position - end :]], position)
                    if not count:
                        raise ShortRead("the file became shorter", received_bytes=position - byte_range.start, **where)
                    position += count
            if _version(os.fstat(file)) != found:
                raise ObjectChanged("file was written while it was read", **where)
            return found

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a temporary file, sync it and rename it: readers see the old file or the new one."""
        with self.upload(key) as upload:
            upload.write(memoryview(data))
            return upload.complete()

    @contextmanager
    def upload(self, key: str) -> Iterator[_LocalUpload]:
        """Write a file that appears under its name on `complete`. Without that, what was written is removed."""
        path = self._path(check_key(key))
        with self._translated(key):
            self._check_inside(os.path.realpath(os.path.dirname(path)), key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._sweep(os.path.dirname(path))
            upload = _LocalUpload(self, key, path)
        try:
            yield upload
        finally:
            upload.discard()

    def delete(self, key: str) -> None:
        """Remove one file. The folders above it stay."""
        path = self._path(check_key(key))
        with self._translated(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._check_inside(os.path.realpath(os.path.dirname(path)), key)
            os.unlink(path)

    def close(self) -> None:
        """Do nothing, because no file is open between calls."""

    def begin_parts(self, key: str) -> str:
        """Create the hidden file of a key. Its name is the upload's id."""
        path, name = self._path(check_key(key)), self._new_upload(key)
        with self._translated(key):
            self._check_inside(os.path.realpath(os.path.dirname(path)), key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(self._upload_path(key, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        return name

    def put_part(self, key: str, upload: str, number: int, start: int, data: memoryview) -> str:
        """Write a part at its position and sync it. The tag is empty, because a file system keeps none.

        Raises ObjectNotFound for an upload that has ended or that another writer took over.
        """
        with self._translated(key), self._part_of(key, upload) as file:
            while len(data):
                count = os.pwrite(file, data, start)
                data, start = data[count:], start + count
            os.fdatasync(file)
        return ""

    def copy_part(
        self, key: str, upload: str, number: int, start: int, source: str, source_range: ByteRange, etag: str | None
    ) -> str:
        """Have the kernel copy bytes of another file. It shares the blocks where the file system can (a reflink)."""
        with self._translated(source):
            path = os.path.realpath(self._path(check_key(source)))
            self._check_inside(path, source)
            read = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = _info(source, os.fstat(read))
                if found.etag != etag or found.size_bytes < source_range.end:
                    raise ObjectChanged("the file was replaced meanwhile", uri=self.uri, key=source)
                with self._part_of(key, upload) as write:
                    _copy_range(read, source_range, write, start)
                    os.fdatasync(write)
            finally:
                os.close(read)
        return ""

    def take_over(self, key: str, upload: str) -> str | None:
        """Rename the hidden file while nobody writes a part of it. Its new name is the new id.

        Returns None if a part is still being written after TAKEOVER_S, or if this file system has no locks. Raises
        ObjectNotFound for an upload that has ended.
        """
        path = self._upload_path(key, upload)
        name = self._new_upload(key)
        with self._translated(key):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                ends_s = time.monotonic() + TAKEOVER_S
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError as error:
                        if error.errno != errno.EWOULDBLOCK or time.monotonic() > ends_s:
                            return None
                        time.sleep(0.05)
                    else:
                        os.rename(path, self._upload_path(key, name))
                        return name
            finally:
                os.close(file)

    def has_part(self, key: str, upload: str, start: int, data: memoryview) -> bool:
        """Return whether the hidden file, or with `upload` "" the visible one, has these bytes at that position."""
        path = self._upload_path(key, upload) if upload else self._path(check_key(key))
        buffer = memoryview(bytearray(min(len(data), COMPARED_BYTES)))
        with self._translated(key):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                while len(data):
                    count = os.preadv(file, [buffer[: len(data)]], start)
                    if not count or buffer[:count] != data[:count]:
                        return False
                    data, start = data[count:], start + count
            finally:
                os.close(file)
        return True

    def complete_parts(self, key: str, upload: str, parts: Sequence[tuple[int, str]], size_bytes: int) -> ObjectInfo:
        """Sync the file and rename it. Raises StoreError if it has another size, ObjectNotFound if it has ended."""
        temp, path = self._upload_path(key, upload), self._path(key)
        with self._translated(key):
            file = os.open(temp, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if (found := os.fstat(file).st_size) != size_bytes:
                    raise StoreError(
                        "the file has another size than its parts",
                        hint="check that every rank writes to the same file system",
                        uri=self.uri,
                        key=key,
                        expected=size_bytes,
                        found=found,
                    )
                os.fsync(file)
                os.rename(temp, path)
                info = _info(key, os.fstat(file))
            finally:
                os.close(file)
            _sync_folder(os.path.dirname(path))
        return info

    def abort_parts(self, key: str, upload: str) -> None:
        """Remove the hidden file. No error if there is none."""
        with self._translated(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._upload_path(key, upload))

    def open_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield the hidden files of keys with that prefix. Links to folders are not followed."""
        folders = [os.path.dirname(prefix)]
        while folders:
            folder = folders.pop()
            found: list[OpenUpload] = []
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._path(folder)) as entries:
                for entry in entries:
                    key = os.path.join(folder, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        if f"{key}/".startswith(prefix):
                            folders.append(key)
                    elif (name := _UPLOAD.fullmatch(entry.name)) is not None and entry.is_file(follow_symlinks=False):
                        key = os.path.join(folder, name[1])
                        if key.startswith(prefix):
                            found.append(OpenUpload(key, entry.name, entry.stat(follow_symlinks=False).st_size))
            yield from found

    def put_if(self, key: str, data: bytes, etag: str | None) -> ObjectInfo:
        """Write a file like `put`, under a lock, if the one that is there has that version. Raises ObjectChanged."""
        path = self._path(check_key(key))
        with self._translated(key):
            self._check_inside(os.path.realpath(os.path.dirname(path)), key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with self._translated(key), _locked(os.path.join(os.path.dirname(path), f"{TEMP_PREFIX}lock{PARTS_SUFFIX}")):
            try:
                found = self.stat(key).etag
            except ObjectNotFound:
                found = None
            if found != etag:
                raise ObjectChanged(
                    "the file was replaced, made or removed meanwhile",
                    uri=self.uri,
                    key=key,
                    expected=etag,
                    found=found,
                )
            return self.put(key, data)

    @contextmanager
    def _part_of(self, key: str, upload: str) -> Iterator[int]:
        """Open the hidden file to write a part. Its shared lock keeps `take_over` from renaming it meanwhile."""
        path = self._upload_path(key, upload)
        file = -1
        try:
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                with contextlib.suppress(OSError):  # without locks in this file system, nobody takes the file over
                    fcntl.flock(file, fcntl.LOCK_SH)
                os.stat(path, follow_symlinks=False)  # once more, as it may have been renamed before the lock
            except FileNotFoundError as error:
                raise ObjectNotFound(
                    "this upload has ended",
                    hint="another save to the same place continued or removed it: let one job save there at a time",
                    uri=self.uri,
                    key=key,
                ) from error
            yield file
        finally:
            if file >= 0:
                os.close(file)

    @staticmethod
    def _new_upload(key: str) -> str:
        return f"{TEMP_PREFIX}{secrets.token_hex(8)}-{os.path.basename(key)}{PARTS_SUFFIX}"

    def _upload_path(self, key: str, upload: str) -> str:
        """Return the path of the hidden file. Raises StoreError for an id that is not of an upload of that key."""
        path = self._path(check_key(key))
        name = _UPLOAD.fullmatch(upload)
        if name is None or name[1] != os.path.basename(path):
            raise StoreError("not the id of an upload of this key", uri=self.uri, key=key)
        return os.path.join(os.path.dirname(path), upload)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        # O_PATH finds the file without opening it, so a fifo or a device is refused before anything happens to it.
        found = os.open(self._path(check_key(key)), os.O_PATH | os.O_CLOEXEC)
        file = -1
        try:
            facts, itself = os.fstat(found), f"/proc/self/fd/{found}"
            self._check_inside(os.readlink(itself), key)
            if stat_bits.S_ISDIR(facts.st_mode):
                raise FileNotFoundError(errno.ENOENT, "a folder is no object")
            if not stat_bits.S_ISREG(facts.st_mode):
                raise StoreError("not a regular file", uri=self.uri, key=key)
            file = os.open(
                itself, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )  # no wait for another's lease on the file
            yield file, facts
        finally:
            os.close(found)
            if file >= 0:
                os.close(file)

    def _check_inside(self, real: str, key: str) -> None:
        """Raise StoreError unless this real path is below the root, or among the blobs of its Hugging Face cache."""
        if not _is_below(real, self._real_roots):
            self._real_roots = tuple(_allowed_roots(self._root))  # the root is a link that was changed, or was moved
            if not _is_below(real, self._real_roots):
                raise StoreError(
                    "a symbolic link leads out of the folder",
                    hint="copy the file there, or name the folder in which the files really are",
                    uri=self.uri,
                    key=key,
                )

    def _walk(self) -> Iterator[tuple[str, ObjectInfo | None]]:
        """Yield everything except folders, by its path below the root; None for what cannot be an object."""
        for folder, folders, names in os.walk(self._root, onerror=_raise):
            below = os.path.relpath(folder, self._root)
            links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
            for name in (*names, *links):
                if not is_hidden(name):
                    key = name if below == "." else f"{below}/{name}"
                    yield key, self._listed(key)

    def _listed(self, key: str) -> ObjectInfo | None:
        if key.isprintable() and "\\" not in key:
            try:
                facts = os.stat(self._path(key))
                return _info(key, facts) if stat_bits.S_ISREG(facts.st_mode) else None
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
        return None

    def _sweep(self, folder: str) -> None:
        """Remove files of killed writers in `folder`, the first time something is written there."""
        with self._lock:
            if folder in self._swept:
                return
            self._swept.add(folder)
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if is_temporary(name):
                    remove_unless_locked(os.path.join(folder, name))

    @contextmanager
    def _translated(self, key: str | None) -> Iterator[None]:
        """Turn an OSError into a StoreError that names the host, because nodes may have different files at a path."""
        try:
            yield
        except OSError as error:
            where: dict[str, Any] = {"uri": self.uri, "key": key, "host": socket.gethostname()}
            cause = errno.errorcode.get(error.errno or 0, type(error).__name__)
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                if not os.path.isdir(self._root):
                    raise ObjectNotFound(
                        "no such folder on this host",
                        hint="a local path must exist on every node: use a shared file system or object storage",
                        **where,
                    ) from error
                raise ObjectNotFound("no such file", **where) from error
            if isinstance(error, PermissionError):
                raise AccessDenied("not allowed to open this file", **where) from error
            if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR):
                raise StoreUnavailable("the file system failed", cause=cause, **where) from error
            hint = "free space there, or choose another place" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            text = f": {os.strerror(error.errno)}" if error.errno else ""
            raise StoreError(f"the file system refused{text}", hint=hint, cause=cause, **where) from error


class _LocalUpload:
    """A file that is written under a temporary name beside its final place."""

    def __init__(self, store: LocalStore, key: str, path: str) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._temp, self._file = open_locked(os.path.dirname(path))
        self._open = True

    def write(self, data: memoryview) -> None:
        self._check_open()
        with self._store._translated(self._key):
            data = data.cast("B") if data.ndim != 1 or data.format != "B" else data
            while len(data):
                data = data[os.write(self._file, data) :]

    def complete(self) -> ObjectInfo:
        self._check_open()
        with self._store._translated(self._key):
            os.fsync(self._file)
            os.rename(self._temp, self._path)
            info = _info(self._key, os.fstat(self._file))
            os.close(self._file)
            self._open = False
            _sync_folder(os.path.dirname(self._path))
        return info

    def discard(self) -> None:
        """Remove what was written, unless the upload is complete. Never raises."""
        if self._open:
            self._open = False
            os.close(self._file)
            with contextlib.suppress(OSError):
                os.unlink(self._temp)

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError("the upload is over", uri=self._store.uri, key=self._key)


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _copy_range(source: int, source_range: ByteRange, target: int, start: int) -> None:
    """Copy bytes between files in the kernel. Raises UnsupportedStore if it cannot, OSError."""
    at = source_range.start
    while at < source_range.end:
        try:
            count = os.copy_file_range(source, target, source_range.end - at, at, start + at - source_range.start)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise UnsupportedStore("this file system cannot copy ranges of files") from error
            raise
        if count == 0:
            raise ObjectChanged("a file became shorter while it was copied")
        at += count


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a lock file, which is removed at the end. Waits for other holders, of all hosts that share locks."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with contextlib.suppress(OSError):  # this file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            break
        os.close(file)  # the last holder removed it
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(file)


def _allowed_roots(root: str) -> Iterator[str]:
    """Yield the folders in which a file of `root` may really be: the root, and the blobs of its Hugging Face cache.

    In that cache `snapshots/<revision>/model.safetensors` is a link to `../../blobs/<digest>`, and most checkpoints
    on disk have that layout. Nothing else outside the root can be reached by a link.
    """
    real = os.path.realpath(root)
    yield real
    parent = os.path.dirname(real)
    while parent != os.path.dirname(parent):
        if os.path.basename(parent) == "snapshots":
            yield os.path.join(os.path.dirname(parent), "blobs")
        parent = os.path.dirname(parent)


def _is_below(real: str, roots: tuple[str, ...]) -> bool:
    return any(real == root or real.startswith(root.rstrip("/") + "/") for root in roots)


def _version(facts: os.stat_result) -> str:
    return f"{facts.st_size:x}-{facts.st_mtime_ns:x}-{facts.st_ino:x}"


def _info(key: str, facts: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, facts.st_size, _version(facts))


def _raise(error: OSError) -> None:
    raise error
