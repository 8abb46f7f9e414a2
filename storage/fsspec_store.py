"""Every other place through fsspec: gs, az, hf, http, memory and whatever else is installed.

Not the hot path of large fleets: each read is one `cat_file` and one copy into the caller's buffer. What fsspec
gives no way to say is which version a range came from. So versions are checked around the reads: a key's version
is looked up at its first pinned read, and again after any read that ends more than `recheck_s` later. What is
replaced within that time and not read again is noticed by whoever asks `stat` when the load ends; digests notice
it always. With `recheck_s=0` every read is followed by a check.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.registry import known_implementations

from storage.errors import (
    LongshoreError,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    ShortRead,
    StoreError,
    UnsupportedStore,
)
from storage.fsspec_errors import printable_cause, translated
from storage.fsspec_info import info_of, version_tag
from storage.http_limits import http_options
from storage.object_store import ObjectInfo, check_key
from storage.problems import install_hint
from storage.ranges import ByteRange
from storage.read_limit import ReadLimit, outlived
from storage.store_ref import Credentials, StoreRef

_PACKAGES = {"gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub"}  # each by the extra of its scheme
_READ_ONLY = {"http", "https"}


class FsspecStore:
    """One folder of any fsspec file system. Thread-safe as far as that file system is."""

    def __init__(
        self,
        ref: StoreRef,
        credentials: Credentials | None = None,
        *,
        read_timeout_s: float = 20.0,
        connect_timeout_s: float = 5.0,
        recheck_s: float = 5.0,
    ) -> None:
        """Raises UnsupportedStore for an unknown scheme or a package that is not installed, and says which one."""
        self.uri = ref.uri
        self._scheme = ref.scheme
        self._recheck_s = recheck_s
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[ObjectInfo, float]] = {}  # per key: its last look-up, and when
        options: dict[str, Any] = dict(credentials.fsspec_options) if credentials else {}
        if "::" in self.uri:
            raise UnsupportedStore("a URI with '::' in it", hint="chained URIs are refused", scheme=ref.scheme[:40])
        if ref.scheme not in known_implementations and ref.scheme not in fsspec.registry:
            raise UnsupportedStore(f"no store for the scheme {ref.scheme!r}", uri=self.uri)
        if ref.scheme in ("http", "https"):
            options = http_options(ref, read_timeout_s, connect_timeout_s) | options
        if ref.endpoint_url:
            options.setdefault("endpoint_url", ref.endpoint_url)
        if ref.anonymous and ref.scheme == "gs":
            options.setdefault("token", "anon")
        if ref.anonymous and ref.scheme == "az":
            options.setdefault("anon", True)
        try:
            self._fs, root = fsspec.core.url_to_fs(self.uri, skip_instance_cache=True, **options)
        except ImportError as error:
            package = _PACKAGES.get(ref.scheme)
            raise UnsupportedStore(
                f"{ref.scheme}:// needs a package that is not installed" + (f" ({package})" if package else ""),
                hint=install_hint(ref.scheme) if package else str(known_implementations[ref.scheme].get("err", "")),
                uri=self.uri,
            ) from error
        except Exception as error:  # every file system checks its options in its own way
            raise translated(error, self.uri, None) from printable_cause(error)
        self._root = root.rstrip("/")

    def stat(self, key: str) -> ObjectInfo:
        """Size, version and checksums, as far as the file system has them; asked anew each time."""
        return self._look_up(check_key(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Files in key order. Over http that takes a server that lists its folders as links."""
        with self._translated(prefix or None):
            self._forget_listings()
            found = self._fs.find(self._root, detail=True)
        infos = []
        for path, facts in found.items():
            key = self._key_of(path)
            if key is not None and key.startswith(prefix):
                # Listings often lack what single look-ups have: sizes over http, or the date in the same form.
                is_whole = facts.get("size") is not None and version_tag(facts) is not None
                infos.append(info_of(key, facts) if is_whole else self._look_up(key))
        yield from sorted(infos, key=lambda info: info.key)

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        """See ObjectStore; how versions are checked is said at the top of this file."""
        byte_range.check_buffer(buffer)
        return self.read_pieces(key, byte_range, [buffer], etag=etag)

    def read_pieces(
        self,
        key: str,
        byte_range: ByteRange,
        pieces: Iterable[memoryview],
        *,
        etag: str | None = None,
        limit: ReadLimit | None = None,
    ) -> str | None:
        """See ReadsPieces. Nobody can end a read of fsspec's: one whose time is over is left to itself, in a thread of
        its own, and what it still brings is dropped. Only the calling thread writes to `pieces`.
        """

        def read() -> tuple[bytes, str | None]:
            return self._read(key, byte_range, etag)

        data, found = read() if limit is None else outlived(read, limit, f"fsspec-{self._scheme}"[:15])
        at = 0
        for piece in pieces:
            piece[:] = data[at : at + len(piece)]
            at += len(piece)
        return found

    def _read(self, key: str, byte_range: ByteRange, etag: str | None) -> tuple[bytes, str | None]:
        """Exactly those bytes, and their version."""
        path = self._path(check_key(key))
        if not byte_range.size_bytes:
            return b"", etag
        where: dict[str, Any] = {"uri": self.uri, "key": key, "range": str(byte_range)}
        info = self._known(key, etag)
        if byte_range.end > info.size_bytes:
            raise RangeMismatch("range reaches past the object's end", size_bytes=info.size_bytes, **where)
        try:
            with self._translated(key):
                data = self._fs.cat_file(path, start=byte_range.start, end=byte_range.end)
        except RangeMismatch:
            self._refuse_other(self._look_up(key), info.etag)  # replaced by a shorter one?
            raise
        self._check_version(key, info)
        if len(data) < byte_range.size_bytes:
            raise ShortRead("the answer ended early", received_bytes=len(data), **where)
        if len(data) != byte_range.size_bytes:
            raise RangeMismatch("the answer is longer than the range", found_bytes=len(data), **where)
        return data, info.etag

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a small object whole."""
        self._check_writable(key)
        with self._translated(key):
            self._make_parent(key)
            self._fs.pipe_file(self._path(check_key(key)), data)
        return self._look_up(key)

    @contextmanager
    def upload(self, key: str) -> Iterator[_FsspecUpload]:
        """Collected in a local temporary file and sent whole on `complete`: few file systems can take back a part."""
        self._check_writable(key)
        with tempfile.NamedTemporaryFile(prefix="longshore-") as spool:
            upload = _FsspecUpload(self, check_key(key), spool)
            try:
                yield upload
            finally:
                upload.over = True

    def delete(self, key: str) -> None:
        """Remove one object; no error when it is not there."""
        self._check_writable(key)
        with contextlib.suppress(ObjectNotFound), self._translated(key):
            self._fs.rm_file(self._path(check_key(key)))

    def close(self) -> None:
        """Forget what is known of the keys. The connections belong to fsspec, which closes them with the object."""
        with self._lock:
            self._seen.clear()

    def send(self, key: str, path: str) -> ObjectInfo:
        """Store a local file under `key`: the end of an upload."""
        with self._translated(key):
            self._make_parent(key)
            self._fs.put_file(path, self._path(key))
        return self._look_up(key)

    def _path(self, key: str) -> str:
        # Over http a path is a URL, where "%", "#" and "?" of a key mean something else.
        return f"{self._root}/{quote(key) if self._scheme in _READ_ONLY else key}"

    def _key_of(self, path: str) -> str | None:
        """The key of a listed path, None for what cannot be one (folder markers, strange names)."""
        key = path.removeprefix(self._root + "/")
        if self._scheme in _READ_ONLY:
            key = unquote(key)
        try:
            return None if path == self._root or not path.startswith(self._root + "/") else check_key(key)
        except StoreError:
            return None

    def _make_parent(self, key: str) -> None:
        with contextlib.suppress(NotImplementedError):
            self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)

    def _check_writable(self, key: str) -> None:
        if self._scheme in _READ_ONLY:
            raise StoreError(f"{self._scheme} stores can only be read", uri=self.uri, key=key)

    def _forget_listings(self) -> None:
        with contextlib.suppress(NotImplementedError):
            self._fs.invalidate_cache()

    def _look_up(self, key: str) -> ObjectInfo:
        with self._translated(key):
            self._forget_listings()
            facts = self._fs.info(self._path(key))
        if facts.get("type") == "directory" or facts.get("size") is None:
            raise ObjectNotFound("no such object, or one without a known size", uri=self.uri, key=key)
        if self._scheme in _READ_ONLY and facts.get("partial") is False and facts["size"]:
            raise StoreError("this server does not serve byte ranges", uri=self.uri, key=key)
        info = info_of(key, facts)
        with self._lock:
            self._seen[key] = (info, time.monotonic())
        return info

    def _known(self, key: str, etag: str | None) -> ObjectInfo:
        """What was last seen of a key, looked up when that is nothing, or another version than the pinned one."""
        with self._lock:
            seen = self._seen.get(key)
        info = seen[0] if seen and (etag is None or seen[0].etag == etag) else self._look_up(key)
        self._refuse_other(info, etag)
        return info

    def _check_version(self, key: str, before: ObjectInfo) -> None:
        with self._lock:
            seen = self._seen.get(key)
        if seen is None or time.monotonic() - seen[1] >= self._recheck_s:
            self._refuse_other(self._look_up(key), before.etag)

    def _refuse_other(self, info: ObjectInfo, etag: str | None) -> None:
        if etag is not None and info.etag != etag:
            raise ObjectChanged(
                "object is not the pinned version", uri=self.uri, key=info.key, expected=etag, found=info.etag
            )

    @contextmanager
    def _translated(self, key: str | None) -> Iterator[None]:
        try:
            yield
        except LongshoreError:
            raise
        except Exception as error:  # each file system raises its own library's errors
            raise translated(error, self.uri, key) from printable_cause(error)


class _FsspecUpload:
    """Bytes on their way through a temporary file."""

    def __init__(self, store: FsspecStore, key: str, spool: Any) -> None:
        self._store = store
        self._key = key
        self._spool = spool
        self.over = False

    def write(self, data: memoryview) -> None:
        self._check_open()
        self._spool.write(data)

    def complete(self) -> ObjectInfo:
        self._check_open()
        self._spool.flush()
        info = self._store.send(self._key, self._spool.name)
        self.over = True
        return info

    def _check_open(self) -> None:
        if self.over:
            raise StoreError("the upload is over", uri=self._store.uri, key=self._key)
