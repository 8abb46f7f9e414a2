"""Every other store through fsspec: gs, az, hf, http, memory and whatever else is installed.

fsspec's file systems report sizes, versions, checksums and errors each in its own way. This module translates them.
It also bounds what an HTTP server can make the client do.

Not the hot path of large fleets: each read is one `cat_file` and one copy into the caller's buffer. What fsspec
gives no way to say is which version a range came from. So versions are checked around the reads: a key's version
is looked up at its first pinned read, and again after any read that ends more than `recheck_s` later. What is
replaced within that time and not read again is noticed by whoever asks `stat` when the load ends; digests notice
it always. With `recheck_s=0` every read is followed by a check.

What an HTTP server may make us do: no redirect to another place, no answer larger than what was asked for.

    ask --> redirect? --on_request_redirect--> same host, and not from https to http: followed; else StoreError
        --> body      --BoundedResponse.read--> the range's bytes at most (MAX_PAGE_BYTES without one); or RangeMismatch

aiohttp is imported where it is needed: few loads come over plain HTTP.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote, urljoin

import fsspec
from fsspec.registry import known_implementations

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
    Throttled,
    UnsupportedStore,
)
from storage.problems import install_hint, without_secrets
from storage.store_ref import Credentials, StoreRef, origin
from storage.stores.connections import find_proxy, proxy_refusal, tls_context
from storage.stores.object_store import ByteRange, ObjectInfo, check_key
from storage.stores.requests import ReadLimit, outlived, passing_refusal


def printable_cause(error: Exception) -> Exception:
    """Return what an error of ours is raised from: a library's error may quote a URL with a token in it."""
    return RuntimeError(f"{type(error).__name__}: {without_secrets(str(error))}").with_traceback(error.__traceback__)


def translated(error: Exception, uri: str, key: str | None) -> StoreError:
    """Our error for whatever a file system raised. Its text is not quoted: URLs in it may carry tokens."""
    if isinstance(error.__cause__, StoreError):
        return error.__cause__  # of the limits that we set, with a file system's own error round it
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        # fsspec's http says "not found" of every failure and keeps the true one as the cause.
        cause = translated(error.__cause__, uri, key)
        if isinstance(cause, AccessDenied | ProxyRefused | StoreUnavailable) or "certificate" in cause.message:
            return cause
    where: dict[str, Any] = {"uri": uri, "key": key, "cause": type(error).__name__}
    status = next((s for s in (getattr(error, n, None) for n in ("status", "code", "status_code")) if s), None)
    if isinstance(status, str) and status.isdigit():
        status = int(status)
    if status == 407:
        return proxy_refusal(status, **where)
    code = str(getattr(error, "error_code", None) or "")  # Azure's
    passing = passing_refusal(status if isinstance(status, int) else 0, code)
    if passing is Throttled:
        return Throttled("the store asks for fewer requests", status=status, **where)
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) or status in (404, 410):
        return ObjectNotFound("no such object", **where)
    if isinstance(error, PermissionError) or status in (401, 403):
        return AccessDenied("the store refused access", hint="check the credentials for this store", **where)
    if status == 416:
        return RangeMismatch("range reaches past the object's end", **where)
    if "Certificate" in type(error).__name__:
        return StoreError("the store's certificate is not trusted", hint="name your CA's PEM file", **where)
    # Errors of connections are no OSErrors in aiohttp and in httpx, with which huggingface_hub asks.
    of_client = type(error).__module__.startswith(("aiohttp", "httpx", "httpcore"))
    is_transport = isinstance(error, OSError | EOFError) or (of_client and type(error).__name__ != "HTTPStatusError")
    if is_transport or passing is not None:
        return StoreUnavailable("the store could not be reached or failed", status=status, **where)
    if isinstance(error, NotImplementedError):
        return StoreError("this kind of store cannot do that", **where)
    return StoreError("the store refused the request", **where)


# What file systems call a version, the strongest first; the last ones are dates.
_VERSION_FIELDS = ("ETag", "etag", "generation", "md5", "md5Hash", "blob_id", "sha", "version", "version_id")
_DATE_FIELDS = ("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "modified", "created")


def info_of(key: str, facts: Mapping[str, Any]) -> ObjectInfo:
    """`facts`: an entry of `info` or of a detailed listing, with its size."""
    return ObjectInfo(key, int(facts["size"]), version_of(facts), checksums_of(facts))


def version_of(facts: Mapping[str, Any]) -> str | None:
    """The best version among what `info` said. A date is taken with the size, and proves less than a tag."""
    if (tag := version_tag(facts)) is not None:
        return tag
    for name in _DATE_FIELDS:
        if value := facts.get(name):
            return f"{facts['size']}-{value.isoformat() if hasattr(value, 'isoformat') else value}"
    return None


def version_tag(facts: Mapping[str, Any]) -> str | None:
    """A version that is no date; None when the file system gives none."""
    for name in _VERSION_FIELDS:
        if isinstance(value := facts.get(name), str | int) and value != "":
            return str(value).strip().removeprefix("W/").strip('"')
    return None


def checksums_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Whole-object checksums in hex: Google's md5Hash and crc32c, the sha256 that Hugging Face's LFS has."""
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


MAX_PAGE_BYTES = 64 << 20  # of an answer to a request without a range: a folder's page of links
MAX_ERROR_BYTES = 64 << 10  # of a refusal's body
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")


def stays_at_home(asked_url: str, target_url: str) -> bool:
    """Whether a redirect leads to the same host: same port, or from http's to https's. Never from https to http."""
    try:
        old, new = origin(asked_url), origin(target_url)
    except ValueError:
        return False
    return new == old or (old.endswith(":80") and new == f"https{old[4:-3]}:443")


def most_bytes(range_header: str | None) -> int:
    """How much a good answer to a request with that Range header may have."""
    match = _RANGE.fullmatch(range_header or "")
    return int(match[2]) - int(match[1]) + 1 if match else MAX_PAGE_BYTES


def bounded_session_options() -> dict[str, Any]:
    """What `aiohttp.ClientSession` takes to keep these rules. Raises ImportError."""
    import aiohttp

    class BoundedResponse(aiohttp.ClientResponse):
        """Reads no more than was asked for, whatever length the server promises or sends."""

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
                        if refused:  # the status says enough
                            break
                        raise RangeMismatch("the answer is longer than what was asked for", at_most_bytes=most)
                    pieces.append(piece)
                self._body = b"".join(pieces)
            return await super().read()

    async def refuse_others(session: Any, context: Any, params: Any) -> None:
        target = params.response.headers.get("Location") or params.response.headers.get("URI") or ""
        if not stays_at_home(str(params.response.url), urljoin(str(params.response.url), target)):
            raise StoreError("the store sends requests elsewhere", hint="use the URI of the place it sends them to")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse_others)
    # Nobody asked for compressed bytes, and a few of them can stand for any number.
    return {"response_class": BoundedResponse, "trace_configs": [trace], "auto_decompress": False}


def http_options(ref: StoreRef, read_timeout_s: float, connect_timeout_s: float) -> dict[str, Any]:
    """What fsspec's HTTP file system takes to keep these rules and times."""
    try:
        import aiohttp
    except ImportError:
        return {}  # url_to_fs says what is missing
    timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, sock_read=read_timeout_s)
    # Compressed answers have other bytes and lengths than the object.
    options: dict[str, Any] = {
        "client_kwargs": {"timeout": timeout, **bounded_session_options()},
        "headers": {"Accept-Encoding": "identity"},
        "encoded": True,  # by _path
    }
    if (proxy := find_proxy(ref.uri)) is not None:
        options["client_kwargs"]["proxy"] = proxy.secret_url()
    if ref.ca_bundle:
        options["ssl"] = tls_context(ref.ca_bundle, ref.uri)
    return options


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
