"""The upload of one object to S3, in order: one PUT for a small object, else a multipart upload."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from storage.errors import StoreError
from storage.stores.object_store import ObjectInfo
from storage.stores.s3.answers import asking, md5_header, object_info

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef


_MAX_PARTS = 10_000  # S3's own limit


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
        if number > _MAX_PARTS:
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
