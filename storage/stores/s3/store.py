"""S3 and compatible servers: botocore for everything except reads, `storage.stores.s3.wire` for reads.

    stat, list, put, upload, delete    botocore client: credential chain, pagination, checksums, multipart with abort
    read_into                          headers signed with botocore's SigV4 --> WireClient --> the caller's buffer

botocore decides once where requests go (`signing.Route`): region, endpoint, path or virtual style. Reads are not
retried here, because the layer above knows better when to. The other calls have botocore's three attempts.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from storage.errors import (
    AccessDenied,
    CredentialsExpired,
    ObjectChanged,
    ObjectNotFound,
    RangeMismatch,
    StoreError,
    StoreUnavailable,
    UnsupportedStore,
)
from storage.store_ref import Credentials, StoreRef
from storage.stores.object_store import ByteRange, ObjectInfo, check_key, cut
from storage.stores.parts import MAX_PARTS, OpenUpload, StoredPart
from storage.stores.requests import ReadLimit, find_proxy
from storage.stores.s3.answers import (
    asking,
    checksums_of_head,
    composites_of_head,
    md5_header,
    normal_etag,
    object_info,
    store_error,
)
from storage.stores.s3.session import S3Session, S3Sessions
from storage.stores.s3.signing import Route, find_route, sign_get
from storage.stores.s3.wire import Endpoint, WireClient

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef


class S3Upload:
    """An upload made by `S3Store.upload`. One thread at a time."""

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        full_key: str,
        key: str,
        uri: str,
        part_bytes: int,
        stat: Callable[[str], ObjectInfo],
    ) -> None:
        self._client = client
        self._bucket = bucket
        self._full_key = full_key
        self._key = key
        self._uri = uri
        self._part_bytes = part_bytes
        self._stat = stat
        self._pending = bytearray()  # never longer than one part
        self._parts: list[CompletedPartTypeDef] = []
        self._upload_id: str | None = None
        self._size_bytes = 0
        self._over = False

    def write(self, data: memoryview) -> None:
        """Add bytes. Every full part is sent at once. Raises AccessDenied, StoreUnavailable and other StoreErrors."""
        if self._over:
            raise StoreError("the upload is over", uri=self._uri, key=self._key)
        data = data.cast("B") if data.ndim != 1 or data.format != "B" else data
        self._size_bytes += len(data)
        while len(data):
            taken = data[: self._part_bytes - len(self._pending)]
            # A full part is sent only when more bytes follow, so that an object of exactly one part is one PUT.
            if not len(taken):
                self._send_part()
                continue
            self._pending += taken
            data = data[len(taken) :]

    def complete(self) -> ObjectInfo:
        """Make the object visible. Raises the errors of `write`; then nothing is visible."""
        if self._over:
            raise StoreError("the upload is over", uri=self._uri, key=self._key)
        with asking(uri=self._uri, key=self._key):
            etag = None
            if self._upload_id is None:
                body = bytes(self._pending)
                put = self._client.put_object(
                    Bucket=self._bucket, Key=self._full_key, Body=body, ContentMD5=md5_header(body)
                )
                etag = put.get("ETag")
            else:
                if self._pending:
                    self._send_part()
                self._client.complete_multipart_upload(
                    Bucket=self._bucket,
                    Key=self._full_key,
                    UploadId=self._upload_id,
                    MultipartUpload={"Parts": self._parts},
                )
        self._over = True
        if self._upload_id is None:
            return object_info(self._key, self._size_bytes, etag)
        info = self._stat(self._key)  # some servers return another ETag here than they serve later
        if info.size_bytes != self._size_bytes:
            raise StoreError(
                "the stored object has another size than what was sent",
                uri=self._uri,
                key=self._key,
                expected=self._size_bytes,
                found=info.size_bytes,
            )
        return info

    def abort(self) -> None:
        """Remove what was sent, unless the upload is complete. Never raises: the reason for aborting matters more."""
        if self._over:
            return
        self._over = True
        self._pending = bytearray()
        if self._upload_id is not None:
            with contextlib.suppress(StoreError), asking(uri=self._uri, key=self._key):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._full_key, UploadId=self._upload_id)

    def _send_part(self) -> None:
        number = len(self._parts) + 1
        if number > MAX_PARTS:
            raise StoreError("the object has too many parts for S3", uri=self._uri, key=self._key)
        with asking(uri=self._uri, key=self._key):
            if self._upload_id is None:
                begun = self._client.create_multipart_upload(Bucket=self._bucket, Key=self._full_key)
                self._upload_id = begun["UploadId"]
            body = bytes(self._pending)
            answer = self._client.upload_part(
                Bucket=self._bucket,
                Key=self._full_key,
                UploadId=self._upload_id,
                PartNumber=number,
                Body=body,
                ContentMD5=md5_header(body),
            )
            self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._pending.clear()


def part_ends(client: S3Client, bucket: str, key: str, etag: str | None) -> tuple[int, ...]:
    """Return the end offsets of the parts; () for an object of another version, or if the server does not report them.

    Sends one request per thousand parts. Raises botocore's errors.
    """
    asked: dict[str, Any] = {"Bucket": bucket, "Key": key, "ObjectAttributes": ["ETag", "ObjectParts", "ObjectSize"]}
    sizes_bytes: list[int] = []
    while True:
        answer: Any = client.get_object_attributes(**asked)
        parts = answer.get("ObjectParts", {})
        page = [part.get("Size", 0) for part in parts.get("Parts", [])]
        sizes_bytes += page
        if normal_etag(answer.get("ETag")) != etag or len(sizes_bytes) > MAX_PARTS:
            return ()
        if not (page and parts.get("IsTruncated")):
            return ends_of_parts(sizes_bytes, answer.get("ObjectSize", 0))
        asked["PartNumberMarker"] = parts.get("NextPartNumberMarker", 0)


def ends_of_parts(sizes_bytes: Iterable[int], object_bytes: int) -> tuple[int, ...]:
    """Return the end offsets of parts with these sizes; () if their sum is not the size of the object."""
    ends = tuple(accumulate(sizes_bytes))
    rising = all(one < other for one, other in pairwise((0, *ends)))
    return ends if rising and ends and ends[-1] == object_bytes else ()


_PART_BYTES = 32 << 20  # of a multipart upload; 10,000 parts are 312 GiB
_MAX_LIST_PAGE = 1000
MAX_LISTED_KEYS = 1_000_000  # below one root; a model has about a thousand
MAX_EMPTY_PAGES = 1000
MAX_LISTING_S = 600.0  # time spent waiting for all pages of one listing


class S3Store:
    """One prefix of one bucket. Thread-safe."""

    in_order = False

    def __init__(
        self,
        ref: StoreRef,
        credentials: Credentials | None = None,
        *,
        read_timeout_s: float = 20.0,
        connect_timeout_s: float = 5.0,
        page_size: int = _MAX_LIST_PAGE,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        """Set up the store without sending a request. Default credentials: the AWS credential chain of this process.

        Raises AccessDenied for a profile that is not configured here, StoreError for a CA bundle that cannot be read.
        """
        self.uri = ref.uri
        self._ref = ref
        self._page_size = page_size
        self._part_bytes = part_bytes
        self._read_timeout_s = read_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._prefix = f"{ref.prefix}/" if ref.prefix else ""
        self._lock = threading.Lock()
        self._wire: WireClient | None = None
        self._route: Route | None = None
        self._sessions = S3Sessions(ref, credentials, read_timeout_s, connect_timeout_s)

    @property
    def _client(self) -> S3Client:
        return self._sessions.now.client

    def stat(self, key: str) -> ObjectInfo:
        """Return size, ETag and the server's checksums of the whole object. One request if the object exists."""
        try:
            with self._asking(key):
                head = self._client.head_object(
                    Bucket=self._ref.bucket, Key=self._full_key(key), ChecksumMode="ENABLED"
                )
                checksums, composites = checksums_of_head(head), composites_of_head(head)
                return object_info(key, head["ContentLength"], head.get("ETag"), checksums, composites)
        except ObjectNotFound as error:
            raise self._which_is_missing(error) from error
        except AccessDenied as error:
            # The answer to a HEAD has no body and so no error code. The answer to a read has one.
            if error.details.get("code") is None and not isinstance(error, CredentialsExpired):
                with contextlib.suppress(RangeMismatch):
                    self.read_into(key, ByteRange(0, 1), memoryview(bytearray(1)))
            raise

    def part_ends(self, key: str, etag: str | None) -> tuple[int, ...]:
        """Return the end offsets of the parts, as KeepsParts; () for another version. One request per 1000 parts."""
        with self._asking(key):
            return part_ends(self._client, self._ref.bucket, self._full_key(key), etag)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in key order, except those that `check_key` refuses (folder markers, "..")."""
        return (info for info in self._listed(prefix) if _is_safe(info.key))

    def left_out(self) -> Iterator[str]:
        """Yield the keys that `list` leaves out, except the empty objects that represent folders."""
        keys = (info.key for info in self._listed(""))
        return (key for key in keys if key and not key.endswith("/") and not _is_safe(key))

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key begins with `prefix`. Raises StoreError for a listing that does not end."""
        asked_s, pages, keys = 0.0, 0, 0
        with self._asking(prefix or None):
            answers = iter(
                self._client.get_paginator("list_objects_v2").paginate(
                    Bucket=self._ref.bucket,
                    Prefix=self._prefix + prefix,
                    PaginationConfig={"PageSize": self._page_size},
                )
            )
            while True:
                since_s = time.monotonic()
                page: Any = next(answers, None)
                asked_s += time.monotonic() - since_s
                if page is None:
                    return
                pages, found = pages + 1, page.get("Contents", [])
                keys += len(found)
                # Pages of deleted objects in a bucket with versions are empty, but not all pages can be.
                if keys > MAX_LISTED_KEYS or pages > MAX_EMPTY_PAGES + keys or asked_s > MAX_LISTING_S:
                    raise StoreError(
                        "the store's listing does not end",
                        hint="use the prefix of one model as the URI, not that of a whole bucket",
                        uri=self.uri,
                        keys=keys,
                        pages=pages,
                    )
                for entry in found:
                    yield object_info(entry["Key"].removeprefix(self._prefix), entry["Size"], entry.get("ETag"))

    def read_into(self, key: str, byte_range: ByteRange, buffer: memoryview, *, etag: str | None = None) -> str | None:
        """Read like ObjectStore.read_into, with one GET. Retried only if the server had closed an idle connection."""
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
        """Read like ReadsPieces.read_pieces, with the retries of `read_into`."""
        full_key = self._full_key(key)
        if not byte_range.size_bytes:
            return etag
        wire, route = self._open_wire()
        session = self._sessions.now
        with self._asking(key):
            headers = {"Range": byte_range.http_header()}
            if etag is not None:
                headers["If-Match"] = f'"{etag}"'
            path, signed = sign_get(route, session.credentials, full_key, headers, session.clock_offset_s)
        try:
            with self._renewing(session):
                return wire.read_range(path, signed, byte_range, pieces, key=key, etag=etag, limit=limit)
        except RangeMismatch as error:
            # A server that ignores If-Match answers "past the end" if a shorter object has replaced this one.
            if error.details.get("status") == 416 and etag is not None:
                found = self.stat(key).etag
                if found != etag:
                    raise ObjectChanged(
                        "object is not the pinned version", uri=self.uri, key=key, expected=etag, found=found
                    ) from error
            raise

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Write a small object with one PUT. The server checks the MD5 sent with it."""
        with self._asking(key):
            answer = self._client.put_object(
                Bucket=self._ref.bucket, Key=self._full_key(key), Body=data, ContentMD5=md5_header(data)
            )
            return object_info(key, len(data), answer.get("ETag"))

    @contextlib.contextmanager
    def upload(self, key: str) -> Iterator[S3Upload]:
        """Start a multipart upload, which is aborted unless it is completed. A small object becomes one PUT."""
        upload = S3Upload(
            self._client, self._ref.bucket, self._full_key(key), key, self.uri, self._part_bytes, self.stat
        )
        try:
            yield upload
        finally:
            upload.abort()

    def delete(self, key: str) -> None:
        """Remove one object with one DELETE. In a bucket with versioning this hides it and keeps its bytes."""
        try:
            with self._asking(key):
                self._client.delete_object(Bucket=self._ref.bucket, Key=self._full_key(key))
        except ObjectNotFound as error:
            if error.details.get("code") != "NoSuchKey":  # S3 never answers this to a DELETE, but other servers do
                raise

    def begin_parts(self, key: str) -> str:
        """Start a multipart upload and return its id."""
        with self._asking(key):
            return self._client.create_multipart_upload(Bucket=self._ref.bucket, Key=self._full_key(key))["UploadId"]

    def put_part(self, key: str, upload: str, number: int, start: int, data: memoryview) -> str:
        """Send a part and return its ETag. The server checks the MD5 sent with it."""
        with self._asking(key):
            answer = self._client.upload_part(
                Bucket=self._ref.bucket,
                Key=self._full_key(key),
                UploadId=upload,
                PartNumber=number,
                Body=io.BufferedReader(_View(data), buffer_size=1 << 20),
                ContentLength=len(data),
                ContentMD5=md5_header(data),
            )
            return normal_etag(answer.get("ETag")) or ""

    def copy_part(
        self, key: str, upload: str, number: int, start: int, source: str, source_range: ByteRange, etag: str | None
    ) -> str:
        """Have the server copy bytes of another object into a part, with UploadPartCopy."""
        condition: dict[str, Any] = {} if etag is None else {"CopySourceIfMatch": f'"{etag}"'}
        try:
            with self._asking(source):
                answer = self._client.upload_part_copy(
                    Bucket=self._ref.bucket,
                    Key=self._full_key(key),
                    UploadId=upload,
                    PartNumber=number,
                    CopySource={"Bucket": self._ref.bucket, "Key": self._full_key(source)},
                    CopySourceRange=source_range.http_header(),
                    **condition,
                )
        except StoreError as error:
            if error.details.get("status") in (405, 501):
                raise UnsupportedStore("this server cannot copy parts", uri=self.uri, key=key) from error
            raise
        tag = normal_etag(answer.get("CopyPartResult", {}).get("ETag"))
        if not tag:  # a server that does not know the request takes it for an empty part
            raise UnsupportedStore("this server cannot copy parts", uri=self.uri, key=key)
        return tag

    def stored_parts(self, key: str, upload: str) -> Mapping[int, StoredPart]:
        """Return the parts of an upload. Raises ObjectNotFound if it is complete or was aborted."""
        found: dict[int, StoredPart] = {}
        with self._asking(key):
            asked: dict[str, Any] = {"Bucket": self._ref.bucket, "Key": self._full_key(key), "UploadId": upload}
            while True:
                page: Any = self._client.list_parts(**asked)
                for part in page.get("Parts", []):
                    tag = normal_etag(part.get("ETag")) or ""
                    found[part["PartNumber"]] = StoredPart(part["PartNumber"], part["Size"], tag)
                if not page.get("IsTruncated") or not page.get("Parts") or len(found) > MAX_PARTS:
                    return found
                asked["PartNumberMarker"] = page["Parts"][-1]["PartNumber"]

    def complete_parts(self, key: str, upload: str, parts: Sequence[tuple[int, str]], size_bytes: int) -> ObjectInfo:
        """Make the object visible. Raises ObjectNotFound if the upload has ended and the object is not there."""
        numbered: list[CompletedPartTypeDef] = [{"PartNumber": number, "ETag": f'"{tag}"'} for number, tag in parts]
        try:
            with self._asking(key):
                self._client.complete_multipart_upload(
                    Bucket=self._ref.bucket,
                    Key=self._full_key(key),
                    UploadId=upload,
                    MultipartUpload={"Parts": numbered},
                )
        except ObjectNotFound:
            pass  # an earlier try succeeded and its answer was lost, or the upload was aborted: `stat` tells
        info = self.stat(key)
        if info.size_bytes != size_bytes:
            raise StoreError(
                "the stored object has another size than its parts",
                uri=self.uri,
                key=key,
                expected=size_bytes,
                found=info.size_bytes,
            )
        return info

    def abort_parts(self, key: str, upload: str) -> None:
        """Abort a multipart upload. No error if it is over."""
        with contextlib.suppress(ObjectNotFound), self._asking(key):
            self._client.abort_multipart_upload(Bucket=self._ref.bucket, Key=self._full_key(key), UploadId=upload)

    def open_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Yield the multipart uploads of keys with that prefix. Their sizes are not known without further requests."""
        try:
            with self._asking(prefix or None):
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self._ref.bucket, Prefix=self._prefix + prefix
                )
                for number, page in enumerate(pages):
                    for entry in page.get("Uploads", []):
                        if _is_safe(key := entry["Key"].removeprefix(self._prefix)):
                            yield OpenUpload(key, entry["UploadId"], 0)
                    if number >= MAX_EMPTY_PAGES:
                        raise StoreError("the store's listing of uploads does not end", uri=self.uri)
        except ObjectNotFound as error:
            if error.details.get("code") != "NoSuchUpload":  # which rclone answers for a bucket that never had one
                raise

    def put_if(self, key: str, data: bytes, etag: str | None) -> ObjectInfo:
        """Write a small object with a conditional PUT. Raises ObjectChanged if the condition does not hold.

        The version is looked up first, for servers that ignore the condition. Those that refuse it are asked without.
        """
        try:
            found = self.stat(key).etag
        except ObjectNotFound:
            found = None
        if found != etag:
            raise ObjectChanged(
                "the object was replaced, made or removed meanwhile", uri=self.uri, key=key, expected=etag, found=found
            )
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": f'"{etag}"'}
        try:
            with self._asking(key):
                answer = self._client.put_object(
                    Bucket=self._ref.bucket,
                    Key=self._full_key(key),
                    Body=data,
                    ContentMD5=md5_header(data),
                    **condition,
                )
                return object_info(key, len(data), answer.get("ETag"))
        except ObjectNotFound as error:
            if etag is None:  # there is no such bucket
                raise
            raise ObjectChanged("the object was removed meanwhile", uri=self.uri, key=key, expected=etag) from error
        except StoreError as error:
            if isinstance(error, StoreUnavailable | AccessDenied | ObjectChanged) or error.details.get("status") != 501:
                raise
            return self.put(key, data)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        with self._lock:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._client.close()

    @contextlib.contextmanager
    def _asking(self, key: str | None = None) -> Iterator[None]:
        """Translate every error of the block, which calls botocore, into an error of a store."""
        with self._renewing(self._sessions.now), asking(uri=self.uri, key=key):
            yield

    @contextlib.contextmanager
    def _renewing(self, session: S3Session) -> Iterator[None]:
        """Let CredentialsExpired pass if another try has new credentials or a new clock; else raise AccessDenied."""
        try:
            yield
        except CredentialsExpired as error:
            if self._sessions.renew(session, error):
                raise
            raise AccessDenied(error.message, hint=error.hint, **error.details) from error

    def _full_key(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _open_wire(self) -> tuple[WireClient, Route]:
        with self._lock:
            if self._wire is None or self._route is None:
                with asking(uri=self.uri):
                    self._route = find_route(self._client, self._ref.bucket)
                proxy = find_proxy(self._client.meta.endpoint_url)  # botocore chooses its proxy by the same URL
                self._wire = WireClient(
                    Endpoint(self._route.host, self._route.port, self._route.tls, proxy),
                    uri=self.uri,
                    read_timeout_s=self._read_timeout_s,
                    connect_timeout_s=self._connect_timeout_s,
                    ca_bundle=self._sessions.now.ca_bundle or self._route.default_ca_bundle,
                )
            return self._wire, self._route

    def _which_is_missing(self, error: StoreError) -> StoreError:
        """Ask whether the key or the bucket is missing. The 404 of a HEAD has no body that would tell."""
        try:
            with asking(uri=self.uri):
                self._client.head_bucket(Bucket=self._ref.bucket)
        except ObjectNotFound:
            return store_error(404, "NoSuchBucket", "", {}, uri=self.uri)
        except AccessDenied:
            pass
        except StoreError:
            return error
        return store_error(404, "NoSuchKey", "", {}, uri=self.uri, key=error.details.get("key"))


class _View(io.RawIOBase):
    """A file over a buffer, which botocore sends without a copy of the whole."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def tell(self) -> int:
        return self._at


def _is_safe(key: str) -> bool:
    try:
        check_key(key)
    except StoreError:
        return False
    return True
