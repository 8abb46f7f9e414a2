"""Every other store through fsspec: gs, az, hf, http, memory and any other installed file system.

fsspec's file systems report sizes, versions, checksums and errors each in its own way. This module translates them.

It is not the hot path of large fleets: each read is one `cat_file` and one copy into the caller's buffer.

Versions: fsspec cannot tell which version a range came from. So the version of a key is looked up before its first
pinned read, and again after any read that ends more than `recheck_s` later. An object that is replaced within that time
and not read again is noticed by the final `stat` of a load. Digests notice it always. With `recheck_s=0` every read is
followed by a check.

Saves (`StreamedStore`): fsspec writes an object by one stream, from its begin to its end. Stores such as Google's and
Azure's show it when the stream is closed. File systems such as HDFS show it from its begin on.

HTTP servers are not trusted. A redirect to another place and an answer larger than the request are refused:

    request --> redirect? --on_request_redirect--> same host, and not from https to http: followed; else StoreError
            --> body      --BoundedResponse.read--> at most the range's bytes (or MAX_PAGE_BYTES); else RangeMismatch

aiohttp is imported where it is needed, because few loads use plain HTTP.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote, urljoin

import fsspec
from fsspec.registry import known_implementations
from fsspec.spec import AbstractBufferedFile

from storage.errors import (
    AccessDenied,
    LongshoreError,
    ObjectChanged,
    ObjectNotFound,
    ProxyRefused,
    RangeMismatch,
    ShortRead,
    StoreError,
    StoreUnavailable,
    UnsupportedStore,
)
from storage.problems import install_hint, without_secrets
from storage.store_ref import Credentials, StoreRef, origin
from storage.stores.object_store import ByteRange, ObjectInfo, check_key
from storage.stores.parts import OpenUpload
from storage.stores.requests import (
    PASSING,
    ReadLimit,
    find_proxy,
    outlived,
    passing_refusal,
    proxy_refusal,
    tls_context,
)


def printable_cause(error: Exception) -> Exception:
    """Return a printable copy of a library's error to raise from. The original may quote a URL with a token in it."""
    return RuntimeError(f"{type(error).__name__}: {without_secrets(str(error))}").with_traceback(error.__traceback__)


def translated(error: Exception, uri: str, key: str | None) -> StoreError:
    """Return the StoreError for an error of a file system. Its text is not quoted, as URLs in it may contain tokens."""
    if isinstance(error.__cause__, StoreError):
        return error.__cause__  # raised by our own limits; a file system wrapped it in its own error
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        # fsspec's http reports every failure as "not found" and keeps the true one as the cause.
        cause = translated(error.__cause__, uri, key)
        if isinstance(cause, AccessDenied | ProxyRefused | StoreUnavailable) or "certificate" in cause.message:
            return cause
    where: dict[str, Any] = {"uri": uri, "key": key, "cause": type(error).__name__}
    status = next((s for s in (getattr(error, n, None) for n in ("status", "code", "status_code")) if s), None)
    if isinstance(status, str) and status.isdigit():
        status = int(status)
    if status == 407:
        return proxy_refusal(status, **where)
    code = str(getattr(error, "error_code", None) or "")  # set by Azure
    passing = passing_refusal(status if isinstance(status, int) else 0, code)
    if passing is not None and passing in PASSING:
        return passing(PASSING[passing], status=status, **where)
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) or status in (404, 410):
        return ObjectNotFound("no such object", **where)
    if isinstance(error, PermissionError) or status in (401, 403):
        return AccessDenied("the store refused access", hint="check the credentials for this store", **where)
    if status == 416:
        return RangeMismatch("range reaches past the object's end", **where)
    if "Certificate" in type(error).__name__:
        return StoreError("the store's certificate is not trusted", hint="set ca_bundle to your CA's PEM file", **where)
    # Connection errors are not OSErrors in aiohttp, nor in httpx, which huggingface_hub uses.
    of_client = type(error).__module__.startswith(("aiohttp", "httpx", "httpcore"))
    is_transport = isinstance(error, OSError | EOFError) or (of_client and type(error).__name__ != "HTTPStatusError")
    if is_transport or passing is not None:
        kind = passing or StoreUnavailable
        return kind("the store could not be reached or failed", status=status, **where)
    if isinstance(error, NotImplementedError):
        return StoreError("this kind of store does not support the operation", **where)
    return StoreError("the store refused the request", **where)


# The names of version fields in file systems, the strongest first. Dates are the weakest.
_VERSION_FIELDS = ("ETag", "etag", "generation", "md5", "md5Hash", "blob_id", "sha", "version", "version_id")
_DATE_FIELDS = ("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "modified", "created")


def info_of(key: str, facts: Mapping[str, Any]) -> ObjectInfo:
    """Return the ObjectInfo of `key` from an entry of `info` or of a detailed listing, which must have a size."""
    return ObjectInfo(key, int(facts["size"]), version_of(facts), checksums_of(facts))


def version_of(facts: Mapping[str, Any]) -> str | None:
    """Return the best version among the facts. A date is combined with the size, and proves less than a tag."""
    if (tag := version_tag(facts)) is not None:
        return tag
    for name in _DATE_FIELDS:
        if value := facts.get(name):
            return f"{facts['size']}-{value.isoformat() if hasattr(value, 'isoformat') else value}"
    return None


def version_tag(facts: Mapping[str, Any]) -> str | None:
    """Return a version that is not a date; None if the file system gives none."""
    for name in _VERSION_FIELDS:
        if isinstance(value := facts.get(name), str | int) and value != "":
            return str(value).strip().removeprefix("W/").strip('"')
    return None


def checksums_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return whole-object checksums in hex: Google's md5Hash and crc32c, and the sha256 of Hugging Face's LFS."""
    found: dict[str, str] = {}
    for field, name in (("md5Hash", "md5"), ("crc32c", "crc32c")):
        if isinstance(value := facts.get(field), str):
            with contextlib.suppress(binascii.Error, ValueError):
                found[name] = base64.b64decode(value, validate=True).hex()
    lfs = facts.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else None
    if isinstance(sha256, str) and len(sha256) == 64:
        found["sha256"] = sha256
    return found


MAX_PAGE_BYTES = 64 << 20  # limit of an answer without a range, such as a folder's page of links
MAX_ERROR_BYTES = 64 << 10  # limit of the body of a refusal
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")


def stays_at_home(asked_url: str, target_url: str) -> bool:
    """True if a redirect stays on the same host: same port, or from port 80 to https. Never from https to http."""
    try:
        old, new = origin(asked_url), origin(target_url)
    except ValueError:
        return False
    return new == old or (old.endswith(":80") and new == f"https{old[4:-3]}:443")


def most_bytes(range_header: str | None) -> int:
    """Return the maximum size of a good answer to a request with that Range header."""
    match = _RANGE.fullmatch(range_header or "")
    return int(match[2]) - int(match[1]) + 1 if match else MAX_PAGE_BYTES


def bounded_session_options() -> dict[str, Any]:
    """Return the arguments of `aiohttp.ClientSession` that enforce these limits. Raises ImportError."""
    import aiohttp

    class BoundedResponse(aiohttp.ClientResponse):
        """An answer that reads no more than was requested, whatever length the server promises or sends."""

        async def read(self) -> bytes:
            if self._body is None:
                refused = self.status >= 400
                most = MAX_ERROR_BYTES if refused else most_bytes(self.request_info.headers.get("Range"))
                pieces: list[bytes] = []
                received_bytes = 0
                async for piece in self.content.iter_chunked(1 << 20):
                    received_bytes += len(piece)
                    if received_bytes > most:
                        self.close()
                        if refused:  # the status is enough for the error
                            break
                        raise RangeMismatch("the answer is longer than what was asked for", at_most_bytes=most)
                    pieces.append(piece)
                self._body = b"".join(pieces)
            return await super().read()

    async def refuse_others(session: Any, context: Any, params: Any) -> None:
        target = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
        if not stays_at_home(str(params.response.url), urljoin(str(params.response.url), target)):
            raise StoreError("the server redirects requests to another place", hint="use the URI of that place")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse_others)
    # No compressed answer was requested, and a small one could expand to any size.
    return {"response_class": BoundedResponse, "trace_configs": [trace], "auto_decompress": False}


def http_options(ref: StoreRef, read_timeout_s: float, connect_timeout_s: float) -> dict[str, Any]:
    """Return the options of fsspec's HTTP file system that enforce these limits and timeouts."""
    try:
        import aiohttp
    except ImportError:
        return {}  # url_to_fs reports the missing package
    timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, sock_read=read_timeout_s)
    # A compressed answer would have other bytes and another length than the object.
    options: dict[str, Any] = {
        "client_kwargs": {"timeout": timeout, **bounded_session_options()},
        "headers": {"Accept-Encoding": "identity"},
        "encoded": True,  # `_path` has percent-encoded the key
    }
    if (proxy := find_proxy(ref.uri)) is not None:
        options["client_kwargs"]["proxy"] = proxy.secret_url()
    if ref.ca_bundle:
        options["ssl"] = tls_context(ref.ca_bundle, ref.uri)
    return options


_PACKAGES = {"gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub"}  # the package for each scheme
_READ_ONLY = {"http", "https"}


class FsspecStore:
    """One folder of any fsspec file system. As thread-safe as that file system."""

    def __init__(
        self,
        ref: StoreRef,
        credentials: Credentials | None = None,
        *,
        read_timeout_s: float = 20.0,
        connect_timeout_s: float = 5.0,
        recheck_s: float = 5.0,
    ) -> None:
        """Open the file system. Raises UnsupportedStore, naming the unknown scheme or the missing package."""
        self.uri = ref.uri
        self._scheme = ref.scheme
        self._recheck_s = recheck_s
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[ObjectInfo, float]] = {}  # per key: the last look-up and its time
        options: dict[str, Any] = dict(credentials.fsspec_options) if credentials else {}
        if "::" in self.uri:
            raise UnsupportedStore(
                "chained URIs (with '::') are not supported",
                hint="name the place of the files with one plain URI",
                scheme=ref.scheme[:40],
            )
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
        """Return size, version and checksums as far as the file system has them. Sends a request each time."""
        return self._look_up(check_key(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the files in key order. Over http this needs a server that lists its folders as links."""
        with self._translated(prefix or None):
            self._forget_listings()
            found = self._fs.find(self._root, detail=True)
        infos = []
        for path, facts in found.items():
            key = self._key_of(path)
            if key is not None and key.startswith(prefix):
                # Listings often lack what single look-ups have: the size over http, or the same form of a date.
                is_whole = facts.get("size") is not None and version_tag(facts) is not None
                infos.append(info_of(key, facts) if is_whole else self._look_up(key))
        yield from sorted(infos, key=lambda info: info.key)

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        """Read like ObjectStore.read_into. The module's docstring explains how versions are checked."""
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
        """Read like ReadsPieces.read_pieces. A read of fsspec cannot be ended, so it runs in a thread of its own.

        When the time is over, the thread is abandoned and its bytes are dropped. Only the calling thread writes to
        `pieces`.
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
        """Return exactly those bytes, and their version."""
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
            self._refuse_other(self._look_up(key), info.etag)  # a shorter version may have replaced the object
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
        """Collect the bytes in a local temporary file and send it on `complete`. Few file systems can undo a part."""
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
        """Forget the versions of keys. The connections belong to fsspec, which closes them with the file system."""
        with self._lock:
            self._seen.clear()

    def send(self, key: str, path: str) -> ObjectInfo:
        """Store a local file under `key`, which ends an upload."""
        with self._translated(key):
            self._make_parent(key)
            self._fs.put_file(path, self._path(key))
        return self._look_up(key)

    def _path(self, key: str) -> str:
        # Over http a path is a URL, where "%", "#" and "?" have another meaning than in a key.
        return f"{self._root}/{quote(key) if self._scheme in _READ_ONLY else key}"

    def _key_of(self, path: str) -> str | None:
        """Return the key of a listed path; None for folder markers and for names that are not valid keys."""
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
        """Return the last info of a key. Look it up when there is none or it has another version than `etag`."""
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


class StreamedStore(FsspecStore):
    """A folder of a file system that writes each object by one stream: `WritesParts`, in order."""

    in_order = True

    def __init__(self, ref: StoreRef, credentials: Credentials | None = None, **options: float) -> None:
        """Open the file system, as `FsspecStore` does."""
        super().__init__(ref, credentials, **options)
        self._streams: dict[str, tuple[Any, int]] = {}  # by key: the open file, and the bytes that it has

    def begin_parts(self, key: str) -> str:
        """Return the id of an upload. The object is opened with its first part, in the process that writes it."""
        check_key(key)
        return "stream"

    def put_part(self, key: str, upload: str, number: int, start: int, data: memoryview) -> str:
        """Write the next part. The part at byte 0 begins the object, also anew. The tag is empty.

        Raises StoreError, which no retry can help, if the stream fails after its first part.
        """
        with self._lock:
            file, written_bytes = self._streams.pop(key, (None, 0))
        if start == 0:
            _discard(file)
            with self._translated(key):
                self._make_parent(key)
                file = self._fs.open(self._path(check_key(key)), "wb")
        elif file is None or written_bytes != start:
            _discard(file)
            raise StoreError("one process writes the parts of an object, in order", uri=self.uri, key=key, start=start)
        try:
            with self._translated(key):
                file.write(data)
        except BaseException as error:
            _discard(file)
            if start and isinstance(error, StoreError):
                raise self._broken(key, error) from error
            raise
        with self._lock:
            self._streams[key] = (file, start + len(data))
        return ""

    def complete_parts(self, key: str, upload: str, parts: Sequence[tuple[int, str]], size_bytes: int) -> ObjectInfo:
        """End the stream, if this process has it, and compare the object's size, and its version with the last tag.

        Raises StoreError if it has another size, ObjectChanged if it has another version.
        """
        with self._lock:
            file, _ = self._streams.pop(key, (None, 0))
        if file is not None:
            try:
                with self._translated(key):
                    file.close()
            except BaseException as error:
                _discard(file)
                if isinstance(error, StoreError):
                    raise self._broken(key, error) from error
                raise
        info = self._look_up(key)
        if info.size_bytes != size_bytes:
            raise StoreError(
                "the object has another size than its parts",
                hint="save again",
                uri=self.uri,
                key=key,
                expected=size_bytes,
                found=info.size_bytes,
            )
        self._refuse_other(info, (parts[-1][1] if parts else "") or None)
        return info

    def _broken(self, key: str, error: StoreError) -> StoreError:
        """Return an error that no retry follows: what the stream had is lost."""
        return StoreError(
            f"the stream of an object broke: {error.message}",
            hint="save again: objects that are complete are not sent again",
            uri=self.uri,
            key=key,
        )

    def abort_parts(self, key: str, upload: str) -> None:
        """Drop the stream, if this process has it. An object that is complete, or visible in part, stays."""
        with self._lock:
            file, _ = self._streams.pop(key, (None, 0))
        _discard(file)

    def open_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield nothing: file systems do not list open streams."""
        yield from ()

    def put_if(self, key: str, data: bytes, etag: str | None) -> ObjectInfo:
        """Write a small object if the stored one has that version, or if there is none and `etag` is None.

        Only the creation of an object is a condition that the store itself may check. Otherwise two writers at one
        moment are not noticed, and with a store that names no versions an object is replaced without a condition.
        """
        try:
            found: ObjectInfo | None = self._look_up(key)
        except ObjectNotFound:
            found = None
        changed = ObjectChanged("the object was replaced, made or removed meanwhile", uri=self.uri, key=key)
        if (found.etag if found else None) != etag:
            raise changed
        if found is not None:
            return self.put(key, data)
        with self._translated(key):
            self._make_parent(key)
            try:
                self._fs.pipe_file(self._path(key), data, mode="create")
            except FileExistsError as error:
                raise changed from printable_cause(error)
            except TypeError:  # this file system cannot say so
                self._fs.pipe_file(self._path(key), data)
        return self._look_up(key)

    def close(self) -> None:
        """Drop the streams that were not ended, and forget the versions of keys."""
        with self._lock:
            files = [file for file, _ in self._streams.values()]
            self._streams.clear()
        for file in files:
            _discard(file)
        super().close()


def _discard(file: Any) -> None:
    """Drop a stream without an end, as far as its file system can. Never raises."""
    if file is None:
        return
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # or its end would publish what it has
        else:
            file.close()


class _FsspecUpload:
    """An upload that collects its bytes in a temporary file."""

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
